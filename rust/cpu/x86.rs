//! The vectors of `isa` in AVX-512 and in AVX2.
//!
//! A value of `Avx512` or `Avx2` comes from `detect` alone, so that whoever holds one may use the instructions. They
//! become single instructions once they are inlined into `run`, which is compiled for the instruction set.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::asm;
use std::arch::is_x86_feature_detected as has;
use std::arch::x86_64::{
    __m256, __m512, __m512i, _CMP_NLT_UQ, _CMP_UNORD_Q, _MM_HINT_T1, _mm_loadu_si128, _mm_prefetch,
    _mm256_add_epi32, _mm256_add_ps, _mm256_and_ps, _mm256_castpd_ps, _mm256_castps_pd, _mm256_castps_si256,
    _mm256_castsi256_ps, _mm256_cmp_ps, _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_div_ps,
    _mm256_fmadd_ps, _mm256_loadu_ps, _mm256_loadu_si256, _mm256_max_ps, _mm256_mul_ps,
    _mm256_permute2f128_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32, _mm256_storeu_ps,
    _mm256_storeu_si256, _mm256_sub_ps, _mm256_unpackhi_pd, _mm256_unpackhi_ps, _mm256_unpacklo_pd,
    _mm256_unpacklo_ps, _mm512_add_epi32, _mm512_add_ps, _mm512_and_si512, _mm512_castpd_ps,
    _mm512_castps_pd, _mm512_castps_si512, _mm512_castsi512_ps, _mm512_cmp_ps_mask, _mm512_cvtepi32_epi16,
    _mm512_cvtepu16_epi32, _mm512_cvtph_ps, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps,
    _mm512_loadu_si512, _mm512_mask_or_epi32, _mm512_maskz_mov_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_permutex2var_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_shuffle_f32x4, _mm512_slli_epi32,
    _mm512_srli_epi32, _mm512_storeu_ps, _mm512_storeu_si512, _mm512_sub_ps, _mm512_unpackhi_pd,
    _mm512_unpackhi_ps, _mm512_unpacklo_pd, _mm512_unpacklo_ps,
};

use super::amx::Amx;
use super::isa::{Kernel, LANES, Simd, UPPER_HALF};

/// Bits of 1.0, as the instructions take them.
const ONE_BITS: i32 = 0x3f80_0000;

/// The instructions that the kernels use or will use, by name.
pub(super) fn features() -> Vec<&'static str> {
    let known = [
        ("avx2", has!("avx2")),
        ("fma", has!("fma")),
        ("f16c", has!("f16c")),
        ("avx512f", has!("avx512f")),
        ("avx512bw", has!("avx512bw")),
        ("avx512vl", has!("avx512vl")),
        ("avx512vnni", has!("avx512vnni")),
        ("avx512bf16", has!("avx512bf16")),
        ("amxbf16", Amx::detect().is_some()),
    ];
    known
        .into_iter()
        .filter_map(|(name, present)| present.then_some(name))
        .collect()
}

/// Proof that the processor has AVX-512, and perhaps matrix tiles.
#[derive(Clone, Copy, Debug)]
pub struct Avx512(Option<Amx>);

impl Avx512 {
    /// Asks the processor.
    pub(super) fn detect() -> Option<Self> {
        let present = has!("avx512f") && has!("avx512bw") && has!("avx512vl");
        // AVX-512 implies the older sets on every processor made; the compiler wants to know it.
        (present && Avx2::detect().is_some()).then_some(Self(None))
    }

    /// Asks for the matrix tiles as well; None without them.
    pub(super) fn detect_with_amx() -> Option<Self> {
        Self::detect()?;
        Amx::detect().map(Self::from)
    }

    /// The same without the matrix tiles.
    pub(super) fn without_amx(mut self) -> Self {
        self.0 = None;
        self
    }
}

/// Vectors of this thread take numbers that are too small for a normal f32 as zero, as matrix tiles always do.
///
/// The compiler takes it that they do not: code that it computes beforehand or moves out of the guard's life may differ
/// in such numbers, and in nothing else.
pub(super) struct Flushing {
    before: u32,
}

impl Flushing {
    /// Flushes results, and takes denormal operands as zero.
    const BITS: u32 = 1 << 15 | 1 << 6;

    /// Begins.
    pub(super) fn new() -> Self {
        let mut before = 0;
        // SAFETY: writes four bytes.
        unsafe { asm!("stmxcsr [{}]", in(reg) &raw mut before, options(nostack)) };
        Self::set(before | Self::BITS);
        Self { before }
    }

    fn set(bits: u32) {
        // SAFETY: reads four bytes, and changes nothing but how small numbers are taken. Not `nomem`, so that no access
        // to memory, and with it hardly any arithmetic, is moved across.
        unsafe { asm!("ldmxcsr [{}]", in(reg) &raw const bits, options(nostack)) };
    }
}

