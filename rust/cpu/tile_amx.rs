//! Attention of a tile of queries on the matrix tiles of AMX: the arithmetic of bf16 queries and caches.
//!
//! The definition is that of `tile`, with bf16 factors and other orders, as fixed as those:
//!
//! ```text
//! score[j] = (sum over d of query[d] * key[j][d]) * scale * log2 e      32 elements an instruction, d ascending
//! weight[j] = 2^(score[j] - largest score), rounded to bf16
//! total    = sum over j of weight[j]                                    j ascending, one accumulator
//! value[d] = sum over j of weight[j] * value[j][d]                      32 positions an instruction, j ascending
//! ```
//!
//! Scores are computed transposed, sixteen keys by sixteen rows: the keys are multiplied where they lie in the cache,
//! and softmax has a row in each lane. A row's numbers do not depend on the others in its matrices: a position that it
//! does not see has a weight of zero, and adds zero. Only zero times infinity or NaN would not be zero; where a row of
//! the tile sees such a value and another one does not, the tokens of the tile are computed one by one. Slots behind
//! what the tile sees may be read, but only into rows of scores that nobody looks at.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{
    __m512, __m512i, _mm256_loadu_si256, _mm512_and_si512, _mm512_castsi512_ps, _mm512_cmpgt_epi32_mask,
    _mm512_cvtepu16_epi32, _mm512_cvtne2ps_pbh, _mm512_loadu_ps, _mm512_loadu_si512, _mm512_mask_mov_ps,
    _mm512_or_si512, _mm512_permutexvar_epi16, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_slli_epi32, _mm512_storeu_ps, _mm512_storeu_si512,
};

use super::amx::{Amx, ROW_BYTES, Shapes, TILE_LEN};
use super::element::Dtype;
use super::isa::{AlignedBuffer, LANES, Simd};
use super::tensor::CacheView;
use super::tile::Tile;
use super::tile_loops::{SPLIT_LEN, Slots, partial_row_len, vector_at_mut};
use super::x86::{Avx512, transpose_avx512};

/// bf16 of a row of a tile, and products that one instruction adds up.
const DEPTH: usize = 32;

/// f32, or pairs of bf16, of a tile.
const TILE_ELEMENTS: usize = TILE_LEN * TILE_LEN;

/// Accumulators.
const NUM_SUMS: usize = 4;

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Matrices {
    /// `[rows / 16][head_dim / 32][16 pairs][16 rows]`
    queries: AlignedBuffer,
    /// `[SPLIT_LEN][16 rows]`
    scores: AlignedBuffer,
    /// `[SPLIT_LEN / 32][16 rows][16 pairs]`
    weights: AlignedBuffer,
    /// `[SPLIT_LEN / 32][head_dim / 16][16 pairs][16 columns]`
    values: AlignedBuffer,
    /// `[4][16 rows][16 columns]`
    sums: AlignedBuffer,
}

/// The proof of the instructions, if a tile has the types and sizes for them.
#[inline(always)]
pub(super) fn suits<S: Simd>(simd: S, tile: &Tile<'_>) -> Option<Amx> {
    let bf16 = tile.query.dtype == Dtype::Bf16 && tile.key_cache.dtype == Dtype::Bf16;
    let whole = tile.head_dim().is_multiple_of(DEPTH) && tile.key_cache.block_size.is_multiple_of(TILE_LEN);
    simd.amx().filter(|_| bf16 && whole)
}

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, matrices: &mut Matrices) {
    let (num_rows, chunks) = (tile.num_rows(), tile.head_dim() / DEPTH);
    let len = num_rows.div_ceil(TILE_LEN) * chunks * TILE_ELEMENTS;
    matrices.queries.reserve(len);
    matrices.scores.reserve(SPLIT_LEN * TILE_LEN);
    matrices.weights.reserve(SPLIT_LEN / DEPTH * TILE_ELEMENTS);
    matrices.values.reserve(SPLIT_LEN / 2 * tile.head_dim());
    matrices.sums.reserve(NUM_SUMS * TILE_ELEMENTS);
    let tiles = matrices.queries.slice(0..len).chunks_exact_mut(TILE_ELEMENTS);
    for (idx, packed) in tiles.enumerate() {
        let (group, chunk) = (idx / chunks, idx % chunks);
        let mut rows = [_mm512_set1_ps(0.0); LANES];
        for (row, place) in (group * TILE_LEN..num_rows).zip(&mut rows) {
            let (token, head) = tile.place(row);
            let address = tile.query.row(token, head).wrapping_add(chunk * ROW_BYTES);
            // SAFETY: 32 elements of a row, for which the caller vouches.
            *place = unsafe { _mm512_loadu_ps(address.cast()) };
        }
        for (column, place) in transpose_avx512(&rows)
            .into_iter()
            .zip(packed.as_chunks_mut::<LANES>().0)
        {
            // SAFETY: sixteen numbers.
            unsafe { _mm512_storeu_ps(place.as_mut_ptr(), column) };
        }
    }
}

