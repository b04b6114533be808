//! The keys of attention on matrix tiles: from the slots of the cache into tiles, pair by pair of elements.
//!
//! Called by `prompt_amx`.

use std::arch::x86_64::{
    __m512, _mm_loadu_ps, _mm512_broadcast_f32x4, _mm512_mask_broadcast_f32x4, _mm512_storeu_ps,
};

use super::amx::ROW_BYTES;
use super::isa::LANES;
use super::tile_amx::TILE_ELEMENTS;
use super::x86::transpose_within_quarters;

/// Transposes sixteen keys into tiles `[head_dim / 32][16 pairs of elements][16 keys]`.
///
/// # Safety
/// The slots, `stride` bytes apart, are readable; `packed` has room for whole tiles of their elements.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn pack_keys(slots: *const u8, stride: usize, packed: &mut [f32]) {
    for (chunk, packed) in packed.chunks_exact_mut(TILE_ELEMENTS).enumerate() {
        let slots = slots.wrapping_add(chunk * ROW_BYTES);
        for (quarter, places) in packed.as_chunks_mut::<LANES>().0.chunks_exact_mut(4).enumerate() {
            let slots = slots.wrapping_add(quarter * ROW_BYTES / 4);
            // SAFETY: four pairs of elements of each key, for which the caller vouches.
            let pairs = unsafe {
                transpose_within_quarters([
                    quarters(slots, stride),
                    quarters(slots.wrapping_add(stride), stride),
                    quarters(slots.wrapping_add(2 * stride), stride),
                    quarters(slots.wrapping_add(3 * stride), stride),
                ])
            };
            for (pair, place) in pairs.into_iter().zip(places) {
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_ps(place.as_mut_ptr(), pair) };
            }
        }
    }
    debug_assert_eq!(packed.len() % TILE_ELEMENTS, 0, "whole tiles");
}

/// Sixteen bytes of every fourth key, four of them, side by side. Loads place them without a shuffle.
///
/// # Safety
/// The bytes are readable.
#[inline]
#[target_feature(enable = "avx512f")]
unsafe fn quarters(slots: *const u8, stride: usize) -> __m512 {
    let step = 4 * stride;
    // SAFETY: the caller vouches for them.
    unsafe {
        let mut all = _mm512_broadcast_f32x4(_mm_loadu_ps(slots.cast()));
        all = _mm512_mask_broadcast_f32x4(all, 0x00f0, _mm_loadu_ps(slots.wrapping_add(step).cast()));
        all = _mm512_mask_broadcast_f32x4(all, 0x0f00, _mm_loadu_ps(slots.wrapping_add(2 * step).cast()));
        _mm512_mask_broadcast_f32x4(all, 0xf000, _mm_loadu_ps(slots.wrapping_add(3 * step).cast()))
    }
}