impl Drop for Flushing {
    fn drop(&mut self) {
        Self::set(self.before);
    }
}

impl From<Amx> for Avx512 {
    fn from(amx: Amx) -> Self {
        // Whoever found the matrix tiles has looked for AVX-512 before.
        Self(Some(amx))
    }
}

/// Proof that the processor has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug)]
pub struct Avx2(());

impl Avx2 {
    /// Asks the processor.
    pub(super) fn detect() -> Option<Self> {
        (has!("avx2") && has!("fma") && has!("f16c")).then_some(Self(()))
    }
}

/// Methods of a vector type whose bodies are instructions that `self` proves to exist.
macro_rules! instructions {
    ($(fn $name:ident($($arg:ident: $type:ty),*) -> $out:ty = $body:expr;)*) => {
        $(
            #[inline(always)]
            fn $name(self, $($arg: $type),*) -> $out {
                // SAFETY: `self` exists only where the processor has the instructions; references cover a vector.
                unsafe { $body }
            }
        )*
    };
}

/// Reads of sixteen elements, for which the caller of the method vouches.
macro_rules! reads {
    ($(fn $name:ident($src:ident) = $body:expr;)*) => {
        $(
            #[inline(always)]
            unsafe fn $name(self, $src: *const u8) -> Self::V {
                // SAFETY: the caller vouches for sixteen elements; `self` proves the instructions.
                unsafe { $body }
            }
        )*
    };
}

impl Simd for Avx512 {
    type V = __m512;
    const TILE_VECTORS: usize = 4;

    #[inline]
    fn amx(self) -> Option<Amx> {
        self.0
    }

    #[inline]
    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx512, kernel: K) {
            kernel.run(simd);
        }
        // SAFETY: `self` exists only where the processor has these instructions.
        unsafe { compiled(self, kernel) }
    }

    instructions! {
        fn splat(x: f32) -> __m512 = _mm512_set1_ps(x);
        fn load(src: &[f32; LANES]) -> __m512 = _mm512_loadu_ps(src.as_ptr());
        fn store(v: __m512, dst: &mut [f32; LANES]) -> () = _mm512_storeu_ps(dst.as_mut_ptr(), v);
        fn add(a: __m512, b: __m512) -> __m512 = _mm512_add_ps(a, b);
        fn sub(a: __m512, b: __m512) -> __m512 = _mm512_sub_ps(a, b);
        fn mul(a: __m512, b: __m512) -> __m512 = _mm512_mul_ps(a, b);
        fn div(a: __m512, b: __m512) -> __m512 = _mm512_div_ps(a, b);
        fn mul_add(a: __m512, b: __m512, c: __m512) -> __m512 = _mm512_fmadd_ps(a, b, c);
        fn max(a: __m512, b: __m512) -> __m512 = _mm512_max_ps(a, b);
        fn upper_half(v: __m512) -> __m512 = _mm512_castsi512_ps(
            _mm512_and_si512(_mm512_castps_si512(v), _mm512_set1_epi32(UPPER_HALF.cast_signed())));
        fn round_bf16(v: __m512) -> __m512 = _mm512_castsi512_ps(
            _mm512_and_si512(round_bf16(v), _mm512_set1_epi32(UPPER_HALF.cast_signed())));
        fn power_of_two(low_bits: __m512) -> __m512 = _mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_slli_epi32::<23>(_mm512_castps_si512(low_bits)),
            _mm512_set1_epi32(ONE_BITS),
        ));
        fn zero_where_less(v: __m512, x: __m512, limit: f32) -> __m512 =
            _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(limit)), v);
        fn prefetch(address: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(address.cast());
        fn transpose(rows: [__m512; LANES]) -> [__m512; LANES] = transpose_avx512(&rows);
    }
    reads! {
        fn load_f32(src) = _mm512_loadu_ps(src.cast());
        fn load_bf16(src) = _mm512_castsi512_ps(_mm512_slli_epi32::<16>(
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(src.cast())),
        ));
        fn load_f16(src) = _mm512_cvtph_ps(_mm256_loadu_si256(src.cast()));
    }

    #[inline(always)]
    unsafe fn store_bf16(self, v: __m512, dst: *mut u8) {
        // SAFETY: the caller vouches for sixteen elements; `self` proves the instructions.
        unsafe {
            let upper = _mm512_cvtepi32_epi16(_mm512_srli_epi32::<16>(round_bf16(v)));
            _mm256_storeu_si256(dst.cast(), upper);
        }
    }

    #[inline(always)]
    unsafe fn store_bf16_pair(self, pair: [__m512; 2], dst: *mut u8) {
        // SAFETY: the caller vouches for thirty-two elements; `self` proves the instructions.
        unsafe {
            let [first, second] = [round_bf16(pair[0]), round_bf16(pair[1])];
            let upper = _mm512_loadu_si512(UPPER_HALVES.as_ptr().cast());
            _mm512_storeu_si512(dst.cast(), _mm512_permutex2var_epi16(first, upper, second));
        }
    }
}