/// Computes one split into `partial`. Rows that see nothing of it are marked by a total of zero.
///
/// # Safety
/// As `Tile::compute_split`; the tile suits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn compute_split(
    amx: Amx,
    tile: &Tile<'_>,
    matrices: &mut Matrices,
    split: usize,
    partial: &mut [f32],
) {
    let (num_rows, width) = (tile.num_rows(), tile.head_dim());
    let row_len = partial_row_len(width);
    let all_keys = tile.visible(num_rows - 1, split);
    let unshared = tile.visible(0, split)..all_keys;
    // SAFETY: passed on; these are positions that some row sees.
    if tile.tokens.len() > 1 && !unsafe { all_finite(tile, split, unshared) } {
        // SAFETY: passed on.
        return unsafe { compute_tokens(amx, tile, matrices, split, partial) };
    }
    amx.configure(&Shapes::FULL);
    let mut is_packed = false;
    for (group, partial) in partial.chunks_mut(TILE_LEN * row_len).enumerate() {
        let first = group * TILE_LEN;
        let count = TILE_LEN.min(num_rows - first);
        let num_keys = tile.visible(first + count - 1, split);
        let mut largest = [0.0; LANES];
        let mut totals = [0.0; LANES];
        if num_keys > 0 {
            // SAFETY: passed on.
            unsafe { score(amx, tile, matrices, split, (group, num_keys)) };
            if !is_packed {
                // The scores of the first rows have asked for the values.
                // SAFETY: passed on.
                unsafe { pack_values(tile, split, all_keys, &mut matrices.values) };
                is_packed = true;
            }
            let mut visible = [num_keys; LANES];
            for (lane, visible) in visible.iter_mut().enumerate().take(count) {
                *visible = tile.visible(first + lane, split);
            }
            let factor = tile.scale * std::f32::consts::LOG2_E;
            soften(amx, matrices, &visible, factor, (&mut largest, &mut totals));
            // SAFETY: the weights and the values are packed.
            unsafe { mix(amx, matrices, num_keys, (partial, width)) };
        }
        for (row, partial) in partial.chunks_exact_mut(row_len).enumerate() {
            partial[width] = largest[row];
            partial[width + 1] = totals[row];
        }
    }
    amx.release();
}

/// Computes one split token by token.
unsafe fn compute_tokens(
    amx: Amx,
    tile: &Tile<'_>,
    matrices: &mut Matrices,
    split: usize,
    partial: &mut [f32],
) {
    let len = tile.group_size() * partial_row_len(tile.head_dim());
    for (token, partial) in tile.tokens.chunks(1).zip(partial.chunks_exact_mut(len)) {
        let tile = Tile {
            tokens: token,
            ..*tile
        };
        // SAFETY: the caller vouches for the views.
        unsafe {
            load_queries(&tile, matrices);
            compute_split(amx, &tile, matrices, split, partial);
        }
    }
    // SAFETY: as above.
    unsafe { load_queries(tile, matrices) };
}

