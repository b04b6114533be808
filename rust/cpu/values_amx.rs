//! The values of attention on matrix tiles: from the slots of the cache into tiles, and sums back into order.
//!
//! Called by `tile_amx` and `prompt_amx`.

use std::arch::x86_64::{
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_permutex2var_ps, _mm512_setzero_si512, _mm512_storeu_ps,
    _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::ops::Range;

use super::amx::{DEPTH, TILE_LEN};
use super::isa::LANES;
use super::tensor::CacheView;
use super::tile::Tile;
use super::tile_amx::TILE_ELEMENTS;
use super::tile_loops::{SPLIT_LEN, vector_at, vector_at_mut};

/// Interleaves the values of neighbouring positions of a split, of some of the columns, into tiles `[positions / 32]
/// [columns / 16][16 pairs][16 columns]`; zeros fill up the last ones. The first of every two tiles takes from each
/// eight columns the lower four, the other one the upper four: `restore_order`.
///
/// # Safety
/// The tile's views are valid, and it sees the positions.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack_values(
    tile: &Tile<'_>,
    split: usize,
    positions: Range<usize>,
    columns: Range<usize>,
    values: &mut [f32],
) {
    let cache = &tile.value_cache;
    let stride = cache.slot_stride * cache.dtype.size();
    let chunk_len = columns.len() * TILE_LEN;
    let num_chunks = positions.len().div_ceil(DEPTH);
    for (half, first) in (positions.start..positions.start + num_chunks * DEPTH)
        .step_by(TILE_LEN)
        .enumerate()
    {
        let count = positions.end.saturating_sub(first).min(TILE_LEN);
        let slots = if count > 0 {
            sixteen_slots(tile, cache, split * SPLIT_LEN + first)
        } else {
            std::ptr::null()
        };
        for (idx, column) in columns.clone().step_by(DEPTH).enumerate() {
            let place = half / 2 * chunk_len + 2 * idx * TILE_ELEMENTS + half % 2 * TILE_ELEMENTS / 2;
            let (lower, upper) = values[place..].split_at_mut(TILE_ELEMENTS);
            let slots = slots.wrapping_add(2 * column);
            // SAFETY: `count` slots, for which the caller vouches.
            unsafe {
                match count {
                    // A loop of so many steps is unrolled.
                    TILE_LEN => interleave(slots, stride, TILE_LEN, lower, upper),
                    _ => interleave(slots, stride, count, lower, upper),
                }
            }
        }
    }
}

/// Interleaves 32 elements of each of sixteen slots, those from `count` on taken as zeros: the lower four of every
/// eight columns, and the upper four.
///
/// # Safety
/// `count` slots are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave(slots: *const u8, stride: usize, count: usize, lower: &mut [f32], upper: &mut [f32]) {
    let places = lower
        .as_chunks_mut::<LANES>()
        .0
        .iter_mut()
        .zip(upper.as_chunks_mut::<LANES>().0);
    for (pair, (lower, upper)) in places.take(TILE_LEN / 2).enumerate() {
        let low = slots.wrapping_add(2 * pair * stride);
        // SAFETY: the caller vouches for the slots; there is room for sixteen numbers each.
        unsafe {
            let mut both = [_mm512_setzero_si512(); 2];
            if 2 * pair < count {
                both[0] = _mm512_loadu_si512(low.cast());
            }
            if 2 * pair + 1 < count {
                both[1] = _mm512_loadu_si512(low.wrapping_add(stride).cast());
            }
            let [low, high] = both;
            _mm512_storeu_si512(lower.as_mut_ptr().cast(), _mm512_unpacklo_epi16(low, high));
            _mm512_storeu_si512(upper.as_mut_ptr().cast(), _mm512_unpackhi_epi16(low, high));
        }
    }
}

/// Address of the first of sixteen slots that lie in one block; the position is a multiple of sixteen.
#[inline]
pub(super) fn sixteen_slots(tile: &Tile<'_>, cache: &CacheView, position: usize) -> *const u8 {
    let block = tile.table[position / cache.block_size];
    let block = usize::try_from(block).expect("checked: no block id is negative");
    cache.row(block, tile.kv_head, position % cache.block_size)
}

/// Puts the sums of two tiles of columns, as `pack_values` makes them, into the order of the columns.
#[inline]
#[target_feature(enable = "avx512f")]
pub(super) fn restore_order(sums: &[f32], columns: &mut [f32]) {
    const ORDER: [[i32; LANES]; 2] = [
        [0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23],
        [8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31],
    ];
    // SAFETY: sixteen numbers each.
    unsafe {
        let lower = _mm512_loadu_ps(vector_at(sums, 0).as_ptr());
        let upper = _mm512_loadu_ps(vector_at(sums, LANES).as_ptr());
        for (half, order) in ORDER.iter().enumerate() {
            let order = _mm512_loadu_si512(order.as_ptr().cast());
            let place = vector_at_mut(columns, half * LANES).as_mut_ptr();
            _mm512_storeu_ps(place, _mm512_permutex2var_ps(lower, order, upper));
        }
    }
}
