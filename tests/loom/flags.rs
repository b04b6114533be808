//! Ids and aborts: no slot has two holders, no abort reaches the next generation, none is overlooked.

use crate::check;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use pagedkv::ids::RequestId;
use pagedkv::sync::RequestFlags;

/// Flags, and for each slot a cell that only its holder may write: loom reports two holders as a race.
struct Marked {
    flags: RequestFlags,
    marks: Vec<UnsafeCell<u32>>,
}

impl Marked {
    fn new(capacity: usize) -> Arc<Self> {
        let marks = (0..capacity).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self {
            flags: RequestFlags::new(capacity),
            marks,
        })
    }

    fn acquire(&self) -> Option<RequestId> {
        let id = self.flags.acquire()?;
        self.mark(id);
        Some(id)
    }

    fn retire(&self, id: RequestId) {
        self.mark(id);
        self.flags.retire(id);
    }

    fn mark(&self, id: RequestId) {
        // SAFETY: what the model checks: the holder of a slot is alone with it.
        self.marks[id.slot() as usize].with_mut(|mark| unsafe { *mark += 1 });
    }
}

// SAFETY: the cells are written by the slots' holders only, which is what loom checks here.
unsafe impl Sync for Marked {}

/// The race "borrowed link" (ABA): one thread stands between reading the first slot's link and its exchange,
/// while the other takes both slots and puts the first one back.
#[test]
fn no_slot_has_two_holders() {
    check(|| {
        let marked = Marked::new(2);
        let other = Arc::clone(&marked);
        let thread = thread::spawn(move || {
            let first = other.acquire();
            let second = other.acquire();
            if let Some(first) = first {
                other.retire(first);
            }
            second
        });
        let mine = [marked.acquire(), marked.acquire()];
        let theirs = thread.join().unwrap();
        let held: Vec<_> = mine.into_iter().chain([theirs]).flatten().collect();
        assert_eq!(marked.flags.num_live(), held.len());
        for id in held {
            marked.retire(id);
        }
        assert_eq!(marked.flags.num_live(), 0);
        let free = [marked.acquire().unwrap(), marked.acquire().unwrap()];
        assert_ne!(free[0].slot(), free[1].slot());
        assert_eq!(marked.acquire(), None);
    });
}

#[test]
fn two_threads_always_find_one_of_two_slots_each() {
    check(|| {
        let marked = Marked::new(2);
        let other = Arc::clone(&marked);
        let thread = thread::spawn(move || {
            for _ in 0..2 {
                let id = other.acquire().unwrap();
                other.retire(id);
            }
        });
        for _ in 0..2 {
            let id = marked.acquire().unwrap();
            marked.retire(id);
        }
        thread.join().unwrap();
        assert_eq!(marked.flags.num_live(), 0);
    });
}

/// The race "late abort".
#[test]
fn an_abort_never_reaches_the_next_generation() {
    check(|| {
        let flags = Arc::new(RequestFlags::new(1));
        let first = flags.acquire().unwrap();
        let other = Arc::clone(&flags);
        let thread = thread::spawn(move || other.abort(first));
        flags.retire(first);
        let second = flags.acquire().unwrap();
        assert_eq!((second.slot(), second.generation()), (0, 1));
        assert!(!flags.is_aborted(second));
        thread.join().unwrap();
        assert!(!flags.is_aborted(first));
        assert!(!flags.is_aborted(second));
        assert!(!flags.abort(first));
    });
}

#[test]
fn of_two_aborts_one_counts() {
    check(|| {
        let flags = Arc::new(RequestFlags::new(1));
        let id = flags.acquire().unwrap();
        let other = Arc::clone(&flags);
        let thread = thread::spawn(move || other.abort(id));
        let mine = flags.abort(id);
        assert_ne!(mine, thread.join().unwrap());
        assert!(flags.take_any_aborted());
        assert!(flags.is_aborted(id));
    });
}

#[test]
fn what_preceded_an_abort_is_visible_with_it() {
    check(|| {
        let flags = Arc::new(RequestFlags::new(1));
        let cause = Arc::new(AtomicBool::new(false));
        let id = flags.acquire().unwrap();
        let (seen_flags, seen_cause) = (Arc::clone(&flags), Arc::clone(&cause));
        let owner = thread::spawn(move || {
            assert!(!seen_flags.is_aborted(id) || seen_cause.load(Ordering::Relaxed));
        });
        cause.store(true, Ordering::Relaxed);
        assert!(flags.abort(id));
        owner.join().unwrap();
    });
}

/// The race "drowned bell": two aborts ring, and the owner hears one bell.
#[test]
fn no_abort_is_overlooked() {
    check(|| {
        let flags = Arc::new(RequestFlags::new(2));
        let ids = [flags.acquire().unwrap(), flags.acquire().unwrap()];
        let threads = ids.map(|id| {
            let flags = Arc::clone(&flags);
            thread::spawn(move || assert!(flags.abort(id)))
        });
        let mut seen = [false; 2];
        let mut look = || {
            if flags.take_any_aborted() {
                for (seen, id) in seen.iter_mut().zip(ids) {
                    *seen |= flags.is_aborted(id);
                }
            }
        };
        look();
        for thread in threads {
            thread.join().unwrap();
        }
        look();
        assert_eq!(seen, [true; 2]);
    });
}
