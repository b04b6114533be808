//! A bounded ring from one thread to one other: what happened in a step, on its way from the owner.
//!
//! Each end has a position that only it writes and the other reads, and a slot belongs to whoever its distance
//! from both says; so a push and a pop are a copy and one store each, and neither end ever waits.
//!
//! ```text
//!          head              tail
//!   ... free | taken by nobody yet | free ...      tail - head <= capacity
//!           consumer's      producer's
//! ```
//!
//! A full ring refuses. What was refused stays with the producer, and no value is ever lost or overwritten. So
//! that the producer need not come back to look, a refusal leaves a note, and the consumer asks for it after it
//! has made room ([`Consumer::take_wish`]) and wakes whoever wrote it.

use super::primitive::{Arc, AtomicU32, AtomicU64, CachePadded, Ordering, UnsafeCell, fence};
use std::fmt;
use std::mem::MaybeUninit;

/// Makes a ring for at least `capacity` values, rounded up to a power of two, and gives out its two ends.
///
/// Values are plain data, so that one which nobody takes needs no destructor.
///
/// # Panics
/// If `capacity` is zero.
pub fn ring<T: Copy + Send>(capacity: usize) -> (Producer<T>, Consumer<T>) {
    assert!(capacity > 0, "ring capacity is 0; it must be at least 1");
    let new_slot = |_| UnsafeCell::new(MaybeUninit::uninit());
    let ring = Arc::new(Ring {
        tail: CachePadded(AtomicU64::new(0)),
        head: CachePadded(AtomicU64::new(0)),
        wish: CachePadded(AtomicU32::new(0)),
        slots: (0..capacity.next_power_of_two()).map(new_slot).collect(),
    });
    let consumer = Consumer {
        ring: Arc::clone(&ring),
        head: 0,
        known_tail: 0,
    };
    let producer = Producer {
        ring,
        tail: 0,
        known_head: 0,
    };
    (producer, consumer)
}

struct Ring<T> {
    /// Values pushed. Written by the producer, read by the consumer.
    tail: CachePadded<AtomicU64>,
    /// Values taken. Written by the consumer, read by the producer.
    head: CachePadded<AtomicU64>,
    /// Not zero if the producer was refused since the consumer last asked. Written by both, read by the consumer.
    wish: CachePadded<AtomicU32>,
    /// A power of two of them. The value at position `p` is initialised while `head <= p < tail`.
    slots: Box<[UnsafeCell<MaybeUninit<T>>]>,
}

// SAFETY: a slot is written by the one producer while its position is not below `tail`, and read by the one
// consumer while it is; both positions pass by a release store and an acquire load. So the ring moves values
// between threads, and `T: Send` suffices.
unsafe impl<T: Send> Send for Ring<T> {}
// SAFETY: as above; no `&T` is ever given to two threads.
unsafe impl<T: Send> Sync for Ring<T> {}

impl<T> Ring<T> {
    #[inline]
    fn slot(&self, position: u64) -> &UnsafeCell<MaybeUninit<T>> {
        let mask = self.slots.len() as u64 - 1;
        #[expect(clippy::cast_possible_truncation, reason = "masked to less than the length")]
        let idx = (position & mask) as usize;
        &self.slots[idx]
    }
}

/// The end that pushes; there is only one.
pub struct Producer<T> {
    ring: Arc<Ring<T>>,
    /// The next position to write; `Ring::tail` follows it.
    tail: u64,
    /// `Ring::head` as it was last read, so that most pushes need not look.
    known_head: u64,
}

impl<T: Copy + Send> Producer<T> {
    /// Appends a value. Wait-free.
    ///
    /// # Errors
    /// Gives the value back if the ring was full. The consumer finds the note of it after its next pops, unless
    /// those happened in time for this call.
    #[inline]
    pub fn push(&mut self, value: T) -> Result<(), T> {
        if self.is_full() && !self.finds_room() {
            return Err(value);
        }
        // SAFETY: the position is at `tail` and less than a lap from a head that was seen, so the consumer has
        // taken what was here and does not look before the store below.
        self.ring
            .slot(self.tail)
            .with_mut(|cell| unsafe { (*cell).write(value) });
        self.tail += 1;
        // Release pairs with the acquire load in `pop_if`: the value is written before it is read.
        self.ring.tail.0.store(self.tail, Ordering::Release);
        Ok(())
    }

    /// The number of values that fit.
    pub fn capacity(&self) -> usize {
        self.ring.slots.len()
    }

