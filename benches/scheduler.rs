//! A whole step, `schedule` and `commit`, without a model.
//!
//! What it should cost: a decode step writes some 25 words a sequence and its block table, and touches one sequence
//! record each: about 10 ns a sequence plus the copy of the tables. `decode` has 512 tokens a sequence in blocks of 16;
//! `mixed` adds a chunk of a prompt to every step; `thrash` runs in a pool that preempts all the time.
//!
//! `cargo bench --bench scheduler`

#![allow(
    missing_docs,
    clippy::unwrap_used,
    reason = "a benchmark is no API, and stops at the first surprise"
)]

use std::time::{Duration, Instant};

use criterion::{BatchSize, BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use pagedkv::block::Eviction;
use pagedkv::config::{CoreConfig, HostTier};
use pagedkv::sched::{BeamRows, SamplingParams, Scheduler};

const BLOCK_SIZE: u32 = 16;
/// Steps after which the decoding sequences are replaced.
const NUM_STEPS: u32 = 3500;

struct Engine {
    scheduler: Scheduler,
    arena: Vec<i32>,
    tokens: Vec<i32>,
    states: Vec<i32>,
    num_submitted: u32,
}

impl Engine {
    fn new(config: CoreConfig) -> Self {
        let scheduler = Scheduler::new(config, [1, 2, 3, 4]).unwrap();
        let arena = vec![0; scheduler.arena_len()];
        Self {
            scheduler,
            arena,
            tokens: Vec::new(),
            states: Vec::new(),
            num_submitted: 0,
        }
    }

    fn submit(&mut self, len: u32, max_tokens: u32) {
        self.num_submitted += 1;
        let prompt = (0..len)
            .map(|at| self.num_submitted.wrapping_mul(7919).wrapping_add(at) % 30_000)
            .collect();
        let params = SamplingParams {
            max_tokens,
            ignore_eos: true,
            ..SamplingParams::default()
        };
        self.scheduler.edge().submit(prompt, params, Vec::new()).unwrap();
    }

    fn step(&mut self) -> u32 {
        let Some(header) = self.scheduler.schedule(&mut self.arena).unwrap() else {
            return 0;
        };
        if header.num_tokens > 0 {
            self.tokens.resize(header.num_rows as usize, 7);
            self.scheduler
                .commit(
                    header.step_id,
                    &self.tokens,
                    &BeamRows::default(),
                    &mut self.states,
                )
                .unwrap();
        }
        header.num_tokens
    }
}

fn config(num_blocks: u32, max_num_seqs: u32) -> CoreConfig {
    CoreConfig {
        num_blocks,
        block_size: BLOCK_SIZE,
        max_num_seqs,
        max_num_batched_tokens: 2048,
        max_model_len: 16_384,
        eos_token_ids: Vec::new(),
        prefix_caching: true,
        partial_matching: true,
        eviction: Eviction::default(),
        tenants: Vec::new(),
        max_pinned_blocks: 0,
        max_pinned_blocks_per_tenant: None,
        max_queued_requests: 4096,
        host: HostTier::default(),
    }
}

/// `num_sequences` that all decode, with `len` tokens each and room to go on for long.
fn decoding(num_sequences: u32, len: u32) -> Engine {
    let blocks = num_sequences * (len + 4096).div_ceil(BLOCK_SIZE);
    let mut engine = Engine::new(config(blocks, num_sequences));
    for _ in 0..num_sequences {
        engine.submit(len, 4096);
    }
    while engine.step() != num_sequences {}
    engine
}

fn decode(criterion: &mut Criterion) {
    for len in [512, 8192] {
        let mut group = criterion.benchmark_group(format!("step/decode{len}"));
        for num_sequences in [1, 64, 256, 1024] {
            group.throughput(Throughput::Elements(num_sequences.into()));
            group.bench_function(BenchmarkId::from_parameter(num_sequences), |bencher| {
                let mut engine = decoding(num_sequences, len);
                let mut num_left = NUM_STEPS;
                // Sequences end after their 4,096 tokens; setting up new ones is not part of a step.
                bencher.iter_custom(|num_iterations| {
                    let mut elapsed = Duration::ZERO;
                    for _ in 0..num_iterations {
                        if num_left == 0 {
                            engine = decoding(num_sequences, len);
                            num_left = NUM_STEPS;
                        }
                        num_left -= 1;
                        let start = Instant::now();
                        engine.step();
                        elapsed += start.elapsed();
                    }
                    elapsed
                });
            });
        }
        group.finish();
    }
}

fn mixed(criterion: &mut Criterion) {
    criterion.bench_function("step/mixed256", |bencher| {
        let mut engine = Engine::new(config(40_000, 256));
        bencher.iter(|| {
            if engine.scheduler.edge().stats().num_waiting < 8 {
                engine.submit(1024, 128);
            }
            engine.step()
        });
    });
}

fn thrash(criterion: &mut Criterion) {
    criterion.bench_function("step/thrash", |bencher| {
        bencher.iter_batched_ref(
            || {
                // 64 sequences that would need 64 * 40 blocks at their end have 1,000.
                let mut engine = Engine::new(config(1000, 64));
                for _ in 0..64 {
                    engine.submit(128, 512);
                }
                for _ in 0..150 {
                    engine.step();
                }
                assert!(engine.scheduler.edge().stats().preemptions > 0);
                engine
            },
            |engine| {
                for _ in 0..100 {
                    engine.step();
                }
            },
            BatchSize::LargeInput,
        );
    });
}

criterion_group!(benches, decode, mixed, thrash);
criterion_main!(benches);
