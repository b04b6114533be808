//! Scores to weights between the two products of attention on matrix tiles; called by `tile_amx` and `prompt_amx`.
//!
//! A vector holds the scores of R rows for each of 16 / R consecutive keys, R four or sixteen, so that no lane is idle
//! where a key head serves few rows. A row's weights do not depend on R:
//!
//! ```text
//! weight[j] = 2^(score[j] * factor - largest score * factor), rounded to bf16
//! ```

use std::arch::x86_64::{
    __m512, __m512i, _mm512_castsi512_ps, _mm512_cmpgt_epi32_mask, _mm512_cvtne2ps_pbh, _mm512_fmadd_ps,
    _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps,
    _mm512_permutexvar_epi16, _mm512_reduce_ps, _mm512_scalef_ps, _mm512_set1_ps, _mm512_shuffle_f32x4,
    _mm512_storeu_ps,
};

use super::amx::{DEPTH, TILE_LEN};
use super::isa::LANES;
use super::x86::transpose_avx512;

/// Words of a vector.
const WORDS: usize = 2 * LANES;

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

/// Turns scores into weights, for whole tiles of keys. Scores are `[keys][R]`, weights `[keys / 32][R][16 pairs]`;
/// `visible` says how many keys each row sees. Returns the largest score of each row, times `factor`; it is of no use
/// where a row sees nothing. `after` is told each tile of weights, by its number, as soon as its stores are on their way.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512bf16")]
pub(super) fn soften<const R: usize>(
    scores: &mut [f32],
    weights: &mut [f32],
    visible: &[usize; R],
    factor: f32,
    mut after: impl FnMut(usize),
) -> [f32; R] {
    hide(scores.as_chunks_mut().0, visible);
    let scores = scores.as_chunks::<LANES>().0;
    let largest = _mm512_mul_ps(largest::<R>(scores), _mm512_set1_ps(factor));
    // Not minus infinity: that minus itself would make a weight of NaN in a row that sees nothing.
    let largest = _mm512_max_ps(_mm512_set1_ps(f32::MIN), largest);
    let weight = |scores: &[f32; LANES]| {
        // SAFETY: sixteen numbers.
        let scores = unsafe { _mm512_loadu_ps(scores.as_ptr()) };
        exp2(_mm512_fmsub_ps(scores, _mm512_set1_ps(factor), largest))
    };
    let tiles = scores
        .chunks_exact(DEPTH * R / LANES)
        .zip(weights.as_chunks_mut::<LANES>().0.chunks_exact_mut(R));
    for (idx, (scores, weights)) in tiles.enumerate() {
        // Loops over arrays, whose lengths the compiler knows, are unrolled, and the vectors stay in registers.
        if R == TILE_LEN {
            let scores: &[[f32; LANES]; DEPTH] = scores.try_into().expect("as cut");
            let pairs: [__m512; LANES] = std::array::from_fn(|pair| {
                let [even, odd] = [&scores[2 * pair], &scores[2 * pair + 1]].map(weight);
                round(even, odd, &INTERLEAVED)
            });
            for (row, place) in transpose_avx512(&pairs).into_iter().zip(weights) {
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_ps(place.as_mut_ptr(), row) };
            }
        } else {
            let mut quarters = [_mm512_set1_ps(0.0); 4];
            for (rows, [low, high]) in quarters.iter_mut().zip(scores.as_chunks::<2>().0) {
                *rows = round(weight(low), weight(high), &BY_ROW);
            }
            for (row, place) in transpose_quarters(quarters).into_iter().zip(weights) {
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_ps(place.as_mut_ptr(), row) };
            }
        }
        after(idx);
    }
    let mut lanes = [0.0; LANES];
    // SAFETY: sixteen numbers.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), largest) };
    std::array::from_fn(|row| lanes[row])
}

/// Replaces the scores that a row does not see by minus infinity.
#[inline]
#[target_feature(enable = "avx512f")]
fn hide<const R: usize>(scores: &mut [[f32; LANES]], visible: &[usize; R]) {
    let keys_per_vector = LANES / R;
    let seen_by_all = visible.iter().copied().fold(usize::MAX, usize::min);
    let lane = |lane: usize| i32::try_from(lane).expect("at most a split");
    let limits: [i32; LANES] = std::array::from_fn(|idx| lane(visible[idx % R]));
    let first = seen_by_all / keys_per_vector;
    for (idx, scores) in scores.iter_mut().enumerate().skip(first) {
        let keys: [i32; LANES] = std::array::from_fn(|lane_idx| lane(idx * keys_per_vector + lane_idx / R));
        // SAFETY: sixteen numbers each.
        unsafe {
            let limits = _mm512_loadu_si512(limits.as_ptr().cast());
            let seen = _mm512_cmpgt_epi32_mask(limits, _mm512_loadu_si512(keys.as_ptr().cast()));
            let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
            let shown = _mm512_mask_mov_ps(nothing, seen, _mm512_loadu_ps(scores.as_ptr()));
            _mm512_storeu_ps(scores.as_mut_ptr(), shown);
        }
    }
}

/// The largest score of each row, in every lane of the row.
#[inline]
#[target_feature(enable = "avx512f")]
fn largest<const R: usize>(scores: &[[f32; LANES]]) -> __m512 {
    let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
    // Whole quadruples, of a length that the compiler knows, stay in registers.
    let (quadruples, rest) = scores.as_chunks::<4>();
    for scores in quadruples {
        for (largest, scores) in largest.iter_mut().zip(scores) {
            // SAFETY: sixteen numbers.
            *largest = _mm512_max_ps(*largest, unsafe { _mm512_loadu_ps(scores.as_ptr()) });
        }
    }
    debug_assert!(rest.is_empty(), "scores come in whole tiles of weights");
    let [a, b, c, d] = largest;
    let mut all = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
    if R < LANES {
        all = _mm512_max_ps(all, _mm512_shuffle_f32x4::<0x4e>(all, all));
        all = _mm512_max_ps(all, _mm512_shuffle_f32x4::<0xb1>(all, all));
    }
    all
}

/// Where the words of two rounded vectors go: neighbouring keys of a lane side by side.
static INTERLEAVED: [u16; WORDS] = order(2, 16);
/// Where the words of two rounded vectors of 4 keys by 4 rows go: the 8 keys of a row side by side.
static BY_ROW: [u16; WORDS] = order(8, 4);

/// Word `key * num_rows + row` becomes word `row * num_keys + key`.
const fn order(num_keys: u16, num_rows: u16) -> [u16; WORDS] {
    let mut order = [0; WORDS];
    let mut row = 0;
    while row < num_rows {
        let mut key = 0;
        while key < num_keys {
            order[(row * num_keys + key) as usize] = key * num_rows + row;
            key += 1;
        }
        row += 1;
    }
    order
}

/// Rounds two vectors to bf16, and rearranges the words.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round(low: __m512, high: __m512, order: &[u16; WORDS]) -> __m512 {
    // SAFETY: vectors of the same size; the type of bf16 vectors has no operations of its own.
    unsafe {
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(high, low));
        _mm512_castsi512_ps(_mm512_permutexvar_epi16(
            _mm512_loadu_si512(order.as_ptr().cast()),
            rounded,
        ))
    }
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
