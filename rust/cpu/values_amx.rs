//! The values of attention on matrix tiles: from the slots of the cache into tiles, pair by pair of positions.
//!
//! Called by `prompt_amx`, and by `few_rows` for the places of slots.

use std::arch::x86_64::{
    __m512i, _mm512_loadu_si512, _mm512_permutexvar_epi64, _mm512_setzero_si512, _mm512_storeu_si512,
    _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::ops::Range;

use super::amx::{DEPTH, TILE_LEN};
use super::isa::LANES;
use super::tensor::CacheView;
use super::tile::Tile;
use super::tile_amx::TILE_ELEMENTS;
use super::tile_loops::SPLIT_LEN;

/// Interleaves the values of neighbouring positions of a split into tiles `[positions / 32][head_dim / 16][16 pairs]
/// [16 columns]`; zeros fill up the last ones.
///
/// # Safety
/// The tile's views are valid, and it sees the positions.
#[target_feature(enable = "avx512f,avx512bw")]
pub(super) unsafe fn pack_values(tile: &Tile<'_>, split: usize, positions: Range<usize>, values: &mut [f32]) {
    let cache = &tile.value_cache;
    let stride = cache.slot_stride * cache.dtype.size();
    let chunk_len = cache.head_dim * TILE_LEN;
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
        for (idx, column) in (0..cache.head_dim).step_by(DEPTH).enumerate() {
            let place = half / 2 * chunk_len + 2 * idx * TILE_ELEMENTS + half % 2 * TILE_ELEMENTS / 2;
            let (lower, upper) = values[place..].split_at_mut(TILE_ELEMENTS);
            let slots = slots.wrapping_add(2 * column);
            // SAFETY: `count` slots, for which the caller vouches.
            unsafe {
                match count {
                    TILE_LEN => interleave::<true>(slots, stride, count, lower, upper),
                    _ => interleave::<false>(slots, stride, count, lower, upper),
                }
            }
        }
    }
}

/// Interleaves 32 elements of each of sixteen slots, those from `count` on taken as zeros: the lower sixteen, and the
/// upper ones. WHOLE says that there are sixteen: the loop is then unrolled.
///
/// # Safety
/// `count` slots are readable.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn interleave<const WHOLE: bool>(
    slots: *const u8,
    stride: usize,
    count: usize,
    lower: &mut [f32],
    upper: &mut [f32],
) {
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
            if WHOLE || 2 * pair < count {
                both[0] = halves_of_quarters(low);
            }
            if WHOLE || 2 * pair + 1 < count {
                both[1] = halves_of_quarters(low.wrapping_add(stride));
            }
            let [low, high] = both;
            _mm512_storeu_si512(lower.as_mut_ptr().cast(), _mm512_unpacklo_epi16(low, high));
            _mm512_storeu_si512(upper.as_mut_ptr().cast(), _mm512_unpackhi_epi16(low, high));
        }
    }
}

/// 32 elements, the lower sixteen in the lower halves of quarters, so that interleaving halves keeps their order.
///
/// # Safety
/// They are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn halves_of_quarters(elements: *const u8) -> __m512i {
    const ORDER: [u64; 8] = [0, 4, 1, 5, 2, 6, 3, 7];
    // SAFETY: the caller vouches for the elements.
    unsafe {
        let order = _mm512_loadu_si512(ORDER.as_ptr().cast());
        _mm512_permutexvar_epi64(order, _mm512_loadu_si512(elements.cast()))
    }
}

/// Address of the first of sixteen slots that lie in one block; the position is a multiple of sixteen.
#[inline]
pub(super) fn sixteen_slots(tile: &Tile<'_>, cache: &CacheView, position: usize) -> *const u8 {
    let block = tile.table[position / cache.block_size];
    let block = usize::try_from(block).expect("checked: no block id is negative");
    cache.row(block, tile.kv_head, position % cache.block_size)
}
