//! Request ids, and the wish to abort a request: one word a slot.
//!
//! A request takes a slot when it is submitted and gives it back when it has ended, so the capacity bounds
//! queued and running requests together. The id names the slot and its generation, and the slot's word holds
//! the generation beside the state. An abort is one compare-and-swap from "live in generation g" to "aborted
//! in generation g": if the request is over, the generation has moved on and nothing happens, least of all to
//! the slot's next holder.
//!
//! ```text
//!            acquire               abort
//! free, g  ---------->  live, g  --------->  aborted, g
//!    ^                     |                     |
//!    |       retire: g + 1 |                     | retire: g + 1
//!    +---------------------+---------------------+
//! ```
//!
//! Free slots hang in a list (Treiber's stack over slot indices). Several threads pop from it, so its head
//! carries a tag that changes with every operation: a pop that was overtaken by "popped, popped, pushed back"
//! must not succeed, for the link it read is old. The tag has 32 bits; it would have to go round once while
//! one thread stands between its load and its compare-and-swap.

use super::primitive::{AtomicU32, AtomicU64, CachePadded, Ordering};
use crate::ids::RequestId;
use std::fmt;

/// States of a slot, the low half of its word; the high half is the generation.
const FREE: u32 = 0;
const LIVE: u32 = 1;
const ABORTED: u32 = 2;

/// The end of the free list. Never a slot, since the capacity is at most this.
const NIL: u32 = u32::MAX;

/// Two halves in one word: generation and state of a slot, or tag and first slot of the free list.
const fn pack(high: u32, low: u32) -> u64 {
    ((high as u64) << 32) | low as u64
}

const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

const fn low(word: u64) -> u32 {
    (word & 0xffff_ffff) as u32
}

struct Slot {
    /// Generation and state. Written by the thread that acquires the slot, by any thread that aborts, and by
    /// the request's owner, which retires it; read by any thread.
    word: AtomicU64,
    /// The next free slot, while this one is free. Written by the thread that frees it; read by every thread
    /// that acquires, even too late, in which case the tag makes it void.
    next: AtomicU32,
}

/// The slots of all requests that were submitted and have not ended.
pub struct RequestFlags {
    /// Tag and first free slot. Written and read by every thread that acquires or retires.
    free: CachePadded<AtomicU64>,
    /// Not zero if an abort was raised since the owner last asked. Written by any thread that aborts and by
    /// the owner, which clears it; read by the owner.
    any_aborted: CachePadded<AtomicU32>,
    slots: Box<[Slot]>,
}

impl RequestFlags {
    /// Flags for at most `capacity` requests at a time.
    ///
    /// # Panics
    /// If `capacity` is 0 or does not fit into 32 bits.
    pub fn new(capacity: usize) -> Self {
        let num_slots = u32::try_from(capacity).unwrap_or(0);
        assert!(
            num_slots > 0,
            "request capacity is {capacity}; allowed are 1 to {}",
            u32::MAX
        );
        let new_slot = |idx: u32| Slot {
            word: AtomicU64::new(pack(0, FREE)),
            next: AtomicU32::new(if idx + 1 < num_slots { idx + 1 } else { NIL }),
        };
        Self {
            free: CachePadded(AtomicU64::new(pack(0, 0))),
            any_aborted: CachePadded(AtomicU32::new(0)),
            slots: (0..num_slots).map(new_slot).collect(),
        }
    }

