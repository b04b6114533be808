//! What the processor could do at most: the ceilings that kernels are measured against.
//!
//! Called by the benchmarks (`benches/linear.rs`, `benches/kernels.rs`, and `python -m pagedkv.bench where` through the
//! bindings), in the same run as what they measure. The loops have more sums than an instruction's latency can hide, and
//! multiply numbers whose digits differ: tiles of zeros are multiplied 1.2 times as fast. `amx_bf16_with_loads` reads its
//! operands from the nearest cache, as any product of matrices must (four tiles loaded for four products are the least that
//! eight registers allow); all others read registers.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::linear::Memory;
use super::pool;

/// Times that a measurement is taken; the shortest counts.
const TRIES: usize = 5;

/// Rounds of a loop in one try: some tens of milliseconds.
const ROUNDS: usize = 1_000_000;

/// A loop of one kind of multiply-add.
#[derive(Clone, Copy, Debug)]
pub struct Peak {
    /// Name of the arithmetic, as in `linear::Arithmetic`.
    pub name: &'static str,
    /// Operations of a round; a multiply-add is two.
    pub operations: usize,
    /// Does so many rounds, on the calling thread.
    pub run: fn(usize),
}

/// The loops that run on this processor.
pub fn peaks() -> Vec<Peak> {
    #[cfg(target_arch = "x86_64")]
    {
        loops::available()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Vec::new()
    }
}

/// Runs `work` on so many threads at once; each gets its number.
pub fn on_threads(num_threads: usize, work: impl Fn(usize) + Sync) {
    std::thread::scope(|scope| {
        let work = &work;
        for idx in 1..num_threads {
            scope.spawn(move || work(idx));
        }
        work(0);
    });
}

/// Memory to read, laid out as weights are: in large pages.
pub struct Stream(Memory);

impl Stream {
    /// Bytes that are read: more than a cache holds.
    pub const NUM_BYTES: usize = 256 << 20;

    /// Sums all of it, on so many threads.
    pub fn read(&self, num_threads: usize) {
        let len = Self::NUM_BYTES / size_of::<u64>();
        #[expect(clippy::cast_ptr_alignment, reason = "it begins with a cache line")]
        // SAFETY: so long, aligned to a cache line, written by `default` and never again.
        let words = unsafe { std::slice::from_raw_parts(self.0.address().cast::<u64>(), len) };
        on_threads(num_threads, |idx| {
            let part = &words[len * idx / num_threads..len * (idx + 1) / num_threads];
            black_box(sum(part));
        });
    }
}

impl Default for Stream {
    fn default() -> Self {
        let memory = Memory::new(Self::NUM_BYTES);
        // SAFETY: the memory is ours, and as long.
        unsafe { memory.address().write_bytes(1, Self::NUM_BYTES) };
        Self(memory)
    }
}

/// Sum of numbers, on vectors where there are some.
fn sum(words: &[u64]) -> u64 {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx512f") {
        // SAFETY: the processor has the instructions.
        return unsafe { loops::sum(words) };
    }
    words.iter().fold(0, |sum: u64, word| sum.wrapping_add(*word))
}

/// Measures on as many threads as the kernels use: "read" in bytes a second, and each peak in operations a second.
/// Takes a second or so.
pub fn measure() -> Vec<(&'static str, f64)> {
    let num_threads = pool::num_threads();
    let stream = Stream::default();
    let mut found = vec![("read", rate(Stream::NUM_BYTES, || stream.read(num_threads)))];
    for peak in peaks() {
        let operations = num_threads * ROUNDS * peak.operations;
        found.push((
            peak.name,
            rate(operations, || on_threads(num_threads, |_| (peak.run)(ROUNDS))),
        ));
    }
    found
}

/// Amount a second of the fastest try.
fn rate(amount: usize, work: impl Fn()) -> f64 {
    let mut shortest = Duration::MAX;
    for _ in 0..TRIES {
        let start = Instant::now();
        work();
        shortest = shortest.min(start.elapsed());
    }
    #[expect(clippy::cast_precision_loss, reason = "a figure to be read")]
    let amount = amount as f64;
    amount / shortest.as_secs_f64()
}

