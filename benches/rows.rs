//! Cost of the kernels between the products, for the sizes of a 135M model (576 elements a row, 1,536 of the
//! feed-forward layer, 9 query and 3 key heads of 64, 49,152 tokens), in bfloat16.
//!
//! Each group isolates one kernel on 16 rows, a decode step that fits in a cache, and on 2,048, a step of prompts that
//! does not. Their throughput is in bytes read and written, each once, and is to be held against `read`, the memory
//! bandwidth in the same run: that is the bound of all of them but for drawn samples. `norm` adds the residual, and
//! reads and writes it; `silu_mul` computes an exponential an element; `rope_cache` writes to scattered slots; `greedy`
//! looks for the largest logit, and `drawn` computes random words for each, and noise for few.
//!
//! Expected: on 2,048 rows `norm` and `silu_mul` within 1.5 times the time of that, `rope_cache` within three times;
//! `greedy` at the bandwidth; `drawn` below 2 ns an element and thread.
//!
//! `cargo bench --bench rows`, `-- norm`

use std::cell::Cell;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pagedkv::cpu::activation::SiluMul;
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::norm::RmsNorm;
use pagedkv::cpu::peak::Stream;
use pagedkv::cpu::pool;
use pagedkv::cpu::rope_cache::{AngleTable, RopeCache};
use pagedkv::cpu::sample::{Logits, NUM_PARAMETERS, sample};
use pagedkv::cpu::tensor::{CacheView, MatrixView, RowsView};

const HIDDEN: usize = 576;
const INTERMEDIATE: usize = 1536;
const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const BLOCK_SIZE: usize = 16;
const VOCAB: usize = 49_152;
const ROWS: [usize; 2] = [16, 2048];

/// A tensor of bf16: cells, because the kernels write through its address.
struct Tensor(Vec<Cell<u16>>);

impl Tensor {
    /// Numbers between -1 and 1.
    fn new(len: usize) -> Self {
        let mut state = 1_u32;
        let next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let value = f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32_768.0 - 1.0;
            Cell::new(bf16::from_f32(value).to_bits())
        };
        Self(std::iter::repeat_with(next).take(len).collect())
    }

    fn address(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut().cast()
    }

    fn matrix(&self, width: usize) -> MatrixView {
        MatrixView {
            address: self.address(),
            dtype: Dtype::Bf16,
            num_rows: self.0.len() / width,
            width,
            row_stride: width,
        }
    }

    fn heads(&self, num_heads: usize) -> RowsView {
        RowsView {
            address: self.address(),
            dtype: Dtype::Bf16,
            num_tokens: self.0.len() / (num_heads * HEAD_DIM),
            num_heads,
            head_dim: HEAD_DIM,
            token_stride: num_heads * HEAD_DIM,
            head_stride: HEAD_DIM,
        }
    }

    fn cache(&self) -> CacheView {
        let block = NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM;
        CacheView {
            address: self.address(),
            dtype: Dtype::Bf16,
            num_blocks: self.0.len() / block,
            num_kv_heads: NUM_KV_HEADS,
            block_size: BLOCK_SIZE,
            head_dim: HEAD_DIM,
            block_stride: block,
            head_stride: BLOCK_SIZE * HEAD_DIM,
            slot_stride: HEAD_DIM,
        }
    }
}

/// Measures `work`, which moves so many bytes.
fn measure(criterion: &mut Criterion, group: &str, num_rows: usize, num_bytes: usize, work: impl FnMut()) {
    let mut work = work;
    let mut group = criterion.benchmark_group(group);
    group.throughput(Throughput::Bytes(num_bytes as u64));
    let id = BenchmarkId::new(
        format!("{num_rows} rows"),
        format!("{} threads", pool::num_threads()),
    );
    group.bench_function(id, |bencher| bencher.iter(&mut work));
    group.finish();
}

fn read(criterion: &mut Criterion) {
    let stream = Stream::default();
    measure(criterion, "read", 0, Stream::NUM_BYTES, || {
        stream.read(pool::num_threads());
    });
}

