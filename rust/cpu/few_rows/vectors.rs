//! Arrangements of bf16 and f32 in vectors, for `few_rows`.

use std::arch::x86_64::{
    __m256bh, __m256i, __m512, __m512i, _mm512_and_si512, _mm512_castps_si512, _mm512_castsi512_ps,
    _mm512_cvtepu16_epi32, _mm512_cvtneps_pbh, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_permutex2var_ps,
    _mm512_set1_epi32, _mm512_slli_epi32, _mm512_storeu_ps,
};

use crate::cpu::amx::DEPTH;
use crate::cpu::isa::LANES;
use crate::cpu::tile_loops::{vector_at, vector_at_mut};

/// The bf16 of even index, and those of odd index.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn widen(pairs: __m512) -> [__m512; 2] {
    const UPPER: i32 = -0x1_0000;
    let pairs = _mm512_castps_si512(pairs);
    [
        _mm512_castsi512_ps(_mm512_slli_epi32::<16>(pairs)),
        _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(UPPER))),
    ]
}

/// Rounds to bf16.
#[inline]
#[target_feature(enable = "avx512f,avx512bf16")]
pub(super) fn round(numbers: __m512) -> __m512 {
    // SAFETY: vectors of the same size; the type of bf16 vectors has no operations of its own.
    let rounded = unsafe { std::mem::transmute::<__m256bh, __m256i>(_mm512_cvtneps_pbh(numbers)) };
    _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(rounded)))
}

/// Puts sixteen numbers of even index and sixteen of odd index into the order of their indices.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn interleave(numbers: &mut [f32; DEPTH]) {
    const ORDER: [[i32; LANES]; 2] = [
        [0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23],
        [8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31],
    ];
    // SAFETY: sixteen numbers each.
    unsafe {
        let even = _mm512_loadu_ps(vector_at(numbers, 0).as_ptr());
        let odd = _mm512_loadu_ps(vector_at(numbers, LANES).as_ptr());
        for (half, order) in ORDER.iter().enumerate() {
            let order: __m512i = _mm512_loadu_si512(order.as_ptr().cast());
            let place = vector_at_mut(numbers, half * LANES).as_mut_ptr();
            _mm512_storeu_ps(place, _mm512_permutex2var_ps(even, order, odd));
        }
    }
}
