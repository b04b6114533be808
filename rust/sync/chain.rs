//! A list that any thread pushes to and the owner takes whole.
//!
//! A push is one compare-and-swap on the head, taking everything is one swap. Nobody ever removes a single
//! node, so the head that a push replaces can only have grown or been emptied meanwhile; if it comes back to
//! the same address, linking to it is still right, because a push never looks inside. Hence no ABA problem,
//! and no tag.

use super::primitive::{AtomicPtr, Ordering, UnsafeCell};
use std::fmt;
use std::iter::FusedIterator;
use std::marker::PhantomData;
use std::ptr;

struct Node<T> {
    /// The node pushed before this one, or null. In a cell so that the models see who writes and who follows
    /// it: written by the thread that pushes, before the node is published, then only by the thread that took
    /// it.
    next: UnsafeCell<*mut Node<T>>,
    value: T,
}

/// An unbounded list with many writers, emptied at one go.
pub struct PushChain<T> {
    /// The newest node, or null. Written by every thread that pushes and by the owner, which takes it; read
    /// by both.
    head: AtomicPtr<Node<T>>,
    /// The chain owns values of `T`, which travel from the thread that pushes to the one that takes.
    owns: PhantomData<T>,
}

// SAFETY: a node belongs to its pusher until the compare-and-swap publishes it and to the taker from its swap
// on; so values only move between threads, and `T: Send` suffices.
unsafe impl<T: Send> Send for PushChain<T> {}
// SAFETY: as above; `&PushChain` gives out no `&T`.
unsafe impl<T: Send> Sync for PushChain<T> {}

impl<T: Send> PushChain<T> {
    /// An empty chain.
    pub fn new() -> Self {
        Self {
            head: AtomicPtr::new(ptr::null_mut()),
            owns: PhantomData,
        }
    }

    /// Adds a value. Any thread; never fails; lock-free.
    pub fn push(&self, value: T) {
        let node = Box::into_raw(Box::new(Node {
            next: UnsafeCell::new(ptr::null_mut()),
            value,
        }));
        // Relaxed: the old head is copied into the node, never followed.
        let mut head = self.head.load(Ordering::Relaxed);
        loop {
            // SAFETY: the node has not been published, so it is still this thread's alone.
            unsafe { (*node).next.with_mut(|next| *next = head) };
            // Release pairs with the acquire swap in `take_all`: the taker sees this node written. It sees
            // the older ones too, since a read-modify-write continues the release sequence of the push that
            // it replaces.
            match self
                .head
                .compare_exchange_weak(head, node, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(current) => head = current,
            }
        }
    }

    /// Takes all values, in the order in which they were pushed. Wait-free, apart from the walk over what was
    /// taken.
    pub fn take_all(&self) -> Taken<T> {
        // A look before the swap, so that an idle chain costs no write. A push that happened before is seen
        // by it; relaxed, since a null pointer is not followed.
        if self.is_empty() {
            return Taken {
                next: ptr::null_mut(),
                owns: PhantomData,
            };
        }
        // Acquire pairs with the release in `push`.
        let newest = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        Taken {
            next: reverse(newest),
            owns: PhantomData,
        }
    }

    /// Whether there is nothing to take at this moment.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.head.load(Ordering::Relaxed).is_null()
    }
}

/// Turns the links of a list that the caller owns, and gives its other end.
fn reverse<T>(mut node: *mut Node<T>) -> *mut Node<T> {
    let mut reversed = ptr::null_mut();
    while !node.is_null() {
        // SAFETY: the caller took the list, so every node in it is its own.
        let next = unsafe { (*node).next.with_mut(|next| ptr::replace(next, reversed)) };
        reversed = node;
        node = next;
    }
    reversed
}

impl<T: Send> Default for PushChain<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Drop for PushChain<T> {
    fn drop(&mut self) {
        // Acquire pairs with the release in `push`; nobody else is left to race with it.
        let newest = self.head.swap(ptr::null_mut(), Ordering::Acquire);
        drop(Taken {
            next: newest,
            owns: PhantomData,
        });
    }
}

impl<T> fmt::Debug for PushChain<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PushChain").finish_non_exhaustive()
    }
}

/// What [`PushChain::take_all`] took. Values not asked for are dropped with it.
pub struct Taken<T> {
    next: *mut Node<T>,
    owns: PhantomData<T>,
}

// SAFETY: the nodes belong to this iterator alone, so it may go wherever its values may.
unsafe impl<T: Send> Send for Taken<T> {}

impl<T> Iterator for Taken<T> {
    type Item = T;

    fn next(&mut self) -> Option<T> {
        if self.next.is_null() {
            return None;
        }
        // SAFETY: every node came from `Box::into_raw` and is this iterator's own; it is turned back once,
        // since the iterator moves on.
        let node = unsafe { Box::from_raw(self.next) };
        // SAFETY: as above; nobody writes the link any more.
        self.next = node.next.with(|next| unsafe { *next });
        Some(node.value)
    }
}

impl<T> FusedIterator for Taken<T> {}

impl<T> Drop for Taken<T> {
    fn drop(&mut self) {
        for value in self.by_ref() {
            drop(value);
        }
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn takes_everything_in_push_order() {
        let chain = PushChain::new();
        assert!(chain.is_empty());
        assert_eq!(chain.take_all().next(), None);
        for value in 0..5 {
            chain.push(value);
        }
        assert!(!chain.is_empty());
        assert_eq!(chain.take_all().collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
        assert!(chain.is_empty());
        chain.push(7);
        assert_eq!(chain.take_all().collect::<Vec<_>>(), [7]);
    }

    #[test]
    fn drops_what_nobody_took() {
        let value = Arc::new(());
        let chain = PushChain::new();
        for _ in 0..4 {
            chain.push(Arc::clone(&value));
        }
        let mut taken = chain.take_all();
        drop(taken.next());
        chain.push(Arc::clone(&value));
        assert_eq!(Arc::strong_count(&value), 5);
        drop(taken);
        assert_eq!(Arc::strong_count(&value), 2);
        drop(chain);
        assert_eq!(Arc::strong_count(&value), 1);
    }
}