    /// Takes a free slot and gives the id of its new holder, or `None` if `capacity` requests are live. Any
    /// thread; lock-free.
    pub fn acquire(&self) -> Option<RequestId> {
        // Acquire (here and when the compare-and-swap fails) pairs with the release in `release_slot`: the
        // link of the first slot is written before it is read.
        let mut head = self.free.0.load(Ordering::Acquire);
        let slot_idx = loop {
            let first = low(head);
            if first == NIL {
                return None;
            }
            // Relaxed: ordered by the load of the head. If the slot was taken meanwhile the link may be
            // anything, and the tag makes the exchange fail.
            let second = self.slots[first as usize].next.load(Ordering::Relaxed);
            let new = pack(high(head).wrapping_add(1), second);
            // Nothing to release: a pop publishes no link of its own, and as a read-modify-write it hands on
            // what the pushes before it released.
            match self
                .free
                .0
                .compare_exchange_weak(head, new, Ordering::Acquire, Ordering::Acquire)
            {
                Ok(_) => break first,
                Err(current) => head = current,
            }
        };
        let word = &self.slots[slot_idx as usize].word;
        // Relaxed: the acquire above ordered the store in `retire` before this load, and until the id is
        // handed out nobody else changes the word: an abort needs to find "live".
        let generation = high(word.load(Ordering::Relaxed));
        // Relaxed: publishes nothing but itself; whoever is given the id is given it through something that
        // synchronises.
        word.store(pack(generation, LIVE), Ordering::Relaxed);
        Some(RequestId::new(slot_idx, generation))
    }

    /// Asks for the end of a request. Any thread; wait-free; the owner sees it when it next scans.
    ///
    /// Returns whether this call raised the flag: `false` if the request is over, or was already aborted.
    /// `true` does not say that the request ends as aborted: it may be ending of itself at this moment.
    pub fn abort(&self, id: RequestId) -> bool {
        let Some(slot) = self.slots.get(id.slot() as usize) else {
            return false;
        };
        let live = pack(id.generation(), LIVE);
        let aborted = pack(id.generation(), ABORTED);
        // Release pairs with the acquire load in `is_aborted`.
        if slot
            .word
            .compare_exchange(live, aborted, Ordering::Release, Ordering::Relaxed)
            .is_err()
        {
            return false;
        }
        // The bell after the flag. Release pairs with the acquire swap in `take_any_aborted`. An exchange,
        // not a store: a store would end the release sequence of another abort's, and the owner, hearing one
        // bell, might miss the other flag.
        self.any_aborted.0.swap(1, Ordering::Release);
        true
    }

    /// Whether the request of this very id is aborted and not yet retired. Any thread.
    #[inline]
    pub fn is_aborted(&self, id: RequestId) -> bool {
        // Acquire pairs with the release in `abort`: the owner also sees what preceded the abort.
        self.slots
            .get(id.slot() as usize)
            .is_some_and(|slot| slot.word.load(Ordering::Acquire) == pack(id.generation(), ABORTED))
    }

    /// Whether an abort was raised since the last call. Owner only: on `true` it must look at the flags of
    /// all its requests, since the next call answers `false`. An abort that comes during that scan is seen by
    /// it, or reported by the next call.
    ///
    /// A request may be aborted on its way through the inbox, and its bell be taken before it arrives: so the
    /// owner also asks [`Self::is_aborted`] for each request that it receives.
    #[inline]
    pub fn take_any_aborted(&self) -> bool {
        // A look first, so that the common answer costs no write. Relaxed: an abort that happened before this
        // call is seen; another is in time for the next one. Acquire pairs with the release swap in `abort`:
        // every flag whose bell this clears is visible to the scan.
        self.any_aborted.0.load(Ordering::Relaxed) != 0 && self.any_aborted.0.swap(0, Ordering::Acquire) != 0
    }

    /// Ends an id and frees its slot for the next generation. To be called once for each id, by whoever holds
    /// the request: its submitter until it is in the inbox (which may refuse it), the owner of the cache
    /// state from then on.
    ///
    /// # Panics
    /// If the id is not that of a live request.
    pub fn retire(&self, id: RequestId) {
        let slot = &self.slots[id.slot() as usize];
        // Relaxed: only the holder changes the generation, or takes the slot to and from "free".
        let mut word = slot.word.load(Ordering::Relaxed);
        let next = pack(id.generation().wrapping_add(1), FREE);
        loop {
            assert!(
                high(word) == id.generation() && low(word) != FREE,
                "{id:?} is retired twice: its slot is in generation {}",
                high(word)
            );
            // Fails if an abort comes in between; it is for a request that has ended, and this overwrites it.
            // Relaxed: the release in `release_slot` publishes the word to the slot's next holder.
            match slot
                .word
                .compare_exchange_weak(word, next, Ordering::Relaxed, Ordering::Relaxed)
            {
                Ok(_) => break,
                Err(current) => word = current,
            }
        }
        self.release_slot(id.slot());
    }

