//! Attention of a tile of queries on the matrix tiles of AMX: the arithmetic of bf16 queries and caches.
//!
//! The definition is that of `tile`, with bf16 factors and other orders, as fixed as those:
//!
//! ```text
//! score[j]  = sum over d of query[d] * key[j][d]                   32 elements an instruction, d ascending
//! weight[j] = 2^((score[j] - largest score) * scale * log2 e)      rounded to bf16 (`softmax_amx`)
//! total     = sum over j of weight[j]                              32 positions an instruction, j ascending
//! value[d]  = sum over j of weight[j] * value[j][d]                the same
//! ```
//!
//! Rows are taken in groups of sixteen (`prompt_amx`). Where there are few, as in the decodes of one sequence,
//! which are as many rows as query heads share a key head, nothing is packed, and vectors multiply the values, with the
//! same bits (`few_rows`). A row's numbers do not depend on the others in its matrices: a position that it does not see
//! has a weight of zero, and adds zero. Only zero times infinity or NaN would not be zero; where a row of the tile sees
//! such a value and another one does not, the tokens of the tile are computed one by one. Slots behind what the tile sees
//! may be read, but only into scores that nobody looks at.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::amx::{Amx, DEPTH, Shapes, TILE_LEN};
use super::element::Dtype;
use super::few_rows;
use super::isa::{AlignedBuffer, Simd};
use super::prefetch::{LEAD_SLOTS, Prefetch};
use super::prompt_amx;
use super::tensor::{CacheView, RowsView};
use super::tile::Tile;
use super::tile_loops::{SPLIT_LEN, Slots, partial_row_len};
use super::x86::Flushing;

/// f32, or pairs of bf16, of a tile.
pub(super) const TILE_ELEMENTS: usize = TILE_LEN * TILE_LEN;

/// A tile of ones, as bf16.
pub(super) static ONES: [u16; 2 * TILE_ELEMENTS] = [0x3f80; 2 * TILE_ELEMENTS];

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Matrices {
    /// What tiles with few rows need instead of all others.
    few_rows: few_rows::Buffers,
    /// `[rows / 16][head_dim / 32][16 rows][32 elements]`
    pub(super) queries: AlignedBuffer,
    /// `[SPLIT_LEN / 16][head_dim / 32][16 pairs][16 keys]`
    pub(super) keys: AlignedBuffer,
    /// `[SPLIT_LEN / 16][16 rows][16 keys]`
    pub(super) scores: AlignedBuffer,
    /// `[SPLIT_LEN / 32][16 rows][32 keys]`
    pub(super) weights: AlignedBuffer,
    /// `[SPLIT_LEN / 32][head_dim / 16][16 pairs][16 columns]`
    pub(super) values: AlignedBuffer,
    /// Rows of partial results.
    pub(super) sums: AlignedBuffer,
}

/// The proof of the instructions, if a tile has the types and sizes for them.
#[inline(always)]
pub(super) fn suits<S: Simd>(simd: S, query: &RowsView, cache: &CacheView) -> Option<Amx> {
    let bf16 = query.dtype == Dtype::Bf16 && cache.dtype == Dtype::Bf16;
    let whole = query.head_dim.is_multiple_of(DEPTH) && cache.block_size.is_multiple_of(TILE_LEN);
    simd.amx().filter(|_| bf16 && whole)
}

/// Slots between what is read and what is asked for, in a job whose tiles have at most so many rows: vectors want few
/// bytes, whatever a slot takes.
pub(super) fn lead_slots(cache: &CacheView, most_rows: usize) -> usize {
    if most_rows <= few_rows::MAX_ROWS {
        few_rows::LEAD_BYTES / (cache.head_dim * cache.dtype.size())
    } else {
        LEAD_SLOTS
    }
}

/// What a thread has set up: matrix tiles have the largest size, and small numbers count as zero in vectors as they do in
/// them. Setting that takes as long as some tens of keys.
pub(super) struct Configured {
    amx: Amx,
    _flushing: Flushing,
}

