//! Scores to weights between the two products of attention: on matrix tiles (`prompt_amx`), and the power of two that
//! vectors of few rows take as well (`few_rows`).
//!
//! ```text
//! weight[j] = 2^(score[j] * factor - largest score * factor), rounded to bf16
//! ```

use std::arch::x86_64::{
    __m512, __m512bh, _mm512_cvtne2ps_pbh, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps,
    _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_reduce_ps, _mm512_scalef_ps, _mm512_set1_ps,
    _mm512_shuffle_f32x4, _mm512_storeu_ps,
};

use super::amx::TILE_LEN;
use super::isa::LANES;
use super::x86::transpose_within_quarters;

/// (2^f - 1) / f for f in [0, 1), ascending powers: the relative error of 2^f is below 9e-5, a fortieth of what
/// rounding to bf16 adds. Found by weighted least squares.
const COEFFICIENTS: [f32; 3] = [0.695_115_6, 0.227_650_4, 0.077_062_07];

/// 2^x for x of at most about zero; zero for minus infinity.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
pub(super) fn exp2(x: __m512) -> __m512 {
    /// Subtracts the next lower integer.
    const FRACTION: i32 = 0x09;
    let fraction = _mm512_reduce_ps::<FRACTION>(x);
    let mut sum = _mm512_set1_ps(COEFFICIENTS[2]);
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(COEFFICIENTS[1]));
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(COEFFICIENTS[0]));
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(1.0));
    // Its exponent is rounded down as the fraction was.
    _mm512_scalef_ps(sum, x)
}

/// The largest score of each row, times `factor`, of whole tiles of scores `[keys / 16][16 rows][16 keys]`; it is of no use
/// where a row sees nothing. `visible` says how many keys each row sees: the other scores are replaced by minus infinity.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn largest_scores(
    scores: &mut [f32],
    visible: &[usize; TILE_LEN],
    factor: f32,
) -> [f32; TILE_LEN] {
    let scores = scores.as_chunks_mut::<LANES>().0;
    hide(scores, visible);
    // Not minus infinity: that minus itself would make a weight of NaN in a row that sees nothing.
    let largest = _mm512_max_ps(
        _mm512_set1_ps(f32::MIN),
        _mm512_mul_ps(largest_of_rows(scores.as_chunks().0), _mm512_set1_ps(factor)),
    );
    let mut by_row = [0.0; TILE_LEN];
    // SAFETY: sixteen numbers.
    unsafe { _mm512_storeu_ps(by_row.as_mut_ptr(), largest) };
    by_row
}

/// Turns scores of some rows into weights, `[rows][32 keys]` of bf16. `low` and `high` are the rows' scores of the first
/// and of the second sixteen keys, `largest` what `largest_scores` says of the rows.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(super) fn soften(
    [low, high]: [&[[f32; LANES]]; 2],
    largest: &[f32],
    factor: f32,
    weights: &mut [[f32; LANES]],
) {
    let factors = _mm512_set1_ps(factor);
    for (((low, high), largest), weights) in low.iter().zip(high).zip(largest).zip(weights) {
        let largest = _mm512_set1_ps(*largest);
        // SAFETY: sixteen numbers each; vectors of the same size.
        unsafe {
            let first = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(low.as_ptr()), factors, largest));
            let second = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(high.as_ptr()), factors, largest));
            let rounded = std::mem::transmute::<__m512bh, __m512>(_mm512_cvtne2ps_pbh(second, first));
            _mm512_storeu_ps(weights.as_mut_ptr(), rounded);
        }
    }
}

/// Replaces the scores that a row does not see by minus infinity.
#[inline]
#[target_feature(enable = "avx512f")]
fn hide(scores: &mut [[f32; LANES]], visible: &[usize; TILE_LEN]) {
    for (tile, scores) in scores.chunks_exact_mut(TILE_LEN).enumerate() {
        // Later rows see more.
        if visible[0] >= (tile + 1) * LANES {
            continue;
        }
        for (scores, visible) in scores.iter_mut().zip(visible) {
            let seen = visible.saturating_sub(tile * LANES).min(LANES);
            let seen = u16::try_from((1_u32 << seen) - 1).expect("a bit for each lane");
            let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
            // SAFETY: sixteen numbers.
            unsafe {
                let shown = _mm512_mask_mov_ps(nothing, seen, _mm512_loadu_ps(scores.as_ptr()));
                _mm512_storeu_ps(scores.as_mut_ptr(), shown);
            }
        }
    }
}

/// The largest score of each row.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest_of_rows(tiles: &[[[f32; LANES]; TILE_LEN]]) -> __m512 {
    let mut rows = [_mm512_set1_ps(f32::NEG_INFINITY); TILE_LEN];
    for tile in tiles {
        for (largest, scores) in rows.iter_mut().zip(tile) {
            // SAFETY: sixteen numbers.
            *largest = _mm512_max_ps(*largest, unsafe { _mm512_loadu_ps(scores.as_ptr()) });
        }
    }
    // Quarter q of each vector then holds the largest of the quarters q of four rows.
    let mut fours = [_mm512_set1_ps(0.0); 4];
    for (four, rows) in fours.iter_mut().zip(rows.as_chunks::<4>().0) {
        let [a, b, c, d] = transpose_within_quarters(*rows);
        *four = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
    }
    let [a, b, c, d] = transpose_quarters(fours);
    _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d))
}

/// Quarter i of vector j becomes quarter j of vector i.
#[inline]
#[target_feature(enable = "avx512f")]
fn transpose_quarters([a, b, c, d]: [__m512; 4]) -> [__m512; 4] {
    let (low_ab, high_ab) = (
        _mm512_shuffle_f32x4::<0x44>(a, b),
        _mm512_shuffle_f32x4::<0xee>(a, b),
    );
    let (low_cd, high_cd) = (
        _mm512_shuffle_f32x4::<0x44>(c, d),
        _mm512_shuffle_f32x4::<0xee>(c, d),
    );
    [
        _mm512_shuffle_f32x4::<0x88>(low_ab, low_cd),
        _mm512_shuffle_f32x4::<0xdd>(low_ab, low_cd),
        _mm512_shuffle_f32x4::<0x88>(high_ab, high_cd),
        _mm512_shuffle_f32x4::<0xdd>(high_ab, high_cd),
    ]
}