/// The upper halves of sixteen numbers, and of sixteen others.
const UPPER_HALVES: [u16; 2 * LANES] = [
    1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53,
    55, 57, 59, 61, 63,
];

/// The bits of sixteen numbers, rounded at their upper halves.
#[inline]
#[target_feature(enable = "avx512f")]
fn round_bf16(v: __m512) -> __m512i {
    let bits = _mm512_castps_si512(v);
    let is_odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
    let rounded = _mm512_add_epi32(bits, _mm512_add_epi32(is_odd, _mm512_set1_epi32(0x7fff)));
    let is_nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
    _mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x0040_0000))
}

/// Transposes 4 x 4 numbers within every quarter, then 4 x 4 quarters.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_avx512(rows: &[__m512; LANES]) -> [__m512; LANES] {
    // Quarter q of `columns[i][c]` holds column 4q + c of rows 4i to 4i + 3.
    let mut columns = [[_mm512_set1_ps(0.0); 4]; 4];
    for (i, column) in columns.iter_mut().enumerate() {
        *column = transpose_within_quarters([rows[4 * i], rows[4 * i + 1], rows[4 * i + 2], rows[4 * i + 3]]);
    }
    let mut out = [_mm512_set1_ps(0.0); LANES];
    for c in 0..4 {
        let even01 = _mm512_shuffle_f32x4::<0x88>(columns[0][c], columns[1][c]);
        let odd01 = _mm512_shuffle_f32x4::<0xdd>(columns[0][c], columns[1][c]);
        let even23 = _mm512_shuffle_f32x4::<0x88>(columns[2][c], columns[3][c]);
        let odd23 = _mm512_shuffle_f32x4::<0xdd>(columns[2][c], columns[3][c]);
        out[c] = _mm512_shuffle_f32x4::<0x88>(even01, even23);
        out[4 + c] = _mm512_shuffle_f32x4::<0x88>(odd01, odd23);
        out[8 + c] = _mm512_shuffle_f32x4::<0xdd>(even01, even23);
        out[12 + c] = _mm512_shuffle_f32x4::<0xdd>(odd01, odd23);
    }
    out
}

/// Transposes 4 x 4 numbers within every quarter.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn transpose_within_quarters([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    let (low_ab, high_ab) = unpack_avx512(a, b);
    let (low_cd, high_cd) = unpack_avx512(c, d);
    let (low_ab, high_ab) = (_mm512_castps_pd(low_ab), _mm512_castps_pd(high_ab));
    let (low_cd, high_cd) = (_mm512_castps_pd(low_cd), _mm512_castps_pd(high_cd));
    [
        _mm512_castpd_ps(_mm512_unpacklo_pd(low_ab, low_cd)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(low_ab, low_cd)),
        _mm512_castpd_ps(_mm512_unpacklo_pd(high_ab, high_cd)),
        _mm512_castpd_ps(_mm512_unpackhi_pd(high_ab, high_cd)),
    ]
}

/// Interleaves the low and the high halves of every quarter.
#[inline]
#[target_feature(enable = "avx512f")]
fn unpack_avx512(a: __m512, b: __m512) -> (__m512, __m512) {
    (_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b))
}

/// Applies an instruction to both halves of vectors.
macro_rules! halves {
    ($op:ident($($arg:ident),*)) => {
        [$op($($arg[0]),*), $op($($arg[1]),*)]
    };
}

impl Simd for Avx2 {
    type V = [__m256; 2];
    const TILE_VECTORS: usize = 1;