fn norm(criterion: &mut Criterion) {
    for num_rows in ROWS {
        let [x, out] = [(); 2].map(|()| Tensor::new(num_rows * HIDDEN));
        let weight = Tensor::new(HIDDEN);
        let call = RmsNorm {
            out: out.matrix(HIDDEN),
            x: x.matrix(HIDDEN),
            weight: weight.matrix(HIDDEN),
            eps: 1e-5,
        };
        call.check().expect("it fits");
        // SAFETY: checked, and all of the memory is ours.
        measure(
            criterion,
            "norm",
            num_rows,
            2 * num_rows * HIDDEN * 2,
            || unsafe {
                call.run();
            },
        );
    }
}

fn silu_mul(criterion: &mut Criterion) {
    for num_rows in ROWS {
        let [gate, up, out] = [(); 3].map(|()| Tensor::new(num_rows * INTERMEDIATE));
        let call = SiluMul {
            out: out.matrix(INTERMEDIATE),
            gate: gate.matrix(INTERMEDIATE),
            up: up.matrix(INTERMEDIATE),
        };
        call.check().expect("it fits");
        let num_bytes = 3 * num_rows * INTERMEDIATE * 2;
        // SAFETY: checked, and all of the memory is ours.
        measure(criterion, "silu_mul", num_rows, num_bytes, || unsafe {
            call.run();
        });
    }
}

fn rope_cache(criterion: &mut Criterion) {
    for num_rows in ROWS {
        let [query, out] = [(); 2].map(|()| Tensor::new(num_rows * NUM_HEADS * HEAD_DIM));
        let [key, value] = [(); 2].map(|()| Tensor::new(num_rows * NUM_KV_HEADS * HEAD_DIM));
        let num_slots = 2 * num_rows.next_multiple_of(BLOCK_SIZE);
        let [key_cache, value_cache] = [(); 2].map(|()| Tensor::new(num_slots * NUM_KV_HEADS * HEAD_DIM));
        let angles = vec![0.6; num_rows * HEAD_DIM];
        let table = AngleTable {
            values: &angles,
            rot: HEAD_DIM,
        };
        let int = |value: usize| i32::try_from(value).expect("small");
        let positions: Vec<i32> = (0..num_rows).map(int).collect();
        // Every other block: odd ones.
        let slot = |idx: usize| int((2 * (idx / BLOCK_SIZE) + 1) * BLOCK_SIZE + idx % BLOCK_SIZE);
        let slot_mapping: Vec<i32> = (0..num_rows).map(slot).collect();
        let call = RopeCache {
            out: out.heads(NUM_HEADS),
            query: query.heads(NUM_HEADS),
            key: key.heads(NUM_KV_HEADS),
            value: value.heads(NUM_KV_HEADS),
            cos: table,
            sin: table,
            positions: &positions,
            key_cache: key_cache.cache(),
            value_cache: value_cache.cache(),
            slot_mapping: &slot_mapping,
        };
        call.check().expect("it fits");
        let num_bytes = 2 * num_rows * (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM * 2;
        // SAFETY: checked, and all of the memory is ours.
        measure(criterion, "rope_cache", num_rows, num_bytes, || unsafe {
            call.run();
        });
    }
}

fn sampling(criterion: &mut Criterion) {
    for num_rows in [1, 32] {
        let values: Vec<f32> = (0..num_rows * VOCAB)
            .map(|idx| f32::from(u16::try_from(idx * 7919 % 65_521).expect("below 2^16")) / 8192.0)
            .collect();
        let logits = Logits {
            values: &values,
            vocab_size: VOCAB,
            row_stride: VOCAB,
        };
        let mut tokens = vec![0; num_rows];
        let kinds = [
            ("greedy", 0.0_f32, 1.0_f32),
            ("drawn", 1.0, 1.0),
            ("drawn_top_p", 1.0, 0.9),
        ];
        for (name, temperature, top_p) in kinds {
            let mut words = [0; NUM_PARAMETERS];
            words[0] = temperature.to_bits().cast_signed();
            words[1] = top_p.to_bits().cast_signed();
            let parameters = vec![words; num_rows];
            measure(criterion, name, num_rows, num_rows * VOCAB * 4, || {
                sample(&logits, &parameters, &mut tokens);
            });
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300)).sample_size(10);
    targets = read, norm, silu_mul, rope_cache, sampling
}
criterion_main!(benches);
