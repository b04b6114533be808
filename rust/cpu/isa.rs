//! Vectors of sixteen f32 in the instruction sets that the kernels know, and the choice among them.
//!
//! A kernel is written once against `Simd`, and compiled once for each instruction set. Sixteen lanes are one register
//! of AVX-512 and two of AVX2; `Portable` is plain Rust, for other processors, and the scalar twin that the others are
//! tested against. A value of an implementing type is proof that the processor has the instructions.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::amx::Amx;
use super::element::{Dtype, round_row, store_row};
use super::level::Level;

/// Lanes of a vector.
pub(crate) const LANES: usize = 16;

/// The bits of an f32 that a bf16 has.
pub(crate) const UPPER_HALF: u32 = 0xffff_0000;

/// The least argument whose power of two is computed; below it the result is zero, where f32 begins to lose digits.
const EXP2_MIN: f32 = -126.0;

/// Adding 1.5 * 2^23 leaves the nearest integer of a small number in the low bits of the sum.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// (2^f - 1) / f for f in [-1/2, 1/2], ascending powers: least maximum of the relative error of 2^f (2e-9 before the
/// coefficients were rounded to f32), found by weighted least squares.
const EXP2_COEFFICIENTS: [f32; 6] = [
    std::f32::consts::LN_2,
    0.240_226_48,
    0.055_503_324,
    0.009_618_437,
    0.001_339_887_4,
    0.000_153_533_62,
];

/// A computation that is compiled for each instruction set. Implementations of `run` are `#[inline(always)]`, or else
/// they are compiled without the instructions.
pub(crate) trait Kernel {
    /// Computes on one instruction set.
    fn run<S: Simd>(self, simd: S);
}

/// Sixteen lanes of f32.
pub(crate) trait Simd: Copy + Send + Sync {
    /// The vector.
    type V: Copy;
    /// Vectors that a row of a tile is wide, such that four rows of accumulators stay in registers.
    const TILE_VECTORS: usize;

