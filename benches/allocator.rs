//! Cost of taking and giving back blocks, per block.
//!
//! `pool` is the pool of one owner, with its states and reference counts. Beside it stand free lists that several
//! threads could share, used by one thread here, so without contention and at their best: they keep no states and no
//! counts. `mutex_vec` locks once for a whole batch; `treiber` (32-bit index, 32-bit tag against ABA) and
//! `array_queue` (crossbeam) work block by block.
//!
//! `evict` takes blocks of a pool in which all are idle, as prompts whose blocks are scattered, in batches of 16 and 256.
//!
//! Expected: the pool at 2 to 4 ns a block for a single one and below 3 ns in batches, the others several times
//! that, and an eviction below 100 ns.
//!
//! `cargo bench --bench allocator`

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use crossbeam_queue::ArrayQueue;
use pagedkv::block::{BlockPool, Eviction, Parent, PoolConfig, RootId};
use pagedkv::ids::BlockId;
use std::hint::black_box;
use std::sync::Mutex;
use std::time::{Duration, Instant};

const NUM_BLOCKS: u32 = 65_536;
const BATCHES: [usize; 3] = [1, 16, 256];

fn pool(num_blocks: u32) -> BlockPool {
    let hash_key = [
        0x9e37_79b9_7f4a_7c15,
        0xbf58_476d_1ce4_e5b9,
        0x94d0_49bb_1331_11eb,
        0x2545_f491_4f6c_dd1d,
    ];
    BlockPool::new(PoolConfig {
        num_blocks,
        block_size: 16,
        prefix_caching: true,
        partial_matching: true,
        eviction: Eviction::Turn,
        hash_key,
    })
}

#[expect(
    clippy::disallowed_types,
    reason = "a structure to compare with, which is not part of the crate"
)]
mod treiber {
    use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

    /// A lock-free stack of indices. The head is a tag in the high half and an index in the low half, 0 for empty.
    pub(crate) struct Treiber {
        head: AtomicU64,
        next: Vec<AtomicU32>,
    }

    impl Treiber {
        pub(crate) fn new(len: u32) -> Self {
            let next = (0..=len)
                .map(|index| AtomicU32::new(index.saturating_sub(1)))
                .collect();
            Self {
                head: AtomicU64::new(u64::from(len)),
                next,
            }
        }

        pub(crate) fn pop(&self) -> Option<u32> {
            let mut head = self.head.load(Ordering::Acquire);
            loop {
                let index = u32::try_from(head & 0xffff_ffff).expect("half of the head");
                if index == 0 {
                    return None;
                }
                let next = self.next[index as usize].load(Ordering::Relaxed);
                match self.swing(head, next) {
                    Ok(_) => return Some(index),
                    Err(current) => head = current,
                }
            }
        }

        pub(crate) fn push(&self, index: u32) {
            let mut head = self.head.load(Ordering::Relaxed);
            loop {
                let top = u32::try_from(head & 0xffff_ffff).expect("half of the head");
                self.next[index as usize].store(top, Ordering::Relaxed);
                match self.swing(head, index) {
                    Ok(_) => return,
                    Err(current) => head = current,
                }
            }
        }

        /// Replaces the head by `index` with the next tag.
        fn swing(&self, head: u64, index: u32) -> Result<u64, u64> {
            let tagged = (head >> 32).wrapping_add(1) << 32 | u64::from(index);
            self.head
                .compare_exchange_weak(head, tagged, Ordering::AcqRel, Ordering::Acquire)
        }
    }
}