    #[inline]
    fn run<K: Kernel>(self, kernel: K) {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx2, kernel: K) {
            kernel.run(simd);
        }
        // SAFETY: `self` exists only where the processor has these instructions.
        unsafe { compiled(self, kernel) }
    }

    instructions! {
        fn splat(x: f32) -> [__m256; 2] = [_mm256_set1_ps(x); 2];
        fn load(src: &[f32; LANES]) -> [__m256; 2] =
            [_mm256_loadu_ps(src.as_ptr()), _mm256_loadu_ps(src.as_ptr().add(8))];
        fn store(v: [__m256; 2], dst: &mut [f32; LANES]) -> () = {
            _mm256_storeu_ps(dst.as_mut_ptr(), v[0]);
            _mm256_storeu_ps(dst.as_mut_ptr().add(8), v[1]);
        };
        fn add(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_add_ps(a, b));
        fn sub(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_sub_ps(a, b));
        fn mul(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_mul_ps(a, b));
        fn div(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_div_ps(a, b));
        fn mul_add(a: [__m256; 2], b: [__m256; 2], c: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_fmadd_ps(a, b, c));
        fn max(a: [__m256; 2], b: [__m256; 2]) -> [__m256; 2] = halves!(_mm256_max_ps(a, b));
        fn upper_half(v: [__m256; 2]) -> [__m256; 2] = {
            let mask = _mm256_castsi256_ps(_mm256_set1_epi32(UPPER_HALF.cast_signed()));
            [_mm256_and_ps(v[0], mask), _mm256_and_ps(v[1], mask)]
        };
        fn power_of_two(low_bits: [__m256; 2]) -> [__m256; 2] = halves!(power_of_two_avx2(low_bits));
        fn zero_where_less(v: [__m256; 2], x: [__m256; 2], limit: f32) -> [__m256; 2] = {
            let limit = _mm256_set1_ps(limit);
            let keep = [_mm256_cmp_ps::<_CMP_NLT_UQ>(x[0], limit), _mm256_cmp_ps::<_CMP_NLT_UQ>(x[1], limit)];
            halves!(_mm256_and_ps(v, keep))
        };
        fn prefetch(address: *const u8) -> () = _mm_prefetch::<_MM_HINT_T1>(address.cast());
        fn transpose(rows: [[__m256; 2]; LANES]) -> [[__m256; 2]; LANES] = transpose_avx2(&rows);
    }
    reads! {
        fn load_f32(src) = [_mm256_loadu_ps(src.cast()), _mm256_loadu_ps(src.add(32).cast())];
        fn load_bf16(src) = [widen_bf16_avx2(src), widen_bf16_avx2(src.add(16))];
        fn load_f16(src) = [
            _mm256_cvtph_ps(_mm_loadu_si128(src.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(src.add(16).cast())),
        ];
    }
}

/// 2^n for the signed number n in the low nine bits of each lane.
#[inline]
#[target_feature(enable = "avx2")]
fn power_of_two_avx2(low_bits: __m256) -> __m256 {
    let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(low_bits));
    _mm256_castsi256_ps(_mm256_add_epi32(exponent, _mm256_set1_epi32(ONE_BITS)))
}

/// Widens eight bf16.
///
/// # Safety
/// `src` is readable for eight elements.
#[inline]
#[target_feature(enable = "avx2")]
unsafe fn widen_bf16_avx2(src: *const u8) -> __m256 {
    // SAFETY: the caller vouches for eight elements.
    let narrow = unsafe { _mm_loadu_si128(src.cast()) };
    _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(narrow)))
}

/// Transposes four squares of 8 x 8.
#[expect(
    clippy::needless_range_loop,
    reason = "the halves of rows and of columns read better side by side"
)]
#[inline]
#[target_feature(enable = "avx2")]
fn transpose_avx2(rows: &[[__m256; 2]; LANES]) -> [[__m256; 2]; LANES] {
    let mut out = [[_mm256_set1_ps(0.0); 2]; LANES];
    for half in 0..2 {
        for side in 0..2 {
            // Half q of `columns[i][c]` holds column 4q + c of rows 4i to 4i + 3 of the square.
            let mut columns = [[_mm256_set1_ps(0.0); 4]; 2];
            for (i, column) in columns.iter_mut().enumerate() {
                let row = 8 * half + 4 * i;
                let (r0, r1, r2, r3) = (
                    rows[row][side],
                    rows[row + 1][side],
                    rows[row + 2][side],
                    rows[row + 3][side],
                );
                let low01 = _mm256_castps_pd(_mm256_unpacklo_ps(r0, r1));
                let high01 = _mm256_castps_pd(_mm256_unpackhi_ps(r0, r1));
                let low23 = _mm256_castps_pd(_mm256_unpacklo_ps(r2, r3));
                let high23 = _mm256_castps_pd(_mm256_unpackhi_ps(r2, r3));
                *column = [
                    _mm256_castpd_ps(_mm256_unpacklo_pd(low01, low23)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(low01, low23)),
                    _mm256_castpd_ps(_mm256_unpacklo_pd(high01, high23)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(high01, high23)),
                ];
            }
            for c in 0..4 {
                out[8 * side + c][half] = _mm256_permute2f128_ps::<0x20>(columns[0][c], columns[1][c]);
                out[8 * side + 4 + c][half] = _mm256_permute2f128_ps::<0x31>(columns[0][c], columns[1][c]);
            }
        }
    }
    out
}
