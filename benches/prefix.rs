//! Cost of finding a prompt of 1000 blocks (16,000 tokens) in a pool of 65,536.
//!
//! - `prompt/warm`: hash, look up, share 990 known blocks, allocate 10, release all; always the same prompt.
//! - `prompt/rotating`: the same over 60 prompts in turn, so that neither table nor tokens are in the cache.
//! - `prompt/cold`: nothing is known, nothing is free: hash, look up, evict and allocate 1000, publish, release.
//! - `lookup/..`: hash and look up alone.
//!
//! Expected: warm and rotating below 25 us, cold below 100 us, a lookup about 10 us.
//!
//! `cargo bench --bench prefix`

use criterion::{Criterion, criterion_group, criterion_main};
use pagedkv::block::{BlockPool, BlockTable, Eviction, PoolConfig, PrefixHit, RootId};
use pagedkv::ids::BlockId;
use std::hint::black_box;

const NUM_BLOCKS: u32 = 65_536;
const BLOCK_SIZE: u32 = 16;
/// Blocks of a prompt, and how many of them the prompts have in common with what was published.
const PROMPT_BLOCKS: u32 = 1000;
const KNOWN_BLOCKS: u32 = 990;
const NUM_PROMPTS: u32 = 60;

/// Tokens `from..to` blocks of prompt `id`; no two prompts have a block in common.
fn tokens(id: u32, from: u32, to: u32) -> impl Iterator<Item = u32> {
    (from * BLOCK_SIZE..to * BLOCK_SIZE).map(move |position| id * 37 + position)
}

/// The pool and the memory that a scheduler keeps from one prompt to the next.
struct Bench {
    pool: BlockPool,
    root: RootId,
    hit: PrefixHit,
    copies: Vec<(BlockId, BlockId)>,
}

impl Bench {
    fn new() -> Self {
        let hash_key = [
            0x9e37_79b9_7f4a_7c15,
            0xbf58_476d_1ce4_e5b9,
            0x94d0_49bb_1331_11eb,
            0x2545_f491_4f6c_dd1d,
        ];
        let config = PoolConfig {
            num_blocks: NUM_BLOCKS,
            block_size: BLOCK_SIZE,
            prefix_caching: true,
            partial_matching: true,
            eviction: Eviction::Turn,
            hash_key,
        };
        let mut pool = BlockPool::new(config);
        let root = pool.root(b"");
        Self {
            pool,
            root,
            hit: PrefixHit::default(),
            copies: Vec::new(),
        }
    }

    /// Looks a prompt up, takes it in and releases it. Returns how many of its blocks were known.
    fn run(&mut self, prompt: &[u32], publish: bool) -> usize {
        let Self {
            pool,
            root,
            hit,
            copies,
        } = self;
        let num_tokens = PROMPT_BLOCKS * BLOCK_SIZE;
        let mut table = BlockTable::new(*root, pool);
        pool.lookup(*root, black_box(prompt), hit);
        let num_known = u32::try_from(hit.blocks.len()).expect("at most a prompt");
        table
            .admit(pool, hit, num_known * BLOCK_SIZE, num_tokens, copies)
            .expect("the pool has room");
        if publish {
            table.publish(pool, prompt, num_tokens);
        }
        table.release(pool);
        hit.blocks.len()
    }

    /// Publishes the known part of every prompt, and returns the prompts.
    fn fill(&mut self) -> Vec<Vec<u32>> {
        let fill = |id| {
            tokens(id, 0, KNOWN_BLOCKS)
                .chain(tokens(id + 1000, KNOWN_BLOCKS, PROMPT_BLOCKS))
                .collect()
        };
        let prompts: Vec<Vec<u32>> = (0..NUM_PROMPTS).map(|id| id * 2_000).map(fill).collect();
        for prompt in &prompts {
            let known = &prompt[..(KNOWN_BLOCKS * BLOCK_SIZE) as usize];
            let mut table = BlockTable::new(self.root, &mut self.pool);
            let num_known = KNOWN_BLOCKS * BLOCK_SIZE;
            table
                .reserve(&mut self.pool, 0, num_known, &mut self.copies)
                .expect("the pool has room");
            table.publish(&mut self.pool, known, num_known);
            table.release(&mut self.pool);
        }
        assert_eq!(self.pool.num_published(), NUM_PROMPTS * KNOWN_BLOCKS);
        prompts
    }
}

fn prompt(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("prompt");
    let mut bench = Bench::new();
    let prompts = bench.fill();
    group.bench_function("warm", |bencher| {
        bencher.iter(|| assert_eq!(bench.run(&prompts[0], false), KNOWN_BLOCKS as usize));
    });
    let mut turn = prompts.iter().cycle();
    group.bench_function("rotating", |bencher| {
        bencher.iter(|| {
            let prompt = turn.next().expect("a cycle does not end");
            assert_eq!(bench.run(prompt, false), KNOWN_BLOCKS as usize);
        });
    });

    let mut bench = Bench::new();
    let mut id = 0;
    let mut cold = Vec::new();
    let mut run_cold = move || {
        id += 1;
        cold.clear();
        cold.extend(tokens(id * 2_000, 0, PROMPT_BLOCKS));
        assert_eq!(bench.run(&cold, true), 0);
    };
    (0..=NUM_BLOCKS / PROMPT_BLOCKS).for_each(|_| run_cold());
    group.bench_function("cold", |bencher| bencher.iter(&mut run_cold));
    group.finish();
}

fn lookup(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("lookup");
    let mut bench = Bench::new();
    let prompts = bench.fill();
    let half = KNOWN_BLOCKS / 2 * BLOCK_SIZE;
    let mut partial = prompts[0].clone();
    partial[half as usize] ^= 1;
    let miss: Vec<u32> = tokens(7_777_777, 0, PROMPT_BLOCKS).collect();
    for (name, prompt, num_found) in [
        ("hit", &prompts[0], KNOWN_BLOCKS),
        ("partial", &partial, KNOWN_BLOCKS / 2),
        ("miss", &miss, 0),
    ] {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                bench.pool.lookup(bench.root, black_box(prompt), &mut bench.hit);
                assert_eq!(bench.hit.blocks.len(), num_found as usize);
            });
        });
    }
    group.finish();
}

criterion_group!(benches, prompt, lookup);
criterion_main!(benches);