    #[inline]
    fn is_full(&self) -> bool {
        self.tail - self.known_head == self.ring.slots.len() as u64
    }

    /// Looks where the consumer is, and leaves a note if that is no further.
    #[cold]
    fn finds_room(&mut self) -> bool {
        // Acquire pairs with the release store in `pop_if`: the slot was read before it is written again.
        self.known_head = self.ring.head.0.load(Ordering::Acquire);
        if !self.is_full() {
            return true;
        }
        // Relaxed: the fences order it.
        self.ring.wish.0.store(1, Ordering::Relaxed);
        // Pairs with the fence in `take_wish`. Whichever comes first, the other side sees what preceded it: this
        // one the new head, or the consumer the note.
        fence(Ordering::SeqCst);
        self.known_head = self.ring.head.0.load(Ordering::Acquire);
        !self.is_full()
    }
}

impl<T> fmt::Debug for Producer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Producer").finish_non_exhaustive()
    }
}

/// The end that pops; there is only one.
pub struct Consumer<T> {
    ring: Arc<Ring<T>>,
    /// The next position to read; `Ring::head` follows it.
    head: u64,
    /// `Ring::tail` as it was last read.
    known_tail: u64,
}

impl<T: Copy + Send> Consumer<T> {
    /// Takes the oldest value if there is one and it is `wanted`. Wait-free. After a number of pops,
    /// [`Self::take_wish`] has to be asked.
    #[inline]
    pub fn pop_if(&mut self, wanted: impl FnOnce(&T) -> bool) -> Option<T> {
        if self.head == self.known_tail {
            // Acquire pairs with the release store in `push`.
            self.known_tail = self.ring.tail.0.load(Ordering::Acquire);
            if self.head == self.known_tail {
                return None;
            }
        }
        // SAFETY: the position is below a tail that was seen, so the value is written, and the producer does not
        // touch it before the store below.
        let value = self
            .ring
            .slot(self.head)
            .with(|cell| unsafe { (*cell).assume_init_read() });
        if !wanted(&value) {
            return None;
        }
        self.head += 1;
        // Release pairs with the acquire loads in `finds_room`: the value is out before its slot is written again.
        self.ring.head.0.store(self.head, Ordering::Release);
        Some(value)
    }

    /// Whether the producer was refused since the last call. If so it has something left, and the caller wakes it:
    /// the pops before this call have made room.
    #[inline]
    pub fn take_wish(&mut self) -> bool {
        // Pairs with the fence in `finds_room`; it orders the store of the head before the look at the note.
        fence(Ordering::SeqCst);
        // Relaxed: the note says nothing but itself, and is written again after every refusal.
        self.ring.wish.0.load(Ordering::Relaxed) != 0 && self.ring.wish.0.swap(0, Ordering::Relaxed) != 0
    }
}

impl<T> fmt::Debug for Consumer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").finish_non_exhaustive()
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn holds_its_capacity_and_keeps_order() {
        for capacity in [1, 2, 3, 8] {
            let (mut producer, mut consumer) = ring(capacity);
            let capacity = producer.capacity();
            for lap in 0..2 * capacity + 3 {
                for item in 0..capacity {
                    assert_eq!(producer.push((lap, item)), Ok(()));
                }
                assert!(!consumer.take_wish());
                assert_eq!(producer.push((lap, capacity)), Err((lap, capacity)));
                for item in 0..capacity {
                    assert_eq!(consumer.pop_if(|_| true), Some((lap, item)));
                }
                assert_eq!(consumer.pop_if(|_| true), None);
                assert!(consumer.take_wish());
                assert!(!consumer.take_wish());
                assert_eq!(producer.push((lap, 0)), Ok(()));
                assert_eq!(consumer.pop_if(|_| true), Some((lap, 0)));
            }
        }
    }

    #[test]
    fn what_is_not_wanted_stays() {
        let (mut producer, mut consumer) = ring(4);
        for value in 1..=3 {
            producer.push(value).unwrap();
        }
        assert_eq!(consumer.pop_if(|&value| value < 2), Some(1));
        assert_eq!(consumer.pop_if(|&value| value < 2), None);
        assert_eq!(consumer.pop_if(|&value| value < 3), Some(2));
        assert_eq!(consumer.pop_if(|_| true), Some(3));
    }

    #[test]
    #[should_panic(expected = "ring capacity is 0")]
    fn refuses_no_capacity() {
        ring::<u32>(0);
    }
}