    /// The number of ids acquired and not retired. Any thread; already outdated when it returns.
    pub fn num_live(&self) -> usize {
        let is_live = |slot: &&Slot| low(slot.word.load(Ordering::Relaxed)) != FREE;
        self.slots.iter().filter(is_live).count()
    }

    /// The number of requests that may be live at a time.
    pub fn capacity(&self) -> usize {
        self.slots.len()
    }

    /// Puts a slot in front of the free list. Lock-free.
    fn release_slot(&self, slot_idx: u32) {
        let next = &self.slots[slot_idx as usize].next;
        // Relaxed: the head is copied, its first slot is not looked at.
        let mut head = self.free.0.load(Ordering::Relaxed);
        loop {
            // Relaxed: published by the release below.
            next.store(low(head), Ordering::Relaxed);
            let new = pack(high(head).wrapping_add(1), slot_idx);
            // Release pairs with the acquire operations in `acquire`: link and generation are written before
            // the slot can be taken.
            match self
                .free
                .0
                .compare_exchange_weak(head, new, Ordering::Release, Ordering::Relaxed)
            {
                Ok(_) => return,
                Err(current) => head = current,
            }
        }
    }
}

impl fmt::Debug for RequestFlags {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RequestFlags")
            .field("capacity", &self.capacity())
            .field("num_live", &self.num_live())
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(pagedkv_loom)))]
mod tests {
    use super::*;

    #[test]
    fn gives_out_every_slot_once() {
        let flags = RequestFlags::new(3);
        let ids: Vec<_> = (0..3).map(|_| flags.acquire().unwrap()).collect();
        assert_eq!(
            ids.iter()
                .map(|id| (id.slot(), id.generation()))
                .collect::<Vec<_>>(),
            [(0, 0), (1, 0), (2, 0)]
        );
        assert_eq!(flags.acquire(), None);
        assert_eq!(flags.num_live(), 3);
        flags.retire(ids[1]);
        assert_eq!(flags.num_live(), 2);
        assert_eq!(flags.acquire(), Some(RequestId::new(1, 1)));
        assert_eq!(flags.acquire(), None);
    }

    #[test]
    fn an_abort_is_raised_once_and_for_its_generation_only() {
        let flags = RequestFlags::new(1);
        let first = flags.acquire().unwrap();
        assert!(!flags.take_any_aborted());
        assert!(flags.abort(first));
        assert!(!flags.abort(first));
        assert!(flags.is_aborted(first));
        assert!(flags.take_any_aborted());
        assert!(!flags.take_any_aborted());
        assert!(flags.is_aborted(first));
        flags.retire(first);
        assert!(!flags.is_aborted(first));
        assert!(!flags.abort(first));
        let second = flags.acquire().unwrap();
        assert!(!flags.abort(first));
        assert!(!flags.is_aborted(second));
        assert!(!flags.take_any_aborted());
        assert!(!flags.abort(RequestId::new(1, 0)), "a slot that does not exist");
        assert!(
            !flags.abort(RequestId::new(0, 2)),
            "a generation that has not come yet"
        );
        assert!(flags.abort(second));
    }

    #[test]
    #[should_panic(expected = "is retired twice")]
    fn refuses_a_second_retirement() {
        let flags = RequestFlags::new(2);
        let id = flags.acquire().unwrap();
        flags.retire(id);
        flags.retire(id);
    }

    #[test]
    #[should_panic(expected = "request capacity is 0")]
    fn refuses_no_capacity() {
        RequestFlags::new(0);
    }
}
