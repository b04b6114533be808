//! Products with packed weights, for the layers of a 135M model, beside what the processor could do.
//!
//! `ceiling` measures the limits in the same run: `read` sums memory that no cache holds, and the multiply-adds of an
//! arithmetic on registers alone. `linear/<arithmetic>/<K>x<N>` is M rows against weights that are visited in turns, as
//! in a step, so that they come from beyond the second-level cache. Bound for M = 1: the memory bandwidth. Bound for
//! many rows: the multiply-adds. Throughput is in bytes of weights where M = 1, else in operations (a multiply-add is
//! two).
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

/// (K, N): gate and up in one, down, q with k and v, the output layer.
const SHAPES: [(usize, usize); 4] = [(576, 3072), (1536, 576), (576, 960), (576, 49_152)];

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
    fn new(arithmetic: Arithmetic, dtype: Dtype, in_size: usize, out_size: usize, max_rows: usize) -> Self {
        let word = match dtype {
            Dtype::F32 => 0.5_f32.to_bits(),
            Dtype::Bf16 | Dtype::F16 => u32::from(bf16::from_f32(0.5).to_bits()) * 0x1_0001,
        };
        let numbers = |len: usize| vec![word; (len * dtype.size()).div_ceil(4)];
        let weight = numbers(in_size * out_size);
        let part = Part {
            weight: weight.as_ptr().cast(),
            num_rows: out_size,
            row_stride: in_size,
            bias: std::ptr::null(),
        };
        let num_layers = (VISITED_BYTES / (in_size * out_size * dtype.size())).max(1);
        Self {
            weights: (0..num_layers)
                .map(|_| {
                    // SAFETY: the part is whole.
                    unsafe { PackedWeight::pack(arithmetic, dtype, in_size, &[part], false) }
                        .expect("it is sound")
                })
                .collect(),
            x: numbers(max_rows * in_size),
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
            for (in_size, out_size) in SHAPES {
                let name = format!(
                    "linear/{}/{}/{in_size}x{out_size}",
                    arithmetic.name(),
                    dtype.name()
                );
                let mut group = criterion.benchmark_group(name);
                let mut layers = None;
                for num_threads in thread_counts() {
                    for num_rows in [1, 8, 32, 128, 512] {
                        group.throughput(if num_rows == 1 {
                            Throughput::Bytes((in_size * out_size * dtype.size()) as u64)
                        } else {
                            Throughput::Elements((2 * num_rows * in_size * out_size) as u64)
                        });
                        let id =
                            BenchmarkId::new(format!("{num_rows} rows"), format!("{num_threads} threads"));
                        group.bench_function(id, |bencher| {
                            pool::set_num_threads(num_threads).expect("a positive number");
                            let layers = layers.get_or_insert_with(|| {
                                Layers::new(arithmetic, dtype, in_size, out_size, 512)
                            });
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