fn allocate_release(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("allocate_release");
    for len in BATCHES {
        group.throughput(Throughput::Elements(len as u64));

        let mut pool = pool(NUM_BLOCKS);
        let mut taken: Vec<BlockId> = Vec::with_capacity(len);
        group.bench_function(BenchmarkId::new("pool", len), |bencher| {
            if len == 1 {
                bencher.iter(|| {
                    let block = pool.allocate().expect("the pool has room");
                    pool.release(black_box(block));
                });
            } else {
                bencher.iter(|| {
                    assert!(pool.allocate_into(len, &mut taken), "the pool has room");
                    pool.release_all(black_box(&taken));
                    taken.clear();
                });
            }
        });

        let free = Mutex::new((1..=NUM_BLOCKS).rev().collect::<Vec<u32>>());
        let mut taken: Vec<u32> = Vec::with_capacity(len);
        group.bench_function(BenchmarkId::new("mutex_vec", len), |bencher| {
            bencher.iter(|| {
                let mut list = free.lock().expect("nobody panicked");
                let rest = list.len() - len;
                taken.extend(list.drain(rest..));
                drop(list);
                black_box(&mut taken);
                free.lock().expect("nobody panicked").append(&mut taken);
            });
        });

        let stack = treiber::Treiber::new(NUM_BLOCKS);
        group.bench_function(BenchmarkId::new("treiber", len), |bencher| {
            bencher.iter(|| {
                for _ in 0..len {
                    taken.push(stack.pop().expect("the stack has room"));
                }
                black_box(&mut taken)
                    .drain(..)
                    .rev()
                    .for_each(|block| stack.push(block));
            });
        });

        let queue = ArrayQueue::new(NUM_BLOCKS as usize);
        (1..=NUM_BLOCKS).for_each(|block| queue.push(block).expect("the queue has room"));
        group.bench_function(BenchmarkId::new("array_queue", len), |bencher| {
            bencher.iter(|| {
                for _ in 0..len {
                    taken.push(queue.pop().expect("the queue has blocks"));
                }
                for block in black_box(&mut taken).drain(..) {
                    queue.push(block).expect("the queue has room");
                }
            });
        });
    }
    group.finish();
}

/// Blocks of a prompt in the bench of evictions.
const CHAIN_LEN: usize = 16;

/// Publishes blocks as one prompt that nobody else's begins like, and lets go of them, tail first.
fn publish_chain(pool: &mut BlockPool, root: RootId, blocks: &[BlockId], token: u32) {
    let mut parent = Parent::Root(root);
    for &block in blocks {
        let hash = pool.chain_hash(parent, &[token; 16]);
        pool.publish(block, parent, hash, &[token; 16]);
        parent = Parent::Block(block);
    }
    pool.release_all(blocks);
}

/// A pool in which every block is idle, as prompts whose blocks are scattered over the pool.
fn idle_pool(num_blocks: u32) -> (BlockPool, RootId) {
    let mut pool = pool(num_blocks);
    let root = pool.root(b"");
    let mut blocks = Vec::new();
    pool.allocate_into(num_blocks as usize, &mut blocks);
    // A stride that shares no factor with their number.
    let stride = (blocks.len() * 5 / 13..blocks.len())
        .find(|stride| gcd(*stride, blocks.len()) == 1)
        .expect("one is near");
    let scattered: Vec<BlockId> = (0..blocks.len())
        .map(|idx| blocks[idx * stride % blocks.len()])
        .collect();
    for (token, chain) in (0..).zip(scattered.chunks(CHAIN_LEN)) {
        publish_chain(&mut pool, root, chain, token);
    }
    (pool, root)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Nothing is free: every allocation evicts. Blocks are taken by the batch, as a step takes them, and only that is timed.
/// Then they are published under new tokens and released, so that the pool stays full: what is timed is the steady state,
/// in which a large pool is in no cache when its turn comes.
fn evict(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("evict");
    group.throughput(Throughput::Elements(1));
    for num_blocks in [4096, 65_536, 1_048_576] {
        let (mut pool, root) = idle_pool(num_blocks);
        let mut token = num_blocks;
        let mut taken: Vec<BlockId> = Vec::new();
        for batch in [16, 256] {
            let name = format!("{num_blocks}x{batch}");
            group.bench_function(BenchmarkId::from_parameter(name), |bencher| {
                bencher.iter_custom(|num_evictions| {
                    let mut num_left = num_evictions;
                    let mut elapsed = Duration::ZERO;
                    while num_left > 0 {
                        let num_taken = num_left.min(batch);
                        let start = Instant::now();
                        pool.allocate_into(
                            usize::try_from(num_taken).expect("a batch"),
                            black_box(&mut taken),
                        );
                        elapsed += start.elapsed();
                        num_left -= num_taken;
                        for chain in taken.chunks(CHAIN_LEN) {
                            token = token.wrapping_add(1);
                            publish_chain(&mut pool, root, chain, token);
                        }
                        taken.clear();
                    }
                    elapsed
                });
            });
        }
    }
    group.finish();
}

criterion_group!(benches, allocate_release, evict);
criterion_main!(benches);
