//! Cost of attention over the paged cache, for the heads of a 135M model (9 query heads, 3 key heads of 64).
//!
//! A call is one layer's; the layers of a step are visited in turns, so that keys and values come from beyond the
//! second-level cache, as they do in a model. `ceiling` measures in the same run how fast memory is read.
//!
//! - `decode/cached`: one token each of 4 sequences of 256, of one layer that stays in the second-level cache. Bound by
//!   instructions.
//! - `decode/crowd`: one token each of 32 sequences of 48 to 596 tokens, as in a crowd of short requests; `decode/1024`:
//!   of 32 sequences of 1,024. Bound by reading keys and values once: throughput in bytes, against `ceiling`.
//! - `decode/short`: one token each of 64 sequences of 48, as behind a prefix that a cascade computes. Bound by what a tile
//!   costs beside its keys.
//! - `decode/long`: one token of one sequence of 16,384, which several threads can only share by splitting the context.
//! - `decode/cascade`: one token each of 64 sequences of 1,056 that share the first 1,024. Throughput counts what each
//!   of them attends to, and exceeds the bandwidth.
//! - `prefill`: prompts of 1,056 (`whole`) and of 4 times 128 (`short`), and a chunk of 512 behind 512: bound by
//!   arithmetic, two multiply-adds for each query head, visible key and element; throughput is in operations (a
//!   multiply-add is two), beside `peak`, what the same run's multiply-adds on registers alone reach.
//!
//! Expected: decode at three quarters or more of `ceiling`, prefill in f32 at a third or more of `peak`. On matrix tiles
//! the exponentials take longer than the products, and the processor computes them at half its rate beside them: a fifth.
//!
//! `cargo bench --bench kernels -- 'ceiling|decode'`, `-- 'peak/amx|prefill'`

use std::cell::{Cell, LazyCell};
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pagedkv::cpu::attention::Attention;
use pagedkv::cpu::batch::Batch;
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::plan::{Geometry, Plan};
use pagedkv::cpu::tensor::{CacheView, RowsView};
use pagedkv::cpu::{peak, pool};

const NUM_HEADS: usize = 9;
const NUM_KV_HEADS: usize = 3;
const HEAD_DIM: usize = 64;
const BLOCK_SIZE: usize = 16;
const MAX_LAYERS: usize = 30;

/// Bytes of the layers that are visited in turns, if so many layers are not more than the model has.
const VISITED_BYTES: usize = 256 << 20;

/// Bytes of a layer up to which it is visited alone: it then lies in the second-level cache.
const CACHED_BYTES: usize = 3 << 19;

/// The sequences of a step.
struct Sizes {
    /// Tokens in the step, the last ones of each sequence.
    query_len: usize,
    seq_lens: Vec<usize>,
    /// Positions at the beginning of all of them whose blocks they share.
    num_shared: usize,
}

impl Sizes {
    /// Bytes of the keys and values that a call attends to, or multiplications and additions where it has prompts.
    fn throughput(&self, dtype: Dtype) -> Throughput {
        if self.query_len == 1 {
            let positions: usize = self.seq_lens.iter().sum();
            return Throughput::Bytes((positions * 2 * NUM_KV_HEADS * HEAD_DIM * dtype.size()) as u64);
        }
        let seen = |&len: &usize| (len + 1 - self.query_len..=len).sum::<usize>();
        Throughput::Elements(
            (self.seq_lens.iter().map(seen).sum::<usize>() * 4 * NUM_HEADS * HEAD_DIM) as u64,
        )
    }
}

/// A step and its memory.
struct Step {
    dtype: Dtype,
    query: Vec<u32>,
    /// Cells, because the kernel writes through its address.
    out: Vec<Cell<u32>>,
    /// Keys and values of each layer.
    layers: Vec<[Vec<u32>; 2]>,
    next_layer: Cell<usize>,
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

/// Elements between -1 and 1, as memory of the type, in the large pages that caches and weights lie in.
fn numbers(dtype: Dtype, len: usize) -> Vec<u32> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f32::from(u16::try_from(state >> 16).expect("16 bits")) / 32_768.0 - 1.0
    };
    let num_words = (len * dtype.size()).div_ceil(size_of::<u32>());
    let mut words = Vec::with_capacity(num_words);
    prefer_large_pages(&mut words);
    match dtype {
        Dtype::F32 => words.extend((0..num_words).map(|_| next().to_bits())),
        Dtype::Bf16 | Dtype::F16 => {
            let mut half = || u32::from(bf16::from_f32(next()).to_bits());
            words.extend((0..num_words).map(|_| half() << 16 | half()));
        }
    }
    words
}

/// Advises the system on the spare memory of a vector.
fn prefer_large_pages(words: &mut Vec<u32>) {
    #[cfg(target_os = "linux")]
    {
        const PAGE_BYTES: usize = 4096;
        let spare = words.spare_capacity_mut();
        let start = spare.as_mut_ptr().cast::<u8>();
        let skipped = start.align_offset(PAGE_BYTES);
        let len = size_of_val(spare).saturating_sub(skipped);
        // SAFETY: advice on memory that nobody else has, which stays as it is.
        unsafe { libc::madvise(start.wrapping_add(skipped).cast(), len, libc::MADV_HUGEPAGE) };
    }
    #[cfg(not(target_os = "linux"))]
    let _ = words;
}

/// Where each of a list of parts begins, and the end.
fn starts(lens: impl Iterator<Item = usize>) -> Vec<i32> {
    let ends = lens.scan(0, |end, len| {
        *end += len;
        Some(int(*end))
    });
    std::iter::once(0).chain(ends).collect()
}