    /// The matrix tiles, if they are part of this instruction set.
    #[inline(always)]
    fn amx(self) -> Option<Amx> {
        None
    }
    /// Compiles the kernel for this instruction set and runs it.
    fn run<K: Kernel>(self, kernel: K);
    /// The same number in every lane.
    fn splat(self, x: f32) -> Self::V;
    /// Reads a vector.
    fn load(self, src: &[f32; LANES]) -> Self::V;
    /// Writes a vector.
    fn store(self, v: Self::V, dst: &mut [f32; LANES]);
    /// Reads sixteen f32.
    ///
    /// # Safety
    /// `src` is readable for sixteen elements.
    unsafe fn load_f32(self, src: *const u8) -> Self::V;
    /// Reads and widens sixteen bf16.
    ///
    /// # Safety
    /// `src` is readable for sixteen elements.
    unsafe fn load_bf16(self, src: *const u8) -> Self::V;
    /// Reads and widens sixteen f16.
    ///
    /// # Safety
    /// `src` is readable for sixteen elements.
    unsafe fn load_f16(self, src: *const u8) -> Self::V;
    /// Rounds to bf16, as `store_row` does, and writes sixteen of them.
    ///
    /// # Safety
    /// `dst` is writable for sixteen elements, and nobody else accesses them.
    #[inline(always)]
    unsafe fn store_bf16(self, v: Self::V, dst: *mut u8) {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        // SAFETY: passed on.
        unsafe { store_row(Dtype::Bf16, &lanes, dst) };
    }
    /// Rounds and stores twice sixteen elements, the second behind the first.
    ///
    /// # Safety
    /// `dst` is writable for them, and nobody else accesses them.
    #[inline(always)]
    unsafe fn store_bf16_pair(self, [first, second]: [Self::V; 2], dst: *mut u8) {
        // SAFETY: passed on.
        unsafe {
            self.store_bf16(first, dst);
            self.store_bf16(second, dst.wrapping_add(LANES * Dtype::Bf16.size()));
        }
    }
    /// Rounds to numbers of bf16, as `store_bf16` does; they stay f32.
    #[inline(always)]
    fn round_bf16(self, v: Self::V) -> Self::V {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        round_row(Dtype::Bf16, &mut lanes);
        self.load(&lanes)
    }
    /// a + b
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    /// a - b
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    /// a / b
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// a * b + c, rounded once where the instruction set can.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger one.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The upper half of the bits of each lane, which is a bf16, and zeros.
    fn upper_half(self, v: Self::V) -> Self::V;
    /// 2^n, where the low nine bits of each lane are n as a signed number, -126 <= n <= 127.
    fn power_of_two(self, low_bits: Self::V) -> Self::V;
    /// v, or zero in the lanes in which x < limit. A NaN in x keeps v.
    fn zero_where_less(self, v: Self::V, x: Self::V, limit: f32) -> Self::V;
    /// Asks for the cache line at `address`, which may be anything. A hint: without effect where there is no such
    /// instruction.
    fn prefetch(self, address: *const u8);
    /// Lane i of row j becomes lane j of row i.
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES];

    /// 2^x for x <= 0, to about one unit in the last place; zero below 2^-126; NaN for NaN.
    #[inline(always)]
    fn exp2(self, x: Self::V) -> Self::V {
        let magic = self.splat(ROUND_TO_INTEGER);
        let shifted = self.add(x, magic);
        let fraction = self.sub(x, self.sub(shifted, magic));
        let mut sum = self.splat(EXP2_COEFFICIENTS[5]);
        for idx in (0..5).rev() {
            sum = self.mul_add(sum, fraction, self.splat(EXP2_COEFFICIENTS[idx]));
        }
        let power = self.mul_add(sum, fraction, self.splat(1.0));
        self.zero_where_less(self.mul(power, self.power_of_two(shifted)), x, EXP2_MIN)
    }

    /// Sum of the lanes, halves added to halves.
    #[inline(always)]
    fn sum_lanes(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        for width in [8, 4, 2, 1] {
            for idx in 0..width {
                lanes[idx] += lanes[idx + width];
            }
        }
        lanes[0]
    }

    /// Largest of the lanes.
    #[inline(always)]
    fn max_lane(self, v: Self::V) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(v, &mut lanes);
        lanes.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

/// Plain Rust.
#[derive(Clone, Copy, Debug)]
pub struct Portable;

/// Applies `f` to every lane.
#[inline(always)]
fn lanes(f: impl Fn(usize) -> f32) -> [f32; LANES] {
    std::array::from_fn(f)
}

