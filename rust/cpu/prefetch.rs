//! Asks for keys and values some way ahead of their use.
//!
//! Blocks are scattered over memory, so that the processor does not foresee the next one; but the tables say where it
//! is. A thread that computes the pieces of a job moves one `Prefetch` along with its reads, through all of them, so
//! that the first keys of a piece are on their way while the piece before it is computed. `few_rows` and `tile_direct` ask
//! for one line as they use one (`ahead`), the rest of attention for some slots at a time (`advance`); `norm` and
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
pub(super) const LEAD_SLOTS: usize = 256;

/// Lines that are handed out at a time, to be asked for one by one.
pub(super) const AHEAD_LINES: usize = 16;

/// Slots that a caller of `ahead` reads in one go.
const AHEAD_SLOTS: usize = 16;

/// Asks for some bytes: for one cache line in as many bytes, so that the last one may be missed where the first byte does
/// not begin one.
#[inline(always)]
pub(super) fn prefetch_bytes<S: Simd>(simd: S, address: *const u8, num_bytes: usize) {
    for byte in (0..num_bytes).step_by(CACHE_LINE_BYTES) {
        simd.prefetch(address.wrapping_add(byte));
    }
}

/// Some slots of one block.
struct Run {
    address: *const u8,
    num_slots: usize,
    /// Bytes from a slot to the next.
    stride: usize,
    /// Bytes of a slot.
    num_bytes: usize,
}

impl Run {
    /// Asks for them.
    #[inline(always)]
    fn ask<S: Simd>(&self, simd: S) {
        if self.stride == self.num_bytes {
            return prefetch_bytes(simd, self.address, self.num_slots * self.num_bytes);
        }
        for slot in 0..self.num_slots {
            prefetch_bytes(
                simd,
                self.address.wrapping_add(slot * self.stride),
                self.num_bytes,
            );
        }
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
    /// What `ahead` has not handed out of sixteen slots: the next lines, their end, and how many times it is still called
    /// for them.
    lines: *const u8,
    end: *const u8,
    num_calls: usize,
}

impl<'a> Prefetch<'a> {
    /// Begins with the first piece.
    #[inline(always)]
    pub(super) fn new<S: Simd>(
        simd: S,
        plan: &'a Plan,
        caches: [&'a CacheView; 2],
        pieces: &'a [Piece],
        lead_slots: usize,
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
            lines: std::ptr::null(),
            end: std::ptr::null(),
            num_calls: 0,
        };
        prefetch.advance(simd, lead_slots);
        prefetch
    }

    /// Asks for the next slots, if there are any.
    #[inline(always)]
    pub(super) fn advance<S: Simd>(&mut self, simd: S, num_slots: usize) {
        let mut wanted = num_slots;
        while wanted > 0 {
            let Some(run) = self.next_slots(wanted) else {
                return;
            };
            run.ask(simd);
            wanted -= run.num_slots;
        }
    }

    /// The next `AHEAD_LINES` lines, for the caller to ask for one by one among its arithmetic. A caller reads sixteen
    /// slots, or as many of them as are seen, in steps of so many lines, and calls once in each. Where there are none, or
    /// fewer, those are asked for here, and the answer is `here`, lines that the caller is about to read.
    #[inline(always)]
    pub(super) fn ahead<S: Simd>(&mut self, simd: S, here: *const u8) -> *const u8 {
        if self.num_calls == 0 {
            self.open(simd);
        }
        self.num_calls = self.num_calls.saturating_sub(1);
        let lines = self.lines;
        self.lines = lines.wrapping_add(AHEAD_LINES * CACHE_LINE_BYTES);
        if self.lines <= self.end {
            return lines;
        }
        self.ask_rest(simd, lines);
        here
    }

    /// Asks for the last lines of a run, fewer than `AHEAD_LINES`.
    #[cold]
    fn ask_rest<S: Simd>(&self, simd: S, lines: *const u8) {
        prefetch_bytes(simd, lines, (self.end as usize).saturating_sub(lines as usize));
    }

    /// Turns to the next sixteen slots for `ahead`.
    #[inline(never)]
    fn open<S: Simd>(&mut self, simd: S) {
        self.end = std::ptr::null();
        let Some(run) = self.next_slots(AHEAD_SLOTS) else {
            return;
        };
        // At the end of what is seen a caller goes on as if there were sixteen slots, but not at the end of a block.
        let first = self.left.start - run.num_slots;
        let num_slots = if self.left.is_empty() {
            AHEAD_SLOTS - first % AHEAD_SLOTS
        } else {
            run.num_slots
        };
        self.num_calls = (num_slots * run.num_bytes).div_ceil(AHEAD_LINES * CACHE_LINE_BYTES);
        if run.stride == run.num_bytes {
            self.lines = run.address;
            self.end = run.address.wrapping_add(run.num_slots * run.num_bytes);
        } else {
            run.ask(simd);
        }
    }

    /// Takes the next slots of one block, at most so many.
    #[inline(always)]
    fn next_slots(&mut self, max_slots: usize) -> Option<Run> {
        if self.left.is_empty() && !self.next_range() {
            return None;
        }
        let cache = self.caches[self.cache];
        let offset = self.left.start % cache.block_size;
        let block = self.table[self.left.start / cache.block_size];
        let block = usize::try_from(block).expect("checked: no block id is negative");
        let num_slots = max_slots.min(self.left.len()).min(cache.block_size - offset);
        self.left.start += num_slots;
        Some(Run {
            address: cache.row(block, self.kv_head, offset),
            num_slots,
            stride: cache.slot_stride * cache.dtype.size(),
            num_bytes: cache.head_dim * cache.dtype.size(),
        })
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