/// Whether the values at some positions of a split are numbers.
#[inline(always)]
unsafe fn all_finite(tile: &Tile<'_>, split: usize, positions: std::ops::Range<usize>) -> bool {
    const EXPONENT: u16 = 0x7f80;
    let start = split * SPLIT_LEN + positions.start;
    let mut slots = Slots::new(&tile.value_cache, tile.table, tile.kv_head, start);
    positions.fold(true, |all, _| {
        let row = slots.next_row().expect("checked: the table holds the sequence");
        // SAFETY: the caller vouches for the cache; the row is aligned to its type.
        #[expect(clippy::cast_ptr_alignment, reason = "the caller vouches for the alignment")]
        let row = unsafe { std::slice::from_raw_parts(row.cast::<u16>(), tile.head_dim()) };
        row.iter()
            .fold(all, |all, bits| all && bits & EXPONENT != EXPONENT)
    })
}

/// Address of the first of sixteen slots that lie in one block; the position is a multiple of sixteen.
#[inline(always)]
fn sixteen_slots(tile: &Tile<'_>, cache: &CacheView, position: usize) -> *const u8 {
    let block = tile.table[position / cache.block_size];
    let block = usize::try_from(block).expect("checked: no block id is negative");
    cache.row(block, tile.kv_head, position % cache.block_size)
}

/// Interleaves the values of neighbouring positions; zeros fill up the last tiles.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
unsafe fn pack_values(tile: &Tile<'_>, split: usize, num_keys: usize, values: &mut AlignedBuffer) {
    let columns = tile.head_dim() / TILE_LEN;
    let cache = &tile.value_cache;
    let stride = cache.slot_stride * cache.dtype.size();
    let len = num_keys.div_ceil(DEPTH) * columns * TILE_ELEMENTS;
    let values = values.slice(0..len);
    for first in (0..num_keys.next_multiple_of(DEPTH)).step_by(TILE_LEN) {
        // Eight pairs of rows of every tile of a chunk.
        let start = first / DEPTH * columns * TILE_ELEMENTS + first % DEPTH / 2 * TILE_LEN;
        let count = num_keys.saturating_sub(first).min(TILE_LEN);
        let slots = if count > 0 {
            sixteen_slots(tile, cache, split * SPLIT_LEN + first)
        } else {
            std::ptr::null()
        };
        for pair in 0..TILE_LEN / 2 {
            let low = slots.wrapping_add(2 * pair * stride);
            let high = low.wrapping_add(stride);
            for column in 0..columns {
                let offset = 2 * TILE_LEN * column;
                let mut both = _mm512_setzero_si512();
                if 2 * pair < count {
                    // SAFETY: sixteen elements of a slot, for which the caller vouches.
                    let narrow = unsafe { _mm256_loadu_si256(low.wrapping_add(offset).cast()) };
                    both = _mm512_cvtepu16_epi32(narrow);
                }
                if 2 * pair + 1 < count {
                    // SAFETY: as above.
                    let narrow = unsafe { _mm256_loadu_si256(high.wrapping_add(offset).cast()) };
                    both = _mm512_or_si512(both, _mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(narrow)));
                }
                let place = vector_at_mut(values, start + column * TILE_ELEMENTS + pair * TILE_LEN);
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_si512(place.as_mut_ptr().cast(), both) };
            }
        }
    }
}

/// Asks for sixteen slots of keys and of values, if the tile sees the position.
#[inline(always)]
fn prefetch(simd: Avx512, tile: &Tile<'_>, cache: &CacheView, position: usize) {
    if position >= tile.tokens[tile.tokens.len() - 1].visible {
        return;
    }
    let slots = sixteen_slots(tile, cache, position);
    let stride = cache.slot_stride * cache.dtype.size();
    for slot in 0..TILE_LEN {
        for byte in (0..2 * cache.head_dim).step_by(ROW_BYTES) {
            simd.prefetch(slots.wrapping_add(slot * stride + byte));
        }
    }
}