impl Simd for Portable {
    type V = [f32; LANES];
    const TILE_VECTORS: usize = 1;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) {
        kernel.run(self);
    }
    #[inline(always)]
    fn splat(self, x: f32) -> Self::V {
        [x; LANES]
    }
    #[inline(always)]
    fn load(self, src: &[f32; LANES]) -> Self::V {
        *src
    }
    #[inline(always)]
    fn store(self, v: Self::V, dst: &mut [f32; LANES]) {
        *dst = v;
    }
    #[inline(always)]
    unsafe fn load_f32(self, src: *const u8) -> Self::V {
        // SAFETY: the caller vouches for sixteen elements.
        unsafe { src.cast::<Self::V>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, src: *const u8) -> Self::V {
        // SAFETY: the caller vouches for sixteen elements.
        let narrow = unsafe { src.cast::<[u16; LANES]>().read_unaligned() };
        lanes(|i| f32::from_bits(u32::from(narrow[i]) << 16))
    }
    #[inline(always)]
    unsafe fn load_f16(self, src: *const u8) -> Self::V {
        // SAFETY: the caller vouches for sixteen elements.
        let narrow = unsafe { src.cast::<[u16; LANES]>().read_unaligned() };
        lanes(|i| half::f16::from_bits(narrow[i]).to_f32())
    }
    #[inline(always)]
    fn add(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] + b[i])
    }
    #[inline(always)]
    fn sub(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] - b[i])
    }
    #[inline(always)]
    fn mul(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] * b[i])
    }
    #[inline(always)]
    fn div(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| a[i] / b[i])
    }
    #[inline(always)]
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V {
        // Where the target has no such instruction, `f32::mul_add` is a slow call into the C library.
        if cfg!(any(target_arch = "aarch64", target_feature = "fma")) {
            lanes(|i| a[i].mul_add(b[i], c[i]))
        } else {
            lanes(|i| a[i] * b[i] + c[i])
        }
    }
    #[inline(always)]
    fn max(self, a: Self::V, b: Self::V) -> Self::V {
        lanes(|i| if a[i] > b[i] { a[i] } else { b[i] })
    }
    #[inline(always)]
    fn upper_half(self, v: Self::V) -> Self::V {
        lanes(|i| f32::from_bits(v[i].to_bits() & UPPER_HALF))
    }
    #[inline(always)]
    fn power_of_two(self, low_bits: Self::V) -> Self::V {
        lanes(|i| f32::from_bits((low_bits[i].to_bits() << 23).wrapping_add(1.0_f32.to_bits())))
    }
    #[inline(always)]
    fn zero_where_less(self, v: Self::V, x: Self::V, limit: f32) -> Self::V {
        lanes(|i| if x[i] < limit { 0.0 } else { v[i] })
    }
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
    #[inline(always)]
    fn transpose(self, rows: [Self::V; LANES]) -> [Self::V; LANES] {
        std::array::from_fn(|i| lanes(|j| rows[j][i]))
    }
}

/// The instruction set of a call.
#[derive(Clone, Copy, Debug)]
pub enum Isa {
    /// Plain Rust.
    Portable(Portable),
    /// AVX2 with FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(super::x86::Avx2),
    /// AVX-512 (F, BW, VL), with AMX (BF16) or without.
    #[cfg(target_arch = "x86_64")]
    Avx512(super::x86::Avx512),
}

impl Isa {
    /// Every instruction set that this processor can run, the best one last.
    pub fn available() -> Vec<Self> {
        let portable = Some(Self::Portable(Portable));
        #[cfg(target_arch = "x86_64")]
        let sets = [
            portable,
            super::x86::Avx2::detect().map(Self::Avx2),
            super::x86::Avx512::detect().map(Self::Avx512),
            super::x86::Avx512::detect_with_amx().map(Self::Avx512),
        ];
        #[cfg(not(target_arch = "x86_64"))]
        let sets = [portable];
        sets.into_iter().flatten().collect()
    }

    /// The best one that this process may use (`level`). Not asked for within a call: the last bits of results differ
    /// between them.
    pub fn best() -> Self {
        Level::current().isa()
    }

    /// Whether matrix tiles are part of it.
    pub(super) fn has_amx(self) -> bool {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.amx().is_some(),
            _ => false,
        }
    }

    /// It without matrix tiles.
    pub(super) fn without_amx(self) -> Self {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => Self::Avx512(simd.without_amx()),
            other => other,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Portable(_) => "portable",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) if simd.amx().is_some() => "amx",
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
        }
    }

    /// Runs a kernel on it.
    pub(crate) fn run<K: Kernel>(self, kernel: K) {
        match self {
            Self::Portable(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(simd) => simd.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(simd) => simd.run(kernel),
        }
    }
}

/// Instruction set extensions of this processor that kernels may use now or later, by the compiler's names without
/// their dots and dashes.
pub fn cpu_features() -> Vec<&'static str> {
    #[cfg(target_arch = "x86_64")]
    {
        super::x86::features()
    }
    #[cfg(not(target_arch = "x86_64"))]
    {
        Vec::new()
    }
}

