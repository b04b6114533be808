//! Faults on purpose: a model that passes is worth something only if it would have failed. Each structure
//! here is a small likeness of one in `rust/sync` with a switch for the one detail that matters; the right
//! setting passes, the wrong one must be caught.

use crate::check;
use loom::cell::UnsafeCell;
use loom::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering, fence};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;

/// A free list over two slots, as in `flags.rs`. Without the tag its exchange succeeds on a head that left
/// and came back.
struct FreeList {
    head: AtomicU64,
    next: [AtomicU32; 2],
    tag_step: u64,
}

impl FreeList {
    fn new(tagged: bool) -> Self {
        let next = [AtomicU32::new(1), AtomicU32::new(u32::MAX)];
        Self {
            head: AtomicU64::new(0),
            next,
            tag_step: u64::from(tagged) << 32,
        }
    }

    fn replace(&self, head: u64, slot: u32) -> bool {
        let tag = (head & !0xffff_ffff).wrapping_add(self.tag_step);
        self.head
            .compare_exchange(head, tag | u64::from(slot), Ordering::AcqRel, Ordering::Acquire)
            .is_ok()
    }

    fn pop(&self) -> Option<u32> {
        loop {
            let head = self.head.load(Ordering::Acquire);
            let first = u32::try_from(head & 0xffff_ffff).unwrap();
            let next = self.next.get(first as usize)?.load(Ordering::Acquire);
            if self.replace(head, next) {
                return Some(first);
            }
        }
    }

    fn push(&self, slot: u32) {
        loop {
            let head = self.head.load(Ordering::Acquire);
            self.next[slot as usize].store(u32::try_from(head & 0xffff_ffff).unwrap(), Ordering::Release);
            if self.replace(head, slot) {
                return;
            }
        }
    }
}

fn model_free_list(tagged: bool) {
    check(move || {
        let list = Arc::new(FreeList::new(tagged));
        let other = Arc::clone(&list);
        let thread = thread::spawn(move || {
            let first = other.pop();
            let second = other.pop();
            if let Some(slot) = first {
                other.push(slot);
            }
            second
        });
        let mine = [list.pop(), list.pop()];
        let theirs = thread.join().unwrap();
        let mut held: Vec<_> = mine.into_iter().chain([theirs]).flatten().collect();
        let num_held = held.len();
        held.sort_unstable();
        held.dedup();
        assert_eq!(held.len(), num_held, "a slot has two holders");
    });
}

#[test]
fn a_tagged_free_list_passes() {
    model_free_list(true);
}

#[test]
#[should_panic(expected = "a slot has two holders")]
fn a_free_list_without_tag_is_caught() {
    model_free_list(false);
}

/// What is wrong with a [`Bed`].
#[derive(Clone, Copy, PartialEq)]
enum Fault {
    None,
    /// The owner looks at the token before it takes the lock, and not again.
    LooksTooEarly,
    /// A waker that sees a token leaves it at that, although the owner may be taking that one.
    SkipsIfToken,
}

/// A parker as in `parker.rs`, without its fast paths.
struct Bed {
    token: AtomicBool,
    lock: Mutex<()>,
    wake: Condvar,
    fault: Fault,
}

impl Bed {
    fn park(&self) {
        if self.fault == Fault::LooksTooEarly {
            if !self.token.swap(false, Ordering::Acquire) {
                drop(self.wake.wait(self.lock.lock().unwrap()).unwrap());
            }
            return;
        }
        let mut guard = self.lock.lock().unwrap();
        while !self.token.swap(false, Ordering::Acquire) {
            guard = self.wake.wait(guard).unwrap();
        }
    }

    fn unpark(&self) {
        if self.fault == Fault::SkipsIfToken && self.token.load(Ordering::Relaxed) {
            return;
        }
        self.token.swap(true, Ordering::Release);
        drop(self.lock.lock().unwrap());
        self.wake.notify_one();
    }
}