#[cfg(target_arch = "x86_64")]
mod loops {
    use std::arch::asm;
    use std::arch::x86_64::{
        _MM_HINT_T1, _mm_prefetch, _mm512_add_epi64, _mm512_loadu_si512, _mm512_setzero_si512,
        _mm512_storeu_si512,
    };

    use half::bf16;

    use super::Peak;
    use crate::cpu::amx::{ROW_BYTES, Shapes, TILE_LEN};
    use crate::cpu::element::Dtype;
    use crate::cpu::linear::Arithmetic;

    /// Sums that are independent of each other.
    const SUMS: usize = 24;

    pub(super) fn available() -> Vec<Peak> {
        let all = [
            Peak {
                name: "avx512",
                operations: SUMS * 32,
                // SAFETY: kept only where the processor has the instructions.
                run: |rounds| unsafe { fma(rounds) },
            },
            Peak {
                name: "avx512_bf16",
                operations: SUMS * 64,
                // SAFETY: as above.
                run: |rounds| unsafe { dot(rounds) },
            },
            Peak {
                name: "amx_bf16",
                operations: 4 * 16 * 16 * 64,
                // SAFETY: as above.
                run: |rounds| unsafe { amx(rounds) },
            },
            Peak {
                name: "amx_bf16x3",
                operations: 4 * 16 * 16 * 64 / 3,
                // SAFETY: as above.
                run: |rounds| unsafe { amx(rounds) },
            },
            Peak {
                name: "amx_bf16_with_loads",
                operations: 4 * 16 * 16 * 64,
                // SAFETY: as above.
                run: |rounds| unsafe { amx_with_loads(rounds) },
            },
        ];
        let present: Vec<_> = [Dtype::Bf16, Dtype::F32]
            .into_iter()
            .flat_map(Arithmetic::available)
            .map(Arithmetic::name)
            .collect();
        all.into_iter()
            .filter(|peak| present.contains(&peak.name.trim_end_matches("_with_loads")))
            .collect()
    }

    /// Streams that a thread reads at once, as a product of one row reads panels.
    const STREAMS: usize = 4;

    /// Bytes that a stream is fetched ahead.
    const AHEAD: usize = 4096;

    /// Sum of numbers.
    #[target_feature(enable = "avx512f")]
    pub(super) fn sum(words: &[u64]) -> u64 {
        let lines = words.as_chunks::<8>().0;
        let len = lines.len() / STREAMS;
        let mut sums = [_mm512_setzero_si512(); STREAMS];
        for idx in 0..len {
            for (stream, sum) in sums.iter_mut().enumerate() {
                let line: *const i8 = lines[stream * len + idx].as_ptr().cast();
                _mm_prefetch::<_MM_HINT_T1>(line.wrapping_add(AHEAD));
                // SAFETY: a line is 64 bytes.
                *sum = _mm512_add_epi64(*sum, unsafe { _mm512_loadu_si512(line.cast()) });
            }
        }
        let mut lanes = [0_u64; 8];
        let total = sums.into_iter().reduce(|sum, other| _mm512_add_epi64(sum, other));
        // SAFETY: there is room for eight.
        unsafe {
            _mm512_storeu_si512(
                lanes.as_mut_ptr().cast(),
                total.unwrap_or_else(|| _mm512_setzero_si512()),
            );
        };
        lanes.into_iter().fold(0, u64::wrapping_add)
    }

    /// Numbers of all sizes below one half, with all digits in use: how fast products are may depend on them.
    fn operands<const N: usize>() -> [[bf16; 32]; N] {
        let mut state = 1_u32;
        [(); N].map(|()| {
            [(); 32].map(|()| {
                state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
                let [_, _, low, high] = state.to_le_bytes();
                bf16::from_f32(f32::from(u16::from_le_bytes([low, high])) / 131_072.0 - 0.25)
            })
        })
    }

