//! The structures of `rust/sync` under more threads than cores, where a thread is often stopped in the middle
//! of an operation. The models of `tests/loom` prove more on less; this finds what only real schedules and
//! many laps find.

use pagedkv::ids::RequestId;
use pagedkv::sync::{Parker, PushChain, RequestFlags, Stats, StatsCell, inbox, ring};
use std::collections::HashSet;
use std::sync::{Mutex, TryLockError};
use std::thread;
use std::time::Duration;

/// No wake-up takes this long; a test that waits for it has lost one.
const LOST: Duration = Duration::from_secs(30);

/// Four threads a core, at least eight.
fn num_threads() -> usize {
    thread::available_parallelism()
        .map_or(8, |cores| 4 * cores.get())
        .max(8)
}

#[test]
fn inbox_keeps_each_senders_order_and_loses_nothing() {
    const NUM_MESSAGES: usize = 20_000;
    let num_senders = num_threads();
    let parker = Parker::new();
    let (sender, mut receiver) = inbox(8);
    thread::scope(|scope| {
        for idx in 0..num_senders {
            let (sender, parker) = (sender.clone(), &parker);
            scope.spawn(move || {
                for count in 0..NUM_MESSAGES {
                    let mut message = Box::new((idx, count));
                    while let Err(back) = sender.push(message) {
                        assert_eq!(*back, (idx, count));
                        message = back;
                        thread::yield_now();
                    }
                    parker.unpark();
                }
            });
        }
        let mut expected = vec![0; num_senders];
        for _ in 0..num_senders * NUM_MESSAGES {
            let message = loop {
                match receiver.pop() {
                    Some(message) => break message,
                    None => assert!(parker.park_timeout(LOST), "a wake-up was lost"),
                }
            };
            let (idx, count) = *message;
            assert_eq!(count, expected[idx]);
            expected[idx] += 1;
        }
    });
    assert!(receiver.is_empty());
    // The ring is at rest: exactly its capacity fits.
    for count in 0..8 {
        sender.push(Box::new((0, count))).unwrap();
    }
    assert!(sender.push(Box::new((0, 8))).is_err());
}

#[test]
fn chain_loses_nothing() {
    const NUM_VALUES: usize = 20_000;
    let num_pushers = num_threads();
    let chain = PushChain::new();
    thread::scope(|scope| {
        for idx in 0..num_pushers {
            let chain = &chain;
            scope.spawn(move || (0..NUM_VALUES).for_each(|count| chain.push((idx, count))));
        }
        let mut expected = vec![0; num_pushers];
        let mut num_left = num_pushers * NUM_VALUES;
        while num_left > 0 {
            for (idx, count) in chain.take_all() {
                assert_eq!(count, expected[idx]);
                expected[idx] += 1;
                num_left -= 1;
            }
            thread::yield_now();
        }
    });
    assert!(chain.is_empty());
}

/// Several pairs at once, so that either end is stopped anywhere. A producer that is refused sleeps until it is told
/// of room; a consumer sleeps until it is told of values.
#[test]
fn rings_lose_nothing_and_leave_nobody_waiting() {
    const NUM_VALUES: u64 = 50_000;
    let num_pairs = num_threads() / 2;
    thread::scope(|scope| {
        for capacity in (0..num_pairs).map(|idx| 1 << (idx % 4)) {
            let (mut producer, mut consumer) = ring::<[u64; 3]>(capacity);
            let [room, values] = [(); 2].map(|()| std::sync::Arc::new(Parker::new()));
            let (room_of_consumer, values_of_producer) = (room.clone(), values.clone());
            scope.spawn(move || {
                for count in 0..NUM_VALUES {
                    while producer.push([count; 3]).is_err() {
                        assert!(room.park_timeout(LOST), "nobody said that there is room");
                    }
                    values_of_producer.unpark();
                }
            });
            scope.spawn(move || {
                let mut expected = 0;
                while expected < NUM_VALUES {
                    while let Some(value) = consumer.pop_if(|_| true) {
                        assert_eq!(value, [expected; 3]);
                        expected += 1;
                    }
                    if consumer.take_wish() {
                        room_of_consumer.unpark();
                    }
                    if expected < NUM_VALUES && values.park_timeout(LOST) {
                        continue;
                    }
                    assert_eq!(expected, NUM_VALUES, "a wake-up was lost");
                }
            });
        }
    });
}