/// Two wakers publish a relaxed flag each; the owner sleeps until it sees both.
fn model_bed(fault: Fault) {
    check(move || {
        // Leaked, because a deadlock unwinds where loom can run no destructor.
        let bed: &Bed = Box::leak(Box::new(Bed {
            token: AtomicBool::new(false),
            lock: Mutex::new(()),
            wake: Condvar::new(),
            fault,
        }));
        let flags: &[AtomicBool; 2] = Box::leak(Box::new([false, false].map(AtomicBool::new)));
        let threads = flags.each_ref().map(|flag| {
            thread::spawn(move || {
                flag.store(true, Ordering::Relaxed);
                bed.unpark();
            })
        });
        while !flags.iter().all(|flag| flag.load(Ordering::Relaxed)) {
            bed.park();
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn a_parker_without_fault_passes() {
    model_bed(Fault::None);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_look_before_the_lock_is_caught() {
    model_bed(Fault::LooksTooEarly);
}

#[test]
#[should_panic(expected = "deadlock")]
fn a_skipped_wake_up_is_caught() {
    model_bed(Fault::SkipsIfToken);
}

/// Two aborts and one bell, as in `flags.rs`. A bell rung by a store ends the release sequence of the other
/// abort's.
fn model_bell(exchange: bool) {
    check(move || {
        let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let bell = Arc::new(AtomicBool::new(false));
        let threads = [0, 1].map(|idx: usize| {
            let (flags, bell) = (Arc::clone(&flags), Arc::clone(&bell));
            thread::spawn(move || {
                flags[idx].store(true, Ordering::Relaxed);
                if exchange {
                    bell.swap(true, Ordering::Release);
                } else {
                    bell.store(true, Ordering::Release);
                }
            })
        });
        let mut seen = [false; 2];
        let mut look = || {
            if bell.swap(false, Ordering::Acquire) {
                for (seen, flag) in seen.iter_mut().zip(flags.iter()) {
                    *seen |= flag.load(Ordering::Acquire);
                }
            }
        };
        look();
        for thread in threads {
            thread.join().unwrap();
        }
        look();
        assert_eq!(seen, [true; 2], "an abort was overlooked");
    });
}

#[test]
fn a_bell_rung_by_exchange_passes() {
    model_bell(true);
}

#[test]
#[should_panic(expected = "an abort was overlooked")]
fn a_bell_rung_by_store_is_caught() {
    model_bell(false);
}

/// One slot of the ring of `inbox.rs`: a message behind a stamp.
struct Slot {
    stamp: AtomicU64,
    value: UnsafeCell<u32>,
}

// SAFETY: the stamp says whose turn the cell is; whether it says so soundly is what loom checks here.
unsafe impl Sync for Slot {}

fn model_slot(publish: Ordering) {
    check(move || {
        let slot = Arc::new(Slot {
            stamp: AtomicU64::new(0),
            value: UnsafeCell::new(0),
        });
        let other = Arc::clone(&slot);
        let thread = thread::spawn(move || {
            // SAFETY: stamp 0 says that the writer is alone.
            other.value.with_mut(|value| unsafe { *value = 7 });
            other.stamp.store(1, publish);
        });
        if slot.stamp.load(Ordering::Acquire) == 1 {
            // SAFETY: stamp 1 says that the message is complete.
            assert_eq!(slot.value.with(|value| unsafe { *value }), 7);
        }
        thread.join().unwrap();
    });
}

#[test]
fn a_released_stamp_passes() {
    model_slot(Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_stamp_is_caught() {
    model_slot(Ordering::Relaxed);
}

/// The two copies of `snapshot.rs`, with or without the fence of the writer.
fn model_snapshot(fenced: bool) {
    check(move || {
        let version = Arc::new(AtomicU64::new(0));
        let copies = Arc::new([0, 0].map(|_| [AtomicU64::new(0), AtomicU64::new(0)]));
        let (version_of_owner, copies_of_owner) = (Arc::clone(&version), Arc::clone(&copies));
        let owner = thread::spawn(move || {
            for value in 1..=2 {
                if fenced {
                    fence(Ordering::Release);
                }
                for word in &copies_of_owner[usize::from(value % 2 == 1)] {
                    word.store(value, Ordering::Relaxed);
                }
                version_of_owner.store(value, Ordering::Release);
            }
        });
        let before = version.load(Ordering::Acquire);
        let words = copies[usize::from(before % 2 == 1)]
            .each_ref()
            .map(|word| word.load(Ordering::Relaxed));
        fence(Ordering::Acquire);
        if version.load(Ordering::Relaxed) == before {
            assert_eq!(words, [before; 2], "a torn snapshot");
        }
        owner.join().unwrap();
    });
}

#[test]
fn a_fenced_snapshot_passes() {
    model_snapshot(true);
}

#[test]
#[should_panic(expected = "a torn snapshot")]
fn a_snapshot_without_fence_is_caught() {
    model_snapshot(false);
}

/// The job of a board, and the result of its piece.
struct Shared([UnsafeCell<u32>; 2]);

// SAFETY: the word and the count say whose turn the cells are; whether they say so soundly is what loom checks here.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for Shared {}

/// The board of `board.rs` with one piece, which the worker does. The owner then reads what the worker wrote, and
/// replaces the job that the worker read. `take` is the exchange that takes the piece, `finish` the decrement.
fn model_board(take: Ordering, finish: Ordering) {
    check(move || {
        let word = Arc::new(AtomicU64::new(0));
        let unfinished = Arc::new(AtomicU32::new(1));
        let cells = Arc::new(Shared([UnsafeCell::new(0), UnsafeCell::new(0)]));
        let worker = {
            let (word, unfinished, cells) = (Arc::clone(&word), Arc::clone(&unfinished), Arc::clone(&cells));
            thread::spawn(move || {
                if word.compare_exchange(1, 0, take, Ordering::Relaxed).is_ok() {
                    let [job, result] = &cells.0;
                    // SAFETY: the piece says that the job is complete and stays.
                    let job = job.with(|job| unsafe { *job });
                    // SAFETY: only the holder of the piece has its result.
                    result.with_mut(|result| unsafe { *result = job });
                    unfinished.fetch_sub(1, finish);
                }
            })
        };
        let [job, result] = &cells.0;
        // SAFETY: nobody has a piece of it yet.
        job.with_mut(|job| unsafe { *job = 7 });
        word.store(1, Ordering::Release);
        if unfinished.load(Ordering::Acquire) == 0 {
            // SAFETY: the piece is finished.
            assert_eq!(result.with(|result| unsafe { *result }), 7);
            // SAFETY: as above.
            job.with_mut(|job| unsafe { *job = 8 });
        }
        worker.join().unwrap();
    });
}

#[test]
fn a_board_passes() {
    model_board(Ordering::Acquire, Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_piece_taken_relaxed_is_caught() {
    model_board(Ordering::Relaxed, Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_piece_finished_relaxed_is_caught() {
    model_board(Ordering::Acquire, Ordering::Relaxed);
}

/// One slot of `ring.rs`, taken while its producer is refused. Without the fences each side may miss what the
/// other has just written.
fn model_wish(fenced: bool) {
    check(move || {
        let [head, wish] = [(); 2].map(|()| Arc::new(AtomicU32::new(0)));
        let (head_of_producer, wish_of_producer) = (Arc::clone(&head), Arc::clone(&wish));
        let producer = thread::spawn(move || {
            wish_of_producer.store(1, Ordering::Relaxed);
            if fenced {
                fence(Ordering::SeqCst);
            }
            head_of_producer.load(Ordering::Acquire) == 0
        });
        head.store(1, Ordering::Release);
        if fenced {
            fence(Ordering::SeqCst);
        }
        let heard = wish.load(Ordering::Relaxed) == 1;
        let refused = producer.join().unwrap();
        assert!(heard || !refused, "a refused producer was not heard");
    });
}

#[test]
fn a_fenced_wish_passes() {
    model_wish(true);
}

#[test]
#[should_panic(expected = "a refused producer was not heard")]
fn a_wish_without_fence_is_caught() {
    model_wish(false);
}

/// The two positions of `ring.rs` over one slot and two laps. The head has to be released after the slot was
/// read, or the second value is written into a read that is under way.
fn model_positions(publish: Ordering, free: Ordering) {
    check(move || {
        let (tail, head) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let slot = Arc::new(Slot {
            stamp: AtomicU64::new(0),
            value: UnsafeCell::new(0),
        });
        let (tail_of_consumer, head_of_consumer, slot_of_consumer) =
            (Arc::clone(&tail), Arc::clone(&head), Arc::clone(&slot));
        let consumer = thread::spawn(move || {
            if tail_of_consumer.load(Ordering::Acquire) == 1 {
                // SAFETY: the tail says that the value is complete.
                assert_eq!(slot_of_consumer.value.with(|value| unsafe { *value }), 7);
                head_of_consumer.store(1, free);
            }
        });
        // SAFETY: both positions are 0, so the slot is the producer's.
        slot.value.with_mut(|value| unsafe { *value = 7 });
        tail.store(1, publish);
        if head.load(Ordering::Acquire) == 1 {
            // SAFETY: the head says that the value was taken.
            slot.value.with_mut(|value| unsafe { *value = 8 });
        }
        consumer.join().unwrap();
    });
}

#[test]
fn released_positions_pass() {
    model_positions(Ordering::Release, Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_tail_is_caught() {
    model_positions(Ordering::Relaxed, Ordering::Release);
}

#[test]
#[should_panic(expected = "Causality violation")]
fn a_relaxed_head_is_caught() {
    model_positions(Ordering::Release, Ordering::Relaxed);
}
