//! The event ring: nothing lost, nothing twice, in order, and nobody left waiting for room.

use crate::check;
use loom::thread;
use pagedkv::sync::{Consumer, ring};

fn drain(consumer: &mut Consumer<u32>, into: &mut Vec<u32>) {
    into.extend(std::iter::from_fn(|| consumer.pop_if(|_| true)));
}

#[test]
fn values_arrive_once_and_in_order() {
    check(|| {
        let (mut producer, mut consumer) = ring(2);
        let consumer = thread::spawn(move || {
            let mut taken = Vec::new();
            drain(&mut consumer, &mut taken);
            drain(&mut consumer, &mut taken);
            (taken, consumer)
        });
        let pushed: Vec<u32> = (0..4).filter(|&value| producer.push(value).is_ok()).collect();
        let (mut taken, mut consumer) = consumer.join().unwrap();
        drain(&mut consumer, &mut taken);
        assert_eq!(taken, pushed);
        assert!(pushed.len() >= 2, "two fit before anything is taken");
    });
}

/// A slot is read before it is written again.
#[test]
fn slots_are_reused_lap_after_lap() {
    check(|| {
        let (mut producer, mut consumer) = ring(1);
        let consumer = thread::spawn(move || {
            let mut taken = Vec::new();
            drain(&mut consumer, &mut taken);
            drain(&mut consumer, &mut taken);
            (taken, consumer)
        });
        let pushed: Vec<u32> = (0..3).filter(|&value| producer.push(value).is_ok()).collect();
        let (mut taken, mut consumer) = consumer.join().unwrap();
        drain(&mut consumer, &mut taken);
        assert_eq!(taken, pushed);
    });
}

/// The race "last room": a refusal and a pop at the same time. Whoever made room hears of the refusal.
#[test]
fn a_refused_producer_is_heard_by_who_makes_room() {
    check(|| {
        let (mut producer, mut consumer) = ring(1);
        producer.push(1).unwrap();
        let consumer = thread::spawn(move || {
            assert_eq!(consumer.pop_if(|_| true), Some(1));
            consumer.take_wish()
        });
        let refused = producer.push(2).is_err();
        let heard = consumer.join().unwrap();
        assert!(heard || !refused, "refused, and nobody will come back");
        // What was refused fits now.
        assert_eq!(producer.push(3).is_ok(), refused);
    });
}
