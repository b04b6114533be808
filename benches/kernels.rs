//! Cost of attention over the paged cache, for the heads of a 135M model (9 query heads, 3 key heads of 64).
//!
//! `decode` is one token each of 32 sequences of 1,024: bound by reading keys and values once, so its throughput in
//! bytes is to be held against the memory bandwidth. `long` is one token of one sequence of 16,384, which more than
//! one thread can only share by splitting the context. `cascade` is one token each of 64 sequences of 1,056 that share
//! the first 1,024: its throughput counts what each of them attends to, and may exceed the bandwidth. `prefill` is a prompt of 1,024: bound by arithmetic, two
//! multiply-adds for each query head, visible key and element; its throughput is in multiply-adds.
//!
//! Expected: decode and long within a factor of two of the memory bandwidth of the threads, prefill at a third or
//! more of their f32 multiply-adds.
//!
//! `cargo bench --bench kernels`

use std::cell::Cell;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pagedkv::cpu::attention::Attention;
use pagedkv::cpu::batch::Batch;
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::plan::{Geometry, Plan};
use pagedkv::cpu::pool;
use pagedkv::cpu::tensor::{CacheView, RowsView};

const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const BLOCK_SIZE: usize = 16;

/// A step of equal sequences, and its memory.
struct Step {
    dtype: Dtype,
    query: Vec<u32>,
    /// Cells, because the kernel writes through its address.
    out: Vec<Cell<u32>>,
    keys: Vec<u32>,
    values: Vec<u32>,
    num_tokens: usize,
    num_blocks: usize,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    table_start: Vec<i32>,
    block_ids: Vec<i32>,
}

fn int(value: usize) -> i32 {
    i32::try_from(value).expect("small")
}

/// Elements between -1 and 1, as memory of the type.
fn numbers(dtype: Dtype, len: usize) -> Vec<u32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32_768.0 - 1.0
    };
    match dtype {
        Dtype::F32 => (0..len).map(|_| next().to_bits()).collect(),
        Dtype::Bf16 | Dtype::F16 => {
            let mut half = || u32::from(bf16::from_f32(next()).to_bits());
            (0..len.div_ceil(2)).map(|_| half() << 16 | half()).collect()
        }
    }
}

impl Step {
    fn new(dtype: Dtype, num_sequences: usize, query_len: usize, seq_len: usize) -> Self {
        let table_len = seq_len.div_ceil(BLOCK_SIZE);
        let num_blocks = num_sequences * table_len;
        let elements = (num_blocks + 1) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM;
        let num_tokens = num_sequences * query_len;
        // A stride that shares no factor with the number of blocks scatters them over the whole cache.
        let stride = (num_blocks / 3..num_blocks)
            .find(|stride| gcd(*stride, num_blocks) == 1)
            .expect("there is one");
        let starts = |len| (0..=num_sequences).map(|idx| int(idx * len)).collect();
        Self {
            dtype,
            query: numbers(dtype, num_tokens * NUM_HEADS * HEAD_DIM),
            out: vec![Cell::new(0); num_tokens * NUM_HEADS * HEAD_DIM],
            keys: numbers(dtype, elements),
            values: numbers(dtype, elements),
            num_tokens,
            num_blocks: num_blocks + 1,
            query_start: starts(query_len),
            seq_lens: vec![int(seq_len); num_sequences],
            table_start: starts(table_len),
            block_ids: (0..num_blocks)
                .map(|idx| int(idx * stride % num_blocks + 1))
                .collect(),
        }
    }

    /// Lets all sequences begin with the blocks of the first one.
    fn share(&mut self, num_positions: usize) {
        let table_len = self.block_ids.len() / self.seq_lens.len();
        let (first, others) = self.block_ids.split_at_mut(table_len);
        for table in others.chunks_mut(table_len) {
            let num_blocks = num_positions / BLOCK_SIZE;
            table[..num_blocks].copy_from_slice(&first[..num_blocks]);
        }
    }

    fn rows(&self, memory: *const u32) -> RowsView {
        RowsView {
            address: memory.cast_mut().cast(),
            dtype: self.dtype,
            num_tokens: self.num_tokens,
            num_heads: NUM_HEADS,
            head_dim: HEAD_DIM,
            token_stride: NUM_HEADS * HEAD_DIM,
            head_stride: HEAD_DIM,
        }
    }

    fn cache(&self, memory: &[u32]) -> CacheView {
        CacheView {
            address: memory.as_ptr().cast_mut().cast(),
            dtype: self.dtype,
            num_blocks: self.num_blocks,
            num_kv_heads: NUM_KV_HEADS,
            block_size: BLOCK_SIZE,
            head_dim: HEAD_DIM,
            block_stride: NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM,
            head_stride: BLOCK_SIZE * HEAD_DIM,
            slot_stride: HEAD_DIM,
        }
    }

    /// The work of the step, which all layers of a model share.
    fn plan(&self) -> Plan {
        let batch = Batch {
            query_start: &self.query_start,
            seq_lens: &self.seq_lens,
            table_start: &self.table_start,
            block_ids: &self.block_ids,
        };
        let geometry = Geometry {
            num_tokens: self.num_tokens,
            num_heads: NUM_HEADS,
            num_kv_heads: NUM_KV_HEADS,
            num_blocks: self.num_blocks,
            block_size: BLOCK_SIZE,
        };
        Plan::new(&batch, geometry).expect("the step is sound")
    }

    fn attend(&self, plan: &Plan) {
        let call = Attention {
            out: self.rows(self.out.as_ptr().cast()),
            query: self.rows(self.query.as_ptr()),
            key_cache: self.cache(&self.keys),
            value_cache: self.cache(&self.values),
            plan,
            scale: 0.125,
        };
        call.check().expect("the step is sound");
        // SAFETY: checked, and all of the memory is the step's.
        unsafe { call.run() };
    }

    /// Bytes of the keys and values that the step reads.
    fn cache_bytes(&self) -> u64 {
        let tokens: i32 = self.seq_lens.iter().sum();
        u64::from(tokens.unsigned_abs()) * (2 * NUM_KV_HEADS * HEAD_DIM * self.dtype.size()) as u64
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn attention(criterion: &mut Criterion) {
    let max_threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut thread_counts = vec![1, max_threads];
    thread_counts.dedup();
    for (name, num_sequences, query_len, seq_len, num_shared) in [
        ("decode", 32, 1, 1024, 0),
        ("cascade", 64, 1, 1056, 1024),
        ("long", 1, 1, 16_384, 0),
        ("prefill", 1, 1024, 1024, 0),
    ] {
        let mut group = criterion.benchmark_group(name);
        for dtype in [Dtype::F32, Dtype::Bf16] {
            let mut step = Step::new(dtype, num_sequences, query_len, seq_len);
            step.share(num_shared);
            let visible = (query_len * (query_len + 1) / 2) as u64;
            group.throughput(if query_len == 1 {
                Throughput::Bytes(step.cache_bytes())
            } else {
                Throughput::Elements(visible * (2 * NUM_HEADS * HEAD_DIM) as u64)
            });
            for &num_threads in &thread_counts {
                pool::set_num_threads(num_threads).expect("a positive number");
                let plan = step.plan();
                let id = BenchmarkId::new(format!("{dtype:?}"), format!("{num_threads} threads"));
                group.bench_function(id, |bencher| bencher.iter(|| step.attend(&plan)));
            }
        }
        group.finish();
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(3)).warm_up_time(Duration::from_secs(1)).sample_size(20);
    targets = attention
}
criterion_main!(benches);