/// Multiplies the keys of a split by the queries of a group of rows; `(group, number of keys)`.
#[inline(always)]
unsafe fn score(
    amx: Amx,
    tile: &Tile<'_>,
    matrices: &mut Matrices,
    split: usize,
    (group, num_keys): (usize, usize),
) {
    let simd = Avx512::from(amx);
    let chunks = tile.head_dim() / DEPTH;
    let queries = matrices
        .queries
        .slice(group * chunks * TILE_ELEMENTS..(group + 1) * chunks * TILE_ELEMENTS);
    let (cache, last) = (&tile.key_cache, (num_keys - 1) / TILE_LEN);
    let stride = cache.slot_stride * cache.dtype.size();
    for first in (0..=last).step_by(NUM_SUMS) {
        let mut keys = [std::ptr::null(); NUM_SUMS];
        for (idx, keys) in keys.iter_mut().enumerate() {
            // Behind the last group its scores are computed again, where nobody reads them.
            let position = split * SPLIT_LEN + (first + idx).min(last) * TILE_LEN;
            *keys = sixteen_slots(tile, cache, position);
            if group == 0 && first + idx <= last {
                prefetch(simd, tile, &tile.value_cache, position);
                prefetch(simd, tile, cache, position + NUM_SUMS * TILE_LEN);
            }
        }
        amx.clear();
        for queries in queries.chunks_exact(TILE_ELEMENTS) {
            // SAFETY: sixteen slots of one block, and a tile of queries.
            unsafe { amx.add_products_of_lefts(keys, stride, queries.as_ptr().cast()) };
            for keys in &mut keys {
                *keys = keys.wrapping_add(ROW_BYTES);
            }
        }
        let start = first * TILE_ELEMENTS;
        amx.store(matrices.scores.slice(start..start + NUM_SUMS * TILE_ELEMENTS));
    }
}

/// Turns scores into weights, and says the largest score and the total of the weights of every row.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
fn soften(
    amx: Amx,
    matrices: &mut Matrices,
    visible: &[usize; LANES],
    factor: f32,
    (largest_out, totals_out): (&mut [f32; LANES], &mut [f32; LANES]),
) {
    let simd = Avx512::from(amx);
    let num_keys = visible[LANES - 1];
    let padded = num_keys.next_multiple_of(DEPTH);
    let scores = matrices
        .scores
        .slice(0..padded * TILE_LEN)
        .as_chunks_mut::<LANES>()
        .0;
    let largest = find_largest(simd, scores, visible, factor);
    let mut total = simd.splat(0.0);
    let weights = matrices.weights.slice(0..padded / 2 * TILE_LEN);
    for (scores, weights) in scores
        .as_chunks::<DEPTH>()
        .0
        .iter()
        .zip(weights.chunks_exact_mut(TILE_ELEMENTS))
    {
        let mut pairs = [simd.splat(0.0); LANES];
        for (pair, scores) in pairs.iter_mut().zip(scores.as_chunks::<2>().0) {
            let even = simd.exp2(simd.sub(simd.load(&scores[0]), largest));
            let odd = simd.exp2(simd.sub(simd.load(&scores[1]), largest));
            let both = round_pairs(even, odd);
            total = simd.add(total, _mm512_castsi512_ps(_mm512_slli_epi32::<16>(both)));
            total = simd.add(total, _mm512_castsi512_ps(high_halves(both)));
            *pair = _mm512_castsi512_ps(both);
        }
        for (row, place) in simd.transpose(pairs).into_iter().zip(weights.as_chunks_mut().0) {
            simd.store(row, place);
        }
    }
    simd.store(largest, largest_out);
    simd.store(total, totals_out);
}

