//! Products with packed weights, for the layers of a 135M model, beside what the processor could do.
//!
//! `ceiling` measures the limits in the same run: `read` sums memory that no cache holds, and the multiply-adds of an
//! arithmetic on registers alone. `linear/<arithmetic>/<K>x<N>` is M rows against weights that are visited in turns, as
//! in a step, so that they come from beyond the second-level cache. Bound for M = 1: the memory bandwidth. Bound for
//! many rows: the multiply-adds. Throughput is in bytes of weights where M = 1, else in operations (a multiply-add is
//! two). Numbers are random, as those of layers.
//!
//! Expected on AVX512-BF16 with two cores: 90% of `read` at M = 1, 70% of the multiply-adds at M = 32, 85% from 128 on.
//! AMX multiplies so fast that reading its operands is the bound at every M.
//!
//! `cargo bench --bench linear -- ceiling`, `-- linear/amx`

use std::cell::Cell;
use std::time::Duration;

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use half::bf16;
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::linear::{Arithmetic, Linear, PackedWeight, Part};
use pagedkv::cpu::tensor::MatrixView;
use pagedkv::cpu::{peak, pool};

/// K, N, and whether rows of weights are a gate and what it lets through: gate and up, down, q with k and v, the output
/// layer.
const SHAPES: [(usize, usize, bool); 4] = [
    (576, 3072, true),
    (1536, 576, false),
    (576, 960, false),
    (576, 49_152, false),
];

/// M: what decodes have, and chunks.
const NUM_ROWS: [usize; 6] = [1, 8, 32, 128, 512, 2048];

/// Bytes of the weights that are visited in turns.
const VISITED_BYTES: usize = 128 << 20;

fn thread_counts() -> Vec<usize> {
    let mut counts = vec![1, std::thread::available_parallelism().map_or(1, usize::from)];
    counts.dedup();
    counts
}

fn ceiling(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("ceiling");
    let stream = peak::Stream::default();
    for num_threads in thread_counts() {
        group.throughput(Throughput::Bytes(peak::Stream::NUM_BYTES as u64));
        group.bench_function(BenchmarkId::new("read", num_threads), |bencher| {
            bencher.iter(|| stream.read(num_threads));
        });
        for peak in peak::peaks() {
            const ROUNDS: usize = 1_000_000;
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

/// Random numbers between -1 and 1.
fn numbers(len: usize, dtype: Dtype) -> Vec<u32> {
    let mut state = 0x9e37_79b9_u32;
    let mut number = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        #[expect(clippy::cast_precision_loss, reason = "any number will do")]
        let number = state.cast_signed() as f32 / 2_147_483_648.0;
        number
    };
    match dtype {
        Dtype::F32 => (0..len).map(|_| number().to_bits()).collect(),
        Dtype::Bf16 | Dtype::F16 => (0..len.div_ceil(2))
            .map(|_| {
                let [low, high] =
                    [number(), number()].map(|number| u32::from(bf16::from_f32(number).to_bits()));
                low | high << 16
            })
            .collect(),
    }
}

/// Weights to visit in turns, and rows to multiply them with.
struct Layers {
    weights: Vec<PackedWeight>,
    x: Vec<u32>,
    /// Cells, because the kernel writes through its address.
    out: Vec<Cell<u32>>,
    dtype: Dtype,
    next: Cell<usize>,
}

impl Layers {
    fn new(
        arithmetic: Arithmetic,
        dtype: Dtype,
        (in_size, out_size, is_gated): (usize, usize, bool),
        max_rows: usize,
    ) -> Self {
        let mut weight = numbers(in_size * out_size, dtype);
        if arithmetic.panel_dtype(dtype) != dtype {
            for bits in &mut weight {
                *bits &= 0xffff_0000; // a number of bf16
            }
        }
        let num_parts = 1 + usize::from(is_gated);
        let num_part_rows = out_size / num_parts;
        let parts: Vec<Part> = (0..num_parts)
            .map(|idx| Part {
                weight: weight
                    .as_ptr()
                    .cast::<u8>()
                    .wrapping_add(idx * num_part_rows * in_size * dtype.size()),
                num_rows: num_part_rows,
                row_stride: in_size,
                bias: std::ptr::null(),
            })
            .collect();
        let pack = || {
            // SAFETY: the parts are whole.
            unsafe { PackedWeight::pack(arithmetic, dtype, in_size, &parts, is_gated) }.expect("it is sound")
        };
        let mut weights = vec![pack()];
        weights.resize_with((VISITED_BYTES / weights[0].num_bytes()).max(1), pack);
        Self {
            weights,
            x: numbers(max_rows * in_size, dtype),
            out: vec![Cell::new(0); (max_rows * out_size * dtype.size()).div_ceil(4)],
            dtype,
            next: Cell::new(0),
        }
    }

    fn multiply(&self, num_rows: usize) {
        let weight = &self.weights[self.next.get()];
        self.next.set((self.next.get() + 1) % self.weights.len());
        let view = |address: *const u32, width| MatrixView {
            address: address.cast_mut().cast(),
            dtype: self.dtype,
            num_rows,
            width,
            row_stride: width,
        };
        let call = Linear {
            out: view(self.out.as_ptr().cast(), weight.out_size()),
            adds: false,
            x: view(self.x.as_ptr(), weight.in_size()),
            weight,
        };
        call.check().expect("it fits");
        // SAFETY: checked, and all of the memory is ours.
        unsafe { call.run() };
    }
}

fn linear(criterion: &mut Criterion) {
    for dtype in [Dtype::Bf16, Dtype::F32] {
        for arithmetic in Arithmetic::available(dtype) {
            for shape @ (in_size, out_size, is_gated) in SHAPES {
                let name = format!(
                    "linear/{}/{}/{in_size}x{out_size}{}",
                    arithmetic.name(),
                    dtype.name(),
                    if is_gated { " gated" } else { "" }
                );
                let mut group = criterion.benchmark_group(name);
                let mut layers = None;
                for num_threads in thread_counts() {
                    for num_rows in NUM_ROWS {
                        let layers =
                            layers.get_or_insert_with(|| Layers::new(arithmetic, dtype, shape, NUM_ROWS[5]));
                        group.throughput(if num_rows == 1 {
                            Throughput::Bytes(layers.weights[0].num_bytes() as u64)
                        } else {
                            Throughput::Elements((2 * num_rows * in_size * out_size) as u64)
                        });
                        let id =
                            BenchmarkId::new(format!("{num_rows} rows"), format!("{num_threads} threads"));
                        group.bench_function(id, |bencher| {
                            pool::set_num_threads(num_threads).expect("a positive number");
                            bencher.iter(|| layers.multiply(num_rows));
                        });
                    }
                }
                group.finish();
            }
        }
    }
}

criterion_group! {
    name = benches;
    config = Criterion::default().measurement_time(Duration::from_secs(1)).warm_up_time(Duration::from_millis(300)).sample_size(10);
    targets = ceiling, linear
}
criterion_main!(benches);
