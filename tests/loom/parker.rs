//! The parker: no wake-up is lost. Loom reports an owner that sleeps for ever as a deadlock; its clock does
//! not run, so the timeouts are "never" and "at once".

use crate::check;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use pagedkv::sync::{Parker, RequestFlags, inbox};
use std::time::Duration;

/// The race "push, then park": the owner finds the ring empty and decides to sleep while a message arrives.
#[test]
fn the_owner_never_sleeps_on_a_message() {
    check(|| {
        let (sender, mut receiver) = inbox(2);
        let parker = Arc::new(Parker::new());
        let threads = [(1, sender.clone()), (2, sender)].map(|(message, sender)| {
            let parker = Arc::clone(&parker);
            thread::spawn(move || {
                sender.push(message).unwrap();
                parker.unpark();
            })
        });
        let mut sum = 0;
        while sum < 3 {
            match receiver.pop() {
                Some(message) => sum += message,
                None => assert!(parker.park_timeout(Duration::MAX)),
            }
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

/// The race "one token, two wakers": the flags are relaxed, so that the token alone can make them visible.
#[test]
fn one_token_hands_over_what_all_wakers_published() {
    check(|| {
        let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(false)]);
        let parker = Arc::new(Parker::new());
        let threads = [0, 1].map(|idx: usize| {
            let (flags, parker) = (Arc::clone(&flags), Arc::clone(&parker));
            thread::spawn(move || {
                flags[idx].store(true, Ordering::Relaxed);
                parker.unpark();
            })
        });
        while !flags.iter().all(|flag| flag.load(Ordering::Relaxed)) {
            assert!(parker.park_timeout(Duration::MAX));
        }
        for thread in threads {
            thread.join().unwrap();
        }
    });
}

#[test]
fn the_owner_never_sleeps_on_an_abort() {
    check(|| {
        let shared = Arc::new((RequestFlags::new(1), Parker::new()));
        let id = shared.0.acquire().unwrap();
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            assert!(other.0.abort(id));
            other.1.unpark();
        });
        while !shared.0.take_any_aborted() {
            assert!(shared.1.park_timeout(Duration::MAX));
        }
        assert!(shared.0.is_aborted(id));
        shared.0.retire(id);
        thread.join().unwrap();
    });
}

/// The race "last moment": the timeout passes while the wake-up arrives.
#[test]
fn a_wake_up_beside_the_timeout_is_kept_for_the_next_sleep() {
    check(|| {
        let shared = Arc::new((AtomicBool::new(false), Parker::new()));
        let other = Arc::clone(&shared);
        let thread = thread::spawn(move || {
            other.0.store(true, Ordering::Relaxed);
            other.1.unpark();
        });
        let (published, parker) = &*shared;
        if !parker.park_timeout(Duration::ZERO) {
            assert!(parker.park_timeout(Duration::MAX));
        }
        assert!(published.load(Ordering::Relaxed));
        thread.join().unwrap();
        assert!(!parker.park_timeout(Duration::ZERO));
    });
}
