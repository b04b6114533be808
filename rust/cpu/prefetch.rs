//! Asks for keys and values some way ahead of their use.
//!
//! Blocks are scattered over memory, so that the processor does not foresee the next one; but the tables say where it
//! is. A thread that computes the pieces of a job moves one `Prefetch` along with its reads, through all of them, so
//! that the first keys of a piece are on their way while the piece before it is computed. Used by attention; `norm` and
//! `rope_cache` ask for their rows with `prefetch_bytes`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::isa::Simd;
use super::plan::{Piece, Plan};
use super::tensor::CacheView;
use super::tile_loops::SPLIT_LEN;
use crate::memory::CACHE_LINE_BYTES;

/// Slots between what is read and what is asked for when a job begins.
const LEAD_SLOTS: usize = 256;

/// Asks for some bytes: for one cache line in as many bytes, so that the last one may be missed where the first byte does
/// not begin one.
#[inline(always)]
pub(super) fn prefetch_bytes<S: Simd>(simd: S, address: *const u8, num_bytes: usize) {
    for byte in (0..num_bytes).step_by(CACHE_LINE_BYTES) {
        simd.prefetch(address.wrapping_add(byte));
    }
}

/// The reads of a job that have not been asked for: split by split the keys, then the values.
pub(super) struct Prefetch<'a> {
    plan: &'a Plan,
    /// Keys, values.
    caches: [&'a CacheView; 2],
    /// Those behind the present one.
    pieces: std::slice::Iter<'a, Piece>,
    /// Of the present piece, those behind the present one.
    splits: Range<usize>,
    /// Positions of its last token and before.
    num_visible: usize,
    table: &'a [i32],
    kv_head: usize,
    /// Positions of the present split.
    positions: Range<usize>,
    /// Those of them that are left in the present cache.
    left: Range<usize>,
    /// 0: the keys, 1: the values.
    cache: usize,
}

impl<'a> Prefetch<'a> {
    /// Begins with the first piece.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        simd: S,
        plan: &'a Plan,
        caches: [&'a CacheView; 2],
        pieces: &'a [Piece],
    ) -> Self {
        let mut prefetch = Self {
            plan,
            caches,
            pieces: pieces.iter(),
            splits: 0..0,
            num_visible: 0,
            table: &[],
            kv_head: 0,
            positions: 0..0,
            left: 0..0,
            cache: 1,
        };
        prefetch.advance(simd, LEAD_SLOTS);
        prefetch
    }

    /// Asks for the next slots, if there are any.
    #[inline(always)]
    pub(super) fn advance<S: Simd>(&mut self, simd: S, num_slots: usize) {
        let mut wanted = num_slots;
        while wanted > 0 {
            if self.left.is_empty() && !self.next_range() {
                return;
            }
            let cache = self.caches[self.cache];
            let offset = self.left.start % cache.block_size;
            let block = self.table[self.left.start / cache.block_size];
            let block = usize::try_from(block).expect("checked: no block id is negative");
            let count = wanted.min(self.left.len()).min(cache.block_size - offset);
            let slots = cache.row(block, self.kv_head, offset);
            let (stride, num_bytes) = (
                cache.slot_stride * cache.dtype.size(),
                cache.head_dim * cache.dtype.size(),
            );
            // Slots without a gap are one run.
            let (runs, run_bytes) = if stride == num_bytes {
                (1, count * num_bytes)
            } else {
                (count, num_bytes)
            };
            for run in 0..runs {
                prefetch_bytes(simd, slots.wrapping_add(run * stride), run_bytes);
            }
            self.left.start += count;
            wanted -= count;
        }
    }

    /// Turns to the values of the split, to the next split or to the next piece; false if there is none.
    fn next_range(&mut self) -> bool {
        if self.cache == 0 {
            self.cache = 1;
            self.left = self.positions.clone();
            return true;
        }
        while self.splits.is_empty() {
            let Some(piece) = self.pieces.next() else {
                return false;
            };
            let tile = &self.plan.tiles[piece.tile];
            self.splits = piece.splits.clone();
            self.num_visible = self.plan.num_visible(tile);
            self.table = &self.plan.block_ids[tile.table.clone()];
            self.kv_head = piece.kv_head;
        }
        let start = self.splits.start * SPLIT_LEN;
        self.splits.start += 1;
        self.positions = start..self.num_visible.min(start + SPLIT_LEN);
        self.left = self.positions.clone();
        self.cache = 0;
        true
    }
}