    /// Adds products of the vectors 24 to 27 to each of the vectors 0 to 23. Assembly, because a compiler that keeps the
    /// sums in memory measures its own stores: a fifth of the peak was seen.
    macro_rules! vectors {
        ($rounds:expr, $multiply_add:literal) => {{
            let operands = operands::<4>();
            // SAFETY: the caller vouches for the instructions. The operands are four vectors; any bits are an f32, and
            // those of two bf16 are an ordinary one. Only registers that are named are changed.
            unsafe {
                asm!(
                    "vmovups zmm24, [{x}]",
                    "vmovups zmm25, [{x} + 64]",
                    "vmovups zmm26, [{x} + 128]",
                    "vmovups zmm27, [{x} + 192]",
                    ".irp sum, 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16,17,18,19,20,21,22,23",
                    r"vpxord zmm\sum, zmm\sum, zmm\sum",
                    ".endr",
                    "2:",
                    ".irp sum, 0,1,2,3,4,5",
                    concat!($multiply_add, r" zmm\sum, zmm24, zmm26"),
                    ".endr",
                    ".irp sum, 6,7,8,9,10,11",
                    concat!($multiply_add, r" zmm\sum, zmm25, zmm26"),
                    ".endr",
                    ".irp sum, 12,13,14,15,16,17",
                    concat!($multiply_add, r" zmm\sum, zmm24, zmm27"),
                    ".endr",
                    ".irp sum, 18,19,20,21,22,23",
                    concat!($multiply_add, r" zmm\sum, zmm25, zmm27"),
                    ".endr",
                    "dec {rounds}",
                    "jnz 2b",
                    x = in(reg) &raw const operands,
                    rounds = inout(reg) $rounds => _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _,
                    out("zmm6") _, out("zmm7") _, out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _,
                    out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _, out("zmm16") _, out("zmm17") _,
                    out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _,
                    options(nostack, readonly),
                );
            }
        }};
    }

    /// # Safety
    /// The processor has AVX-512.
    #[target_feature(enable = "avx512f")]
    unsafe fn fma(rounds: usize) {
        vectors!(rounds, "vfmadd231ps");
    }

    /// # Safety
    /// The processor has AVX512-BF16.
    #[target_feature(enable = "avx512f")]
    unsafe fn dot(rounds: usize) {
        vectors!(rounds, "vdpbf16ps");
    }

    /// Multiplies the tiles 4 and 5 by 6 and 7, after `$load`.
    macro_rules! tiles {
        ($rounds:expr, $($load:literal,)*) => {{
            let shapes = Shapes::FULL;
            let operands = operands::<{ 4 * TILE_LEN }>();
            // SAFETY: the caller vouches for the instructions. The configuration is valid, the operands are four tiles,
            // and only tiles are changed, which nobody else here uses.
            unsafe {
                asm!(
                    "ldtilecfg [{shapes}]",
                    "tileloadd tmm4, [{x} + {row}*1]",
                    "tileloadd tmm5, [{x} + {row}*1 + 1024]",
                    "tileloadd tmm6, [{x} + {row}*1 + 2048]",
                    "tileloadd tmm7, [{x} + {row}*1 + 3072]",
                    "2:",
                    $($load,)*
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm2, tmm5, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    "tdpbf16ps tmm3, tmm5, tmm7",
                    "dec {rounds}",
                    "jnz 2b",
                    "tilerelease",
                    shapes = in(reg) &raw const shapes,
                    x = in(reg) &raw const operands,
                    row = in(reg) ROW_BYTES,
                    rounds = inout(reg) $rounds => _,
                    out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                    out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                    options(nostack, readonly),
                );
            }
        }};
    }

    /// # Safety
    /// The process may use tiles: `Arithmetic::available` asked for them.
    unsafe fn amx(rounds: usize) {
        tiles!(rounds,);
    }

    /// # Safety
    /// As `amx`.
    unsafe fn amx_with_loads(rounds: usize) {
        tiles!(
            rounds,
            "tileloadd tmm4, [{x} + {row}*1]",
            "tileloadd tmm5, [{x} + {row}*1 + 1024]",
            "tileloadd tmm6, [{x} + {row}*1 + 2048]",
            "tileloadd tmm7, [{x} + {row}*1 + 3072]",
        );
    }
}
