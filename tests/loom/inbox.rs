//! The ring: nothing lost, nothing twice, order per sender, and no false "full".

use crate::check;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicBool, Ordering};
use loom::thread;
use pagedkv::sync::{Receiver, inbox};

fn drain<T: Send>(receiver: &mut Receiver<T>, into: &mut Vec<T>) {
    while let Some(message) = receiver.pop() {
        into.push(message);
    }
}

#[test]
fn two_senders_lose_nothing_and_keep_their_order() {
    check(|| {
        let (sender, mut receiver) = inbox(2);
        let other = sender.clone();
        // Boxes, so that a message read twice or too early is a fault and not only a wrong number.
        let second = thread::spawn(move || {
            [20].into_iter()
                .filter(|&value| other.push(Box::new(value)).is_ok())
                .collect::<Vec<_>>()
        });
        let owner = thread::spawn(move || {
            let received = [receiver.pop(), receiver.pop()];
            (received.into_iter().flatten().collect::<Vec<_>>(), receiver)
        });
        let first: Vec<_> = [10, 11]
            .into_iter()
            .filter(|&value| sender.push(Box::new(value)).is_ok())
            .collect();
        let second = second.join().unwrap();
        let (mut received, mut receiver) = owner.join().unwrap();
        drain(&mut receiver, &mut received);
        assert!(receiver.is_empty());
        let of = |tens| {
            received
                .iter()
                .map(|b| **b)
                .filter(|value| value / 10 == tens)
                .collect::<Vec<i32>>()
        };
        assert_eq!(of(1), first);
        assert_eq!(of(2), second);
        assert_eq!(received.len(), first.len() + second.len());
    });
}

#[test]
fn a_push_fails_only_if_every_slot_is_taken() {
    check(|| {
        let (sender, mut receiver) = inbox(2);
        let senders = [sender.clone(), sender.clone()];
        let threads = senders.map(|sender| thread::spawn(move || sender.push(1).is_ok()));
        let mine = sender.push(1).is_ok();
        let [first, second] = threads.map(|thread| thread.join().unwrap());
        assert_eq!(
            [mine, first, second].into_iter().filter(|&pushed| pushed).count(),
            2
        );
        let mut received = Vec::new();
        drain(&mut receiver, &mut received);
        assert_eq!(received, [1, 1]);
    });
}

/// The race "stalled release": the room of a pop is there for every push that comes after it.
#[test]
fn a_pop_that_happened_before_has_made_room() {
    check(|| {
        let (sender, mut receiver) = inbox(1);
        sender.push(1).unwrap();
        let popped = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&popped);
        let thread = thread::spawn(move || {
            if seen.load(Ordering::Acquire) {
                assert_eq!(sender.push(2), Ok(()));
            } else if sender.push(2).is_err() {
                return false;
            }
            true
        });
        assert_eq!(receiver.pop(), Some(1));
        popped.store(true, Ordering::Release);
        let pushed = thread.join().unwrap();
        assert_eq!(receiver.pop(), pushed.then_some(2));
    });
}

#[test]
fn slots_are_reused_lap_after_lap() {
    check(|| {
        let (sender, mut receiver) = inbox(1);
        let owner = thread::spawn(move || {
            let received = [receiver.pop(), receiver.pop()];
            (received.into_iter().flatten().collect::<Vec<_>>(), receiver)
        });
        let sent: Vec<_> = (0..3).filter(|&value| sender.push(value).is_ok()).collect();
        let (mut received, mut receiver) = owner.join().unwrap();
        drain(&mut receiver, &mut received);
        assert_eq!(received, sent);
    });
}

/// Loom reports every `Arc` that is leaked.
#[test]
fn what_is_inside_is_dropped_with_the_last_end() {
    check(|| {
        let (sender, mut receiver) = inbox(2);
        let message = Arc::new(());
        sender.push(Arc::clone(&message)).unwrap();
        let sent = Arc::clone(&message);
        let thread = thread::spawn(move || {
            sender.push(Arc::clone(&sent)).ok();
            sender.push(sent).ok();
        });
        drop(receiver.pop());
        drop(receiver);
        thread.join().unwrap();
        assert_eq!(Arc::strong_count(&message), 1);
    });
}
