//! What the processor could do at most: the ceilings that kernels are measured against.
//!
//! Called by the benchmarks (`benches/linear.rs`, and `python -m pagedkv.bench where` through the bindings), in the same
//! run as what they measure. The loops read nothing but registers, and have more sums than an instruction's latency
//! can hide.

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
            black_box(part.iter().fold(0_u64, |sum, word| sum.wrapping_add(*word)));
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
        __m512bh, __m512i, _mm512_dpbf16_ps, _mm512_fmadd_ps, _mm512_set1_epi16, _mm512_set1_ps,
        _mm512_setzero_ps,
    };
    use std::hint::black_box;
    use std::mem::transmute;

    use super::Peak;
    use crate::cpu::amx::Shapes;
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
        ];
        let present: Vec<_> = Arithmetic::available(Dtype::Bf16)
            .into_iter()
            .map(Arithmetic::name)
            .collect();
        all.into_iter()
            .filter(|peak| present.contains(&peak.name))
            .collect()
    }

    #[target_feature(enable = "avx512f")]
    fn fma(rounds: usize) {
        let x = black_box(_mm512_set1_ps(1.0));
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_fmadd_ps(x, x, *sum);
            }
        }
        black_box(sums);
    }

    #[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
    fn dot(rounds: usize) {
        // SAFETY: both types are 64 bytes.
        let x = unsafe { transmute::<__m512i, __m512bh>(black_box(_mm512_set1_epi16(0x3f80))) };
        let mut sums = [_mm512_setzero_ps(); SUMS];
        for _ in 0..rounds {
            for sum in &mut sums {
                *sum = _mm512_dpbf16_ps(*sum, x, x);
            }
        }
        black_box(sums);
    }

    /// # Safety
    /// The process may use tiles: `Arithmetic::available` asked for them.
    unsafe fn amx(rounds: usize) {
        let shapes = Shapes::FULL;
        // SAFETY: the configuration is valid; only tiles are changed, which nobody else here uses.
        unsafe {
            asm!(
                "ldtilecfg [{shapes}]",
                "2:",
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "dec {rounds}",
                "jnz 2b",
                "tilerelease",
                shapes = in(reg) &raw const shapes,
                rounds = inout(reg) rounds => _,
                out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
                out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
                options(nostack, readonly),
            );
        }
    }
}
