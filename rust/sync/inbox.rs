//! A bounded ring from many threads to one: what reaches the owner of the cache state.
//!
//! The scheme is Dmitry Vyukov's bounded queue, with one consumer: each slot carries a stamp that says whose
//! turn it is, so a message is published by one store, and a producer claims its place by one
//! compare-and-swap. A position counts laps in its high bits and slots in its low bits; a slot at index `i`
//! runs through these stamps:
//!
//! ```text
//! position p = lap * one_lap + i
//!   stamp p            free: the producer that claims position p may write
//!   stamp p + 1        written: the receiver may read
//!   stamp p + one_lap  free again, one lap later
//! ```
//!
//! What is promised:
//! - A push never waits for another thread. It fails only if at some moment within the call every slot was
//!   taken: by a message, or by a push that had claimed it and was about to write. A pop that happened before
//!   the push has made its room. (With several consumers this would not hold: one that stalls between its
//!   claim and its release makes a ring that is nearly empty look full. Here the claim *is* the release.)
//! - Messages of one sender arrive in order. Those of different senders arrive in the order of their claims.
//! - A pop that finds nothing does not mean that no push has completed: messages behind a claimed and still
//!   unwritten slot wait for it. The stalled producer wakes the receiver after its own push, so none stays
//!   behind.

use super::primitive::{Arc, AtomicU64, CachePadded, Ordering, UnsafeCell};
use std::mem::MaybeUninit;

/// Makes a ring for `capacity` messages and gives out its two ends.
///
/// # Panics
/// If `capacity` is zero.
pub fn inbox<T: Send>(capacity: usize) -> (Sender<T>, Receiver<T>) {
    assert!(capacity > 0, "inbox capacity is 0; it must be at least 1");
    let ring = Arc::new(Ring::new(capacity));
    (
        Sender {
            ring: Arc::clone(&ring),
        },
        Receiver { ring, head: 0 },
    )
}

struct Slot<T> {
    /// Whose turn the slot is (see the module). Written by the producer that claimed it and by the receiver,
    /// in turn; read by every producer and the receiver.
    stamp: AtomicU64,
    /// The message, initialised exactly while the stamp says "written".
    value: UnsafeCell<MaybeUninit<T>>,
}

struct Ring<T> {
    /// The next position to claim. Written (compare-and-swap) and read by producers only.
    tail: CachePadded<AtomicU64>,
    slots: Box<[Slot<T>]>,
    /// Distance between the positions of one slot in two laps: a power of two, at least 2, at least the
    /// capacity.
    one_lap: u64,
}

// SAFETY: a value is reached only by the thread whose turn its slot's stamp says it is, and passes from
// sender to receiver by a release store and an acquire load; so the ring moves values between threads, and
// `T: Send` suffices.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as above; no `&T` is ever given to two threads, so `T: Sync` is not needed.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    fn new(capacity: usize) -> Self {
        let new_slot = |idx| Slot {
            stamp: AtomicU64::new(idx as u64),
            value: UnsafeCell::new(MaybeUninit::uninit()),
        };
        Self {
            tail: CachePadded(AtomicU64::new(0)),
            slots: (0..capacity).map(new_slot).collect(),
            one_lap: capacity.max(2).next_power_of_two() as u64,
        }
    }

    /// The index of the slot at `position`.
    #[inline]
    fn idx(&self, position: u64) -> usize {
        // The index is below the capacity, which is a usize.
        #[expect(clippy::cast_possible_truncation, reason = "masked to less than the capacity")]
        let idx = (position & (self.one_lap - 1)) as usize;
        idx
    }

    /// The position after `position`. 64 bits count laps for longer than any process lives, so it never
    /// wraps.
    #[inline]
    fn next(&self, position: u64) -> u64 {
        let idx = self.idx(position);
        if idx + 1 < self.slots.len() {
            position + 1
        } else {
            position - idx as u64 + self.one_lap
        }
    }
}

impl<T> Drop for Ring<T> {
    fn drop(&mut self) {
        for (idx, slot) in self.slots.iter().enumerate() {
            // Relaxed: the last handle is gone, and giving it up ordered every push and pop before this.
            let stamp = slot.stamp.load(Ordering::Relaxed);
            if (stamp - idx as u64) & (self.one_lap - 1) == 1 {
                // SAFETY: the stamp says "written", and `&mut self` says that nobody else looks.
                slot.value
                    .with_mut(|value| unsafe { (*value).assume_init_drop() });
            }
        }
    }
}

/// The sending end, cheap to clone: one for each thread, or one shared.
pub struct Sender<T> {
    ring: Arc<Ring<T>>,
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Self {
        Self {
            ring: Arc::clone(&self.ring),
        }
    }
}