impl Configured {
    /// Begins.
    pub(super) fn new(amx: Amx) -> Self {
        amx.configure(&Shapes::FULL);
        Self {
            amx,
            _flushing: Flushing::new(),
        }
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        self.amx.release();
    }
}

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits.
#[inline(always)]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, matrices: &mut Matrices) {
    // SAFETY: passed on.
    unsafe {
        if tile.num_rows() <= few_rows::MAX_ROWS {
            few_rows::load_queries(tile, &mut matrices.few_rows);
        } else {
            prompt_amx::load_queries(tile, matrices);
        }
    }
}

/// Computes one split into `partial`. Rows that see nothing of it are marked by a total of zero.
///
/// # Safety
/// As `Tile::compute_split`; the tile suits.
#[inline(always)]
pub(super) unsafe fn compute_split(
    amx: Amx,
    tile: &Tile<'_>,
    matrices: &mut Matrices,
    prefetch: &mut Prefetch<'_>,
    split: usize,
    partial: &mut [f32],
) {
    let num_keys = tile.visible(tile.num_rows() - 1, split);
    let unshared = tile.visible(0, split)..num_keys;
    // SAFETY: passed on; these are positions that some row sees.
    unsafe {
        if tile.tokens.len() > 1 && !all_finite(tile, split, unshared) {
            return compute_tokens(amx, tile, matrices, prefetch, split, partial);
        }
        if tile.num_rows() <= few_rows::MAX_ROWS {
            let mut split = few_rows::Split {
                amx,
                tile,
                buffers: &mut matrices.few_rows,
                prefetch,
                idx: split,
            };
            return split.compute(partial);
        }
        let mut split = Split {
            amx,
            tile,
            matrices,
            prefetch,
            idx: split,
            num_keys,
        };
        split.compute(partial);
    }
}

/// Computes one split token by token.
#[cold]
unsafe fn compute_tokens(
    amx: Amx,
    tile: &Tile<'_>,
    matrices: &mut Matrices,
    prefetch: &mut Prefetch<'_>,
    split: usize,
    partial: &mut [f32],
) {
    let len = tile.group_size * partial_row_len(tile.head_dim());
    for (token, partial) in tile.tokens.chunks(1).zip(partial.chunks_exact_mut(len)) {
        let tile = Tile {
            tokens: token,
            ..*tile
        };
        // SAFETY: the caller vouches for the views.
        unsafe {
            load_queries(&tile, matrices);
            compute_split(amx, &tile, matrices, prefetch, split, partial);
        }
    }
    // SAFETY: as above.
    unsafe { load_queries(tile, matrices) };
}

/// Whether the values at some positions of a split are numbers.
#[inline(always)]
unsafe fn all_finite(tile: &Tile<'_>, split: usize, positions: Range<usize>) -> bool {
    const EXPONENT: u16 = 0x7f80;
    let start = split * SPLIT_LEN + positions.start;
    let mut slots = Slots::new(&tile.value_cache, tile.table, tile.kv_head, start);
    // Not a test of each: without a way out early the loop becomes one of vectors.
    let largest = positions.fold(0, |largest, _| {
        let row = slots.next_row().expect("checked: the table holds the sequence");
        // SAFETY: the caller vouches for the cache; the row is aligned to its type.
        #[expect(clippy::cast_ptr_alignment, reason = "the caller vouches for the alignment")]
        let row = unsafe { std::slice::from_raw_parts(row.cast::<u16>(), tile.head_dim()) };
        row.iter()
            .fold(largest, |largest: u16, bits| largest.max(bits & EXPONENT))
    });
    largest < EXPONENT
}

/// One split of a tile, whose queries are loaded.
pub(super) struct Split<'k, 'a, 'p> {
    pub(super) amx: Amx,
    pub(super) tile: &'k Tile<'a>,
    pub(super) matrices: &'k mut Matrices,
    pub(super) prefetch: &'k mut Prefetch<'p>,
    /// Its number.
    pub(super) idx: usize,
    /// Positions of it that the tile sees.
    pub(super) num_keys: usize,
}

impl Split<'_, '_, '_> {
    /// Positions that the rows of a group see; the last row stands for those that are missing.
    #[inline(always)]
    pub(super) fn visible(&self, group: usize) -> [usize; TILE_LEN] {
        let last = self.tile.num_rows() - 1;
        std::array::from_fn(|row| self.tile.visible(last.min(group * TILE_LEN + row), self.idx))
    }
}