/// Numbers of a buffer, aligned to a cache line so that no vector straddles two.
#[derive(Default, Debug)]
pub(crate) struct AlignedBuffer {
    lines: Vec<CacheLine>,
}

/// Sixteen f32: one vector.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine([f32; LANES]);

impl AlignedBuffer {
    /// At least `len` numbers, with whatever they held before; new ones are zero.
    pub(crate) fn reserve(&mut self, len: usize) {
        let lines = len.div_ceil(LANES);
        if self.lines.len() < lines {
            self.lines.resize(lines, CacheLine([0.0; LANES]));
        }
    }

    /// A range of the numbers, which must have been reserved.
    pub(crate) fn slice(&mut self, range: Range<usize>) -> &mut [f32] {
        let len = self.lines.len() * LANES;
        // SAFETY: a cache line is sixteen f32 without padding, and the vector is borrowed for as long as the slice.
        let all = unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast::<f32>(), len) };
        &mut all[range]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Runs exp2 on sixteen numbers.
    struct Exp2<'a>(&'a mut [f32; LANES]);

    impl Kernel for Exp2<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let powers = simd.exp2(simd.load(self.0));
            simd.store(powers, self.0);
        }
    }

    fn exp2(isa: Isa, x: f32) -> f32 {
        let mut lanes = [x; LANES];
        isa.run(Exp2(&mut lanes));
        lanes[0]
    }

    /// Widens sixteen elements of each type, and transposes.
    struct Widen<'a> {
        bits: &'a [u16; LANES],
        out: &'a mut [[f32; LANES]; 3],
    }

    impl Kernel for Widen<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            let src = self.bits.as_ptr().cast::<u8>();
            // SAFETY: the array has sixteen elements.
            let (bf16, f16) = unsafe { (simd.load_bf16(src), simd.load_f16(src)) };
            let mut rows = [simd.splat(0.0); LANES];
            for (idx, row) in rows.iter_mut().enumerate() {
                *row = simd.add(bf16, simd.splat(f32::from(u8::try_from(idx).unwrap())));
            }
            simd.store(bf16, &mut self.out[0]);
            simd.store(f16, &mut self.out[1]);
            simd.store(simd.transpose(rows)[3], &mut self.out[2]);
        }
    }

    #[test]
    fn exp2_is_accurate_to_two_units() {
        for isa in Isa::available() {
            for step in 0..40_000_u16 {
                let x = -f32::from(step) * 0.003_1;
                let exact = f64::from(x).exp2();
                let error = (f64::from(exp2(isa, x)) - exact).abs() / exact;
                assert!(
                    error < 2.0 * f64::from(f32::EPSILON),
                    "{} 2^{x}: {error}",
                    isa.name()
                );
            }
            assert_eq!(exp2(isa, 0.0).to_bits(), 1.0_f32.to_bits());
            assert_eq!(exp2(isa, -126.0).to_bits(), f32::MIN_POSITIVE.to_bits());
            for tiny in [-126.01, -150.0, -1e30, f32::NEG_INFINITY] {
                assert_eq!(exp2(isa, tiny).to_bits(), 0.0_f32.to_bits());
            }
            assert!(exp2(isa, f32::NAN).is_nan());
            assert!(exp2(isa, f32::from_bits(0x7fff_ffff)).is_nan());
        }
    }

    proptest! {
        #[test]
        fn every_set_widens_and_transposes_as_the_portable_one(bits: [u16; LANES]) {
            let mut expected = [[0.0; LANES]; 3];
            Portable.run(Widen { bits: &bits, out: &mut expected });
            for isa in Isa::available() {
                let mut out = [[0.0; LANES]; 3];
                isa.run(Widen { bits: &bits, out: &mut out });
                for (a, b) in out.as_flattened().iter().zip(expected.as_flattened()) {
                    prop_assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan()), "{}: {a} {b}", isa.name());
                }
            }
        }
    }
}