impl<T: Send> Sender<T> {
    /// Appends a message. Never waits; lock-free: a retry means that another push got ahead.
    ///
    /// Messages pushed after the receiver is gone stay in the ring, and are dropped with the last sender.
    ///
    /// # Errors
    /// Gives the message back if the ring was full (see the module for what that promises).
    #[inline]
    pub fn push(&self, value: T) -> Result<(), T> {
        let ring = &*self.ring;
        // Relaxed: the position is a proposal; the stamp and the compare-and-swap decide.
        let mut position = ring.tail.0.load(Ordering::Relaxed);
        loop {
            let slot = &ring.slots[ring.idx(position)];
            // Acquire pairs with the release store in `pop`: the old message has been moved out before it is
            // overwritten. It also makes a stale `tail` impossible after a stamp from the future, so the loop
            // ends.
            let stamp = slot.stamp.load(Ordering::Acquire);
            if stamp < position {
                // The message of the lap before is still here. The receiver takes in order, so every slot is
                // taken.
                return Err(value);
            }
            if stamp > position {
                position = ring.tail.0.load(Ordering::Relaxed);
                continue;
            }
            // Relaxed: it only decides between producers; the message is published by its stamp.
            match ring.tail.0.compare_exchange_weak(
                position,
                ring.next(position),
                Ordering::Relaxed,
                Ordering::Relaxed,
            ) {
                Ok(_) => {
                    // SAFETY: the claim succeeded, and the stamp bars the receiver until the store below.
                    slot.value.with_mut(|cell| unsafe { (*cell).write(value) });
                    // Release pairs with the acquire loads in `pop` and `is_empty`: they see the message
                    // written.
                    slot.stamp.store(position + 1, Ordering::Release);
                    return Ok(());
                }
                Err(current) => position = current,
            }
        }
    }

    /// The number of messages that fit.
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }
}

/// The receiving end; there is only one.
pub struct Receiver<T> {
    ring: Arc<Ring<T>>,
    /// The next position to take. Plain, since nobody else reads it: producers learn of a pop from the slot's
    /// stamp.
    head: u64,
}

impl<T: Send> Receiver<T> {
    /// Takes the oldest message, if it is complete. Wait-free.
    #[inline]
    pub fn pop(&mut self) -> Option<T> {
        let ring = &*self.ring;
        let slot = &ring.slots[ring.idx(self.head)];
        // Acquire pairs with the release store in `push`: the message is written before it is read.
        if slot.stamp.load(Ordering::Acquire) != self.head + 1 {
            return None;
        }
        // SAFETY: the stamp says "written", so the value is initialised and the slot is the receiver's until
        // the store below, which also makes this the only time that the value is moved out.
        let value = slot.value.with(|cell| unsafe { (*cell).assume_init_read() });
        // Release pairs with the acquire load in `push`: the message is out before the slot is written again.
        slot.stamp.store(self.head + ring.one_lap, Ordering::Release);
        self.head = ring.next(self.head);
        Some(value)
    }

    /// Whether [`Self::pop`] would find nothing at this moment.
    #[inline]
    pub fn is_empty(&self) -> bool {
        let slot = &self.ring.slots[self.ring.idx(self.head)];
        // Acquire pairs with the release store in `push`: who sees a message here also sees what preceded it.
        slot.stamp.load(Ordering::Acquire) != self.head + 1
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn holds_exactly_its_capacity_and_keeps_order() {
        for capacity in [1, 2, 3, 4, 5, 7, 8] {
            let (sender, mut receiver) = inbox(capacity);
            assert_eq!(sender.capacity(), capacity);
            // Several laps, starting at every offset.
            for lap in 0..2 * capacity + 3 {
                assert!(receiver.is_empty());
                for item in 0..capacity {
                    assert_eq!(sender.push((lap, item)), Ok(()));
                }
                assert!(!receiver.is_empty());
                assert_eq!(sender.push((lap, capacity)), Err((lap, capacity)));
                for item in 0..capacity {
                    assert_eq!(receiver.pop(), Some((lap, item)));
                }
                assert_eq!(receiver.pop(), None);
                assert_eq!(sender.push((lap, 0)), Ok(()));
                assert_eq!(receiver.pop(), Some((lap, 0)));
            }
        }
    }

    #[test]
    fn one_pop_makes_room_for_one_push() {
        let (sender, mut receiver) = inbox(3);
        for item in 0..3 {
            sender.push(item).unwrap();
        }
        for item in 3..50 {
            assert_eq!(receiver.pop(), Some(item - 3));
            assert_eq!(sender.push(item), Ok(()));
            assert_eq!(sender.push(item), Err(item));
        }
    }

    #[test]
    fn what_was_not_taken_is_dropped_once() {
        for capacity in 1..6 {
            for num_popped in 0..=capacity {
                let message = std::sync::Arc::new(());
                let (sender, mut receiver) = inbox(capacity);
                for _ in 0..capacity {
                    sender.push(std::sync::Arc::clone(&message)).unwrap();
                }
                for _ in 0..num_popped {
                    receiver.pop().unwrap();
                }
                sender.push(std::sync::Arc::clone(&message)).ok();
                let num_inside = (capacity - num_popped + 1).min(capacity);
                assert_eq!(std::sync::Arc::strong_count(&message), 1 + num_inside);
                drop(receiver);
                assert_eq!(std::sync::Arc::strong_count(&message), 1 + num_inside);
                drop(sender);
                assert_eq!(std::sync::Arc::strong_count(&message), 1);
            }
        }
    }

    #[test]
    #[should_panic(expected = "inbox capacity is 0")]
    fn refuses_no_capacity() {
        inbox::<u32>(0);
    }
}