impl Step {
    fn new(dtype: Dtype, sizes: &Sizes) -> Self {
        let Sizes {
            query_len,
            seq_lens,
            num_shared,
        } = sizes;
        let table_lens = || seq_lens.iter().map(|len| len.div_ceil(BLOCK_SIZE));
        let num_blocks: usize = table_lens().sum();
        let elements = (num_blocks + 1) * NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM;
        let num_tokens = seq_lens.len() * query_len;
        // A stride that shares no factor with the number of blocks scatters them over the whole cache.
        let stride = (num_blocks / 3..num_blocks)
            .find(|stride| gcd(*stride, num_blocks) == 1)
            .expect("there is one");
        let layer_bytes = 2 * elements * dtype.size();
        let num_layers = match layer_bytes {
            ..=CACHED_BYTES => 1,
            _ => (VISITED_BYTES / layer_bytes).clamp(1, MAX_LAYERS),
        };
        let mut step = Self {
            dtype,
            query: numbers(dtype, num_tokens * NUM_HEADS * HEAD_DIM),
            out: vec![Cell::new(0); num_tokens * NUM_HEADS * HEAD_DIM],
            layers: (0..num_layers)
                .map(|_| [numbers(dtype, elements), numbers(dtype, elements)])
                .collect(),
            next_layer: Cell::new(0),
            num_tokens,
            num_blocks: num_blocks + 1,
            query_start: starts(seq_lens.iter().map(|_| *query_len)),
            seq_lens: seq_lens.iter().map(|&len| int(len)).collect(),
            table_start: starts(table_lens()),
            block_ids: (0..num_blocks)
                .map(|idx| int(idx * stride % num_blocks + 1))
                .collect(),
        };
        step.share(*num_shared);
        step
    }

    /// Lets all sequences begin with the blocks of the first one; they are of one length.
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

    /// Computes the next layer.
    fn attend(&self, plan: &Plan) {
        let layer = self.next_layer.get();
        self.next_layer.set((layer + 1) % self.layers.len());
        let [keys, values] = &self.layers[layer];
        let call = Attention {
            out: self.rows(self.out.as_ptr().cast()),
            query: self.rows(self.query.as_ptr()),
            key_cache: self.cache(keys),
            value_cache: self.cache(values),
            plan,
            scale: 0.125,
        };
        call.check().expect("the step is sound");
        // SAFETY: checked, and all of the memory is the step's.
        unsafe { call.run() };
    }
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

fn thread_counts() -> Vec<usize> {
    let mut counts = vec![1, std::thread::available_parallelism().map_or(1, usize::from)];
    counts.dedup();
    counts
}

fn ceiling(criterion: &mut Criterion) {
    let stream = peak::Stream::default();
    let mut group = criterion.benchmark_group("ceiling");
    group.throughput(Throughput::Bytes(peak::Stream::NUM_BYTES as u64));
    for num_threads in thread_counts() {
        group.bench_function(BenchmarkId::new("read", num_threads), |bencher| {
            bencher.iter(|| stream.read(num_threads));
        });
    }
    group.finish();
}

/// Multiply-adds on registers.
fn peaks(criterion: &mut Criterion) {
    const ROUNDS: usize = 20_000;
    let mut group = criterion.benchmark_group("peak");
    for peak in peak::peaks() {
        for num_threads in thread_counts() {
            group.throughput(Throughput::Elements(
                (num_threads * ROUNDS * peak.operations) as u64,
            ));
            group.bench_function(BenchmarkId::new(peak.name, num_threads), |bencher| {
                bencher.iter(|| peak::on_threads(num_threads, |_| (peak.run)(ROUNDS)));
            });
        }
    }
    group.finish();
}

/// Measures a step on one thread and on all.
fn measure(criterion: &mut Criterion, name: &str, sizes: &Sizes) {
    let mut group = criterion.benchmark_group(name);
    for dtype in [Dtype::F32, Dtype::Bf16] {
        // Filling the memory takes longer than measuring, and groups may be left out.
        let step = LazyCell::new(|| Step::new(dtype, sizes));
        group.throughput(sizes.throughput(dtype));
        for num_threads in thread_counts() {
            let id = BenchmarkId::new(format!("{dtype:?}"), num_threads);
            group.bench_function(id, |bencher| {
                pool::set_num_threads(num_threads).expect("a positive number");
                let plan = step.plan();
                bencher.iter(|| step.attend(&plan));
            });
        }
    }
    group.finish();
}

fn attention(criterion: &mut Criterion) {
    // Lengths that a stride without a common factor spreads over the range.
    let crowd: Vec<usize> = (0..32).map(|idx| 48 + idx * 211 % 549).collect();
    for (name, query_len, seq_lens, num_shared) in [
        ("decode/cached", 1, vec![256; 4], 0),
        ("decode/crowd", 1, crowd, 0),
        ("decode/1024", 1, vec![1024; 32], 0),
        ("decode/short", 1, vec![48; 64], 0),
        ("decode/long", 1, vec![16_384], 0),
        ("decode/cascade", 1, vec![1056; 64], 1024),
        ("prefill/short", 128, vec![128; 4], 0),
        ("prefill/whole", 1056, vec![1056], 0),
        ("prefill/chunk", 512, vec![1024], 0),
    ] {
        let sizes = Sizes {
            query_len,
            seq_lens,
            num_shared,
        };
        measure(criterion, name, &sizes);
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300)).sample_size(20);
    targets = ceiling, peaks, attention
}
criterion_main!(benches);