#[test]
fn flags_never_give_a_slot_to_two() {
    const CAPACITY: usize = 4;
    const NUM_ROUNDS: usize = 40_000;
    let flags = RequestFlags::new(CAPACITY);
    let holders: Vec<Mutex<()>> = (0..CAPACITY).map(|_| Mutex::new(())).collect();
    let hold = |id: RequestId| match holders[id.slot() as usize].try_lock() {
        Ok(guard) => guard,
        Err(TryLockError::WouldBlock | TryLockError::Poisoned(_)) => panic!("{id:?} has two holders"),
    };
    thread::scope(|scope| {
        for idx in 0..num_threads() {
            let (flags, hold) = (&flags, &hold);
            scope.spawn(move || {
                let mut last: Option<RequestId> = None;
                for round in 0..NUM_ROUNDS {
                    let Some(id) = flags.acquire() else {
                        thread::yield_now();
                        continue;
                    };
                    let guard = hold(id);
                    assert!(!flags.is_aborted(id), "{id:?} was born aborted");
                    // A late abort must find nobody, whoever holds the slot by now.
                    assert!(!last.is_some_and(|last| flags.abort(last)));
                    if (round + idx) % 3 == 0 {
                        thread::yield_now();
                        assert!(flags.abort(id));
                        assert!(flags.is_aborted(id));
                    }
                    drop(guard);
                    flags.retire(id);
                    last = Some(id);
                }
            });
        }
    });
    assert_eq!(flags.num_live(), 0);
    let slots: HashSet<u32> = std::iter::from_fn(|| flags.acquire())
        .map(RequestId::slot)
        .collect();
    assert_eq!(slots.len(), CAPACITY);
}

/// The life of a request across threads: submitted, found by the owner, and ended only by its abort. An
/// abort, a message or a wake-up that gets lost leaves the owner asleep.
#[test]
fn every_abort_reaches_the_owner() {
    const NUM_REQUESTS: usize = 10_000;
    let num_clients = num_threads();
    let flags = RequestFlags::new(2 * num_clients);
    let parker = Parker::new();
    let (sender, mut receiver) = inbox(num_clients);
    thread::scope(|scope| {
        for _ in 0..num_clients {
            let (flags, parker, sender) = (&flags, &parker, sender.clone());
            scope.spawn(move || {
                let mut num_left = NUM_REQUESTS;
                while num_left > 0 {
                    let Some(id) = flags.acquire() else {
                        thread::yield_now();
                        continue;
                    };
                    if sender.push(id).is_err() {
                        // The owner has not heard of the request, so it is still the client's to retire.
                        flags.retire(id);
                        thread::yield_now();
                        continue;
                    }
                    parker.unpark();
                    assert!(flags.abort(id));
                    parker.unpark();
                    num_left -= 1;
                }
            });
        }
        let mut running: Vec<RequestId> = Vec::new();
        let mut num_left = num_clients * NUM_REQUESTS;
        while num_left > 0 {
            let num_before = running.len();
            running.extend(std::iter::from_fn(|| receiver.pop()));
            // A request may have been aborted on its way through the inbox, and its bell have been heard
            // before it came.
            let came = running.len() > num_before;
            if flags.take_any_aborted() || came {
                running.retain(|&id| {
                    let aborted = flags.is_aborted(id);
                    if aborted {
                        flags.retire(id);
                        num_left -= 1;
                    }
                    !aborted
                });
            } else {
                assert!(
                    parker.park_timeout(LOST),
                    "a wake-up was lost; {} requests hang",
                    running.len()
                );
            }
        }
        assert!(running.is_empty());
    });
    assert_eq!(flags.num_live(), 0);
}

#[test]
fn stats_are_never_torn() {
    const NUM_STEPS: u64 = 200_000;
    let cell = StatsCell::new();
    thread::scope(|scope| {
        for _ in 1..num_threads() {
            scope.spawn(|| {
                let mut last = 0;
                while last < NUM_STEPS {
                    let values = cell.read().as_array();
                    assert!(values.iter().all(|&value| value == values[0]), "torn: {values:?}");
                    assert!(values[0] >= last, "went back from {last} to {}", values[0]);
                    last = values[0];
                    thread::yield_now();
                }
            });
        }
        for step in 1..=NUM_STEPS {
            cell.publish(&Stats::from_array([step; Stats::FIELDS.len()]));
        }
    });
}