/// Scales the scores, replaces those that a row does not see by minus infinity, and returns the largest of each row.
#[inline(always)]
fn find_largest(simd: Avx512, scores: &mut [[f32; LANES]], visible: &[usize; LANES], factor: f32) -> __m512 {
    let factor = simd.splat(factor);
    let nothing = simd.splat(f32::NEG_INFINITY);
    let (seen_by_all, others) = scores.split_at_mut(visible[0]);
    // Not minus infinity: that minus itself would make a weight of NaN in a row that sees nothing.
    let mut largest = simd.splat(f32::MIN);
    for score in seen_by_all {
        let scaled = simd.mul(simd.load(score), factor);
        largest = simd.max(largest, scaled);
        simd.store(scaled, score);
    }
    let limits = visible.map(|visible| i32::try_from(visible).expect("at most a split"));
    for (key, score) in (visible[0]..).zip(others) {
        let key = i32::try_from(key).expect("at most a split");
        let scaled = simd.mul(simd.load(score), factor);
        // SAFETY: the value of `simd` proves the instructions; sixteen numbers.
        let scaled = unsafe {
            let limits = _mm512_loadu_si512(limits.as_ptr().cast());
            let seen = _mm512_cmpgt_epi32_mask(limits, _mm512_set1_epi32(key));
            _mm512_mask_mov_ps(nothing, seen, scaled)
        };
        largest = simd.max(largest, scaled);
        simd.store(scaled, score);
    }
    largest
}

/// Rounds to bf16, the numbers of `even` into the low halves of the lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512bf16")]
fn round_pairs(even: __m512, odd: __m512) -> __m512i {
    const fn interleaved() -> [u16; 2 * LANES] {
        let mut order = [0; 2 * LANES];
        let mut lane = 0;
        while lane < 2 * LANES {
            #[expect(clippy::cast_possible_truncation, reason = "a lane is a small number")]
            let source = (lane / 2 + lane % 2 * LANES) as u16;
            order[lane] = source;
            lane += 1;
        }
        order
    }
    const ORDER: [u16; 2 * LANES] = interleaved();
    // SAFETY: vectors of the same size; the type of bf16 vectors has no operations of its own.
    unsafe {
        let rounded: __m512i = std::mem::transmute(_mm512_cvtne2ps_pbh(odd, even));
        _mm512_permutexvar_epi16(_mm512_loadu_si512(ORDER.as_ptr().cast()), rounded)
    }
}

#[inline]
#[target_feature(enable = "avx512f")]
fn high_halves(pairs: __m512i) -> __m512i {
    _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff_0000_u32.cast_signed()))
}

/// Multiplies weights by values; the sums go to `(rows of partial results, head_dim)`.
#[inline(always)]
unsafe fn mix(amx: Amx, matrices: &mut Matrices, num_keys: usize, (partial, width): (&mut [f32], usize)) {
    let columns = width / TILE_LEN;
    let chunks = num_keys.div_ceil(DEPTH);
    let row_len = partial_row_len(width);
    let weights = matrices.weights.slice(0..chunks * TILE_ELEMENTS);
    let values = matrices.values.slice(0..chunks * columns * TILE_ELEMENTS);
    for first in (0..columns).step_by(NUM_SUMS) {
        let count = NUM_SUMS.min(columns - first);
        amx.clear();
        for (weights, values) in weights
            .chunks_exact(TILE_ELEMENTS)
            .zip(values.chunks_exact(columns * TILE_ELEMENTS))
        {
            let values = values[first * TILE_ELEMENTS..(first + count) * TILE_ELEMENTS].as_ptr();
            // SAFETY: a tile of weights and `count` of values, an even number.
            unsafe {
                if count == NUM_SUMS {
                    amx.add_products_of_rights(weights.as_ptr().cast(), values.cast());
                } else {
                    amx.add_products_of_two_rights(weights.as_ptr().cast(), values.cast());
                }
            }
        }
        let sums = matrices.sums.slice(0..NUM_SUMS * TILE_ELEMENTS);
        amx.store(sums);
        for (column, sums) in sums.chunks_exact(TILE_ELEMENTS).enumerate().take(count) {
            for (partial, sums) in partial.chunks_exact_mut(row_len).zip(sums.as_chunks::<LANES>().0) {
                *vector_at_mut(partial, (first + column) * TILE_LEN) = *sums;
            }
        }
    }
}
