//! What it costs to hand a message to the owner: `sync::inbox` beside `crossbeam_queue::ArrayQueue` and a
//! mutex around a `VecDeque`.
//!
//! - `uncontended`: a push and a pop on one thread. Expected: a few ns, one compare-and-swap and two stores.
//! - `two_producers`: wall time a message while two threads push and a third takes. Expected: bound by the
//!   cache line of the tail, tens of ns; on fewer than three free cores it also measures the operating
//!   system.
//!
//! `cargo bench --bench inbox`

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use pagedkv::sync::inbox;
use std::collections::VecDeque;
use std::hint::black_box;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

const CAPACITY: usize = 1024;

/// About what a submission is: an id, a box, a few options.
type Message = [u64; 4];

/// The mutex's side of the comparison, bounded like the others.
struct Locked(Mutex<VecDeque<Message>>);

impl Locked {
    fn new() -> Self {
        Self(Mutex::new(VecDeque::with_capacity(CAPACITY)))
    }

    fn push(&self, message: Message) -> Result<(), Message> {
        let mut queue = self.0.lock().expect("nobody panics");
        if queue.len() == CAPACITY {
            return Err(message);
        }
        queue.push_back(message);
        Ok(())
    }

    fn pop(&self) -> Option<Message> {
        self.0.lock().expect("nobody panics").pop_front()
    }
}

fn uncontended(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("inbox/uncontended");
    group.throughput(Throughput::Elements(1));
    let message = [7; 4];
    let (sender, mut receiver) = inbox(CAPACITY);
    group.bench_function("pagedkv", |bencher| {
        bencher.iter(|| {
            sender.push(black_box(message)).expect("one message fits");
            receiver.pop()
        });
    });
    let queue = ArrayQueue::new(CAPACITY);
    group.bench_function("array_queue", |bencher| {
        bencher.iter(|| {
            queue.push(black_box(message)).expect("one message fits");
            queue.pop()
        });
    });
    let locked = Locked::new();
    group.bench_function("mutex", |bencher| {
        bencher.iter(|| {
            locked.push(black_box(message)).expect("one message fits");
            locked.pop()
        });
    });
    group.finish();
}

/// The time in which two threads push half of `num_messages` each and this one takes them all.
fn time_two_producers(
    num_messages: u64,
    push: impl Fn(Message) -> Result<(), Message> + Sync,
    mut pop: impl FnMut() -> Option<Message>,
) -> Duration {
    let half = num_messages.div_ceil(2);
    let start = Instant::now();
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                for count in 0..half {
                    while push([count; 4]).is_err() {
                        thread::yield_now();
                    }
                }
            });
        }
        for _ in 0..2 * half {
            while pop().is_none() {
                thread::yield_now();
            }
        }
    });
    start.elapsed()
}

fn two_producers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("inbox/two_producers");
    group.throughput(Throughput::Elements(1)).sample_size(30);
    let (sender, mut receiver) = inbox(CAPACITY);
    group.bench_function("pagedkv", |bencher| {
        bencher.iter_custom(|num| time_two_producers(num, |message| sender.push(message), || receiver.pop()));
    });
    let queue = ArrayQueue::new(CAPACITY);
    group.bench_function("array_queue", |bencher| {
        bencher.iter_custom(|num| time_two_producers(num, |message| queue.push(message), || queue.pop()));
    });
    let locked = Locked::new();
    group.bench_function("mutex", |bencher| {
        bencher.iter_custom(|num| time_two_producers(num, |message| locked.push(message), || locked.pop()));
    });
    group.finish();
}

criterion_group!(benches, uncontended, two_producers);
criterion_main!(benches);
