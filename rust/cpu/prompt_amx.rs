//! Attention of tiles with more rows than `few_rows` takes: prompts, chunks of them, and decodes or chunks that share a
//! prefix.
//!
//! The arithmetic is that of `tile_amx`, bit by bit. So many rows share a split's keys and values that both are packed
//! once for all of them, the keys transposed: scores then come row by row, as the weights are multiplied.
//!
//! Rows are taken in groups of sixteen. While vectors turn the scores of a group into weights, tiles multiply: the scores of
//! the next group take the place of those that are done, and the weights are mixed as they come. Keys and values are loaded
//! past the nearest cache, which holds the scores and weights of a group. Near an instruction on tiles, the processor
//! multiplies only half as many vectors as otherwise; so it does not pay to wait with them until the tiles are done.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{_mm512_loadu_ps, _mm512_storeu_ps};
use std::ops::Range;

use super::amx::{DEPTH, ROW_BYTES, TILE_LEN};
use super::isa::LANES;
use super::keys_amx::pack_keys;
use super::softmax_amx::{largest_scores, soften};
use super::tile::Tile;
use super::tile_amx::{Matrices, ONES, Split, TILE_ELEMENTS};
use super::tile_loops::{SPLIT_LEN, partial_row_len};
use super::values_amx::{pack_values, sixteen_slots};
use super::x86::Avx512;

/// Tiles that add up values, 0 to 3, each a tile of columns: those are taken four at a time.
const NUM_SUMS: usize = 4;

/// The tile that adds up weights.
const TOTALS: usize = 4;

/// The tile that adds up scores.
const SCORES: usize = 5;

/// The tiles that are multiplied.
const LEFT: usize = 6;
const RIGHT: usize = 7;

/// Tiles take turns with vectors so many times in a chunk of `DEPTH` keys; the rows in between.
const NUM_TURNS: usize = 4;
const TURN_ROWS: usize = TILE_LEN / NUM_TURNS;

/// Positions whose keys or values are packed, and as many asked for ahead, at a time.
const PACK_STEP: usize = 64;

/// Numbers that the scores of a group against a chunk of keys take: two tiles.
const CHUNK_SCORES: usize = DEPTH * TILE_LEN;

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits.
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, matrices: &mut Matrices) {
    let (num_rows, head_dim) = (tile.num_rows(), tile.head_dim());
    let chunks = head_dim / DEPTH;
    let len = num_rows.next_multiple_of(TILE_LEN) * chunks * LANES;
    matrices.queries.reserve(len);
    matrices.keys.reserve(SPLIT_LEN / 2 * head_dim);
    matrices.values.reserve(SPLIT_LEN / 2 * head_dim);
    matrices.scores.reserve(SPLIT_LEN * TILE_LEN);
    matrices.weights.reserve(SPLIT_LEN / 2 * TILE_LEN);
    matrices.sums.reserve(TILE_LEN * partial_row_len(head_dim));
    let queries = matrices.queries.slice(0..len).as_chunks_mut::<LANES>().0;
    for row in 0..num_rows {
        let (token, head) = tile.place(row);
        let source = tile.query.row(token, head);
        let place = row / TILE_LEN * chunks * TILE_LEN + row % TILE_LEN;
        for chunk in 0..chunks {
            let place = &mut queries[place + chunk * TILE_LEN];
            // SAFETY: 32 elements of a row, for which the caller vouches; sixteen numbers.
            unsafe {
                let elements = _mm512_loadu_ps(source.wrapping_add(chunk * ROW_BYTES).cast());
                _mm512_storeu_ps(place.as_mut_ptr(), elements);
            }
        }
    }
}

impl Split<'_, '_, '_> {
    /// Computes the partial results, group by group.
    ///
    /// # Safety
    /// As `Tile::compute_split`; the tile suits, its queries are loaded, and the tiles of AMX have their full shapes.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn compute(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        let row_len = partial_row_len(width);
        let num_groups = self.tile.num_rows().div_ceil(TILE_LEN);
        // SAFETY: passed on.
        unsafe {
            self.pack_all_keys();
            self.pack_all_values();
        }
        // Chunks of keys for which there are scores: those that the group before sees, and later rows see more.
        let mut num_scored = 0;
        for (group, partial) in partial.chunks_mut(TILE_LEN * row_len).enumerate() {
            let visible = self.visible(group);
            let num_chunks = visible[TILE_LEN - 1].div_ceil(DEPTH);
            if num_chunks == 0 {
                for row in partial.chunks_exact_mut(row_len) {
                    row[width + 1] = 0.0;
                }
                continue;
            }
            let next = (group + 1 < num_groups).then_some(group + 1);
            // SAFETY: passed on; the scores are there when they are weighed.
            unsafe {
                for chunk in num_scored..num_chunks {
                    self.score(group, chunk, 0);
                    self.score(group, chunk, 1);
                }
                self.mix(next, num_chunks, &visible, partial);
            }
            num_scored = num_chunks;
        }
    }

    /// Multiplies the queries of a group by one of two tiles of keys of a chunk, into scores `[keys / 16][16 rows][16 keys]`.
    /// Behind the last key there are those of an earlier split, whose scores nobody looks at.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn score(&mut self, group: usize, chunk: usize, half: usize) {
        let amx = self.amx;
        let len = self.tile.head_dim() / DEPTH * TILE_ELEMENTS;
        let tile = 2 * chunk + half;
        let queries = self.matrices.queries.slice(group * len..(group + 1) * len);
        let keys = self.matrices.keys.slice(tile * len..(tile + 1) * len);
        let scores = self
            .matrices
            .scores
            .slice(tile * TILE_ELEMENTS..(tile + 1) * TILE_ELEMENTS);
        let pairs = queries
            .chunks_exact(TILE_ELEMENTS)
            .zip(keys.chunks_exact(TILE_ELEMENTS));
        amx.zero::<SCORES>();
        for (queries, keys) in pairs {
            // SAFETY: tiles of queries and of keys.
            unsafe {
                amx.load::<LEFT>(queries.as_ptr().cast());
                amx.load_past::<RIGHT>(keys.as_ptr().cast());
            }
            amx.multiply::<SCORES, LEFT, RIGHT>();
        }
        // SAFETY: room for a tile.
        unsafe { amx.store::<SCORES>(scores.as_mut_ptr().cast(), ROW_BYTES) };
    }

    /// Turns the scores of a group into weights, multiplies them by the values, and writes rows of partial results; computes
    /// as many scores of the next group. A row that sees nothing gets a total of zero.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn mix(
        &mut self,
        next: Option<usize>,
        num_chunks: usize,
        visible: &[usize; TILE_LEN],
        partial: &mut [f32],
    ) {
        let factor = self.tile.scale * std::f32::consts::LOG2_E;
        let scores = self.matrices.scores.slice(0..num_chunks * CHUNK_SCORES);
        // SAFETY: `amx` proves the instructions.
        let largest = unsafe { largest_scores(scores, visible, factor) };
        self.clear_sums();
        self.amx.zero::<TOTALS>();
        for chunk in 0..=num_chunks {
            for turn in 0..NUM_TURNS {
                if chunk < num_chunks {
                    let rows = turn * TURN_ROWS..(turn + 1) * TURN_ROWS;
                    // SAFETY: as above.
                    unsafe { self.soften_rows(chunk, rows, &largest, factor) };
                }
                if chunk > 0 {
                    // SAFETY: passed on; the chunk before has weights.
                    unsafe { self.take_turn(turn, chunk - 1, next) };
                }
            }
        }
        // SAFETY: passed on; all chunks have weights.
        unsafe { self.write(num_chunks, &largest, partial) };
    }

    /// Turns the scores of some rows of a group against a chunk of keys into weights.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn soften_rows(
        &mut self,
        chunk: usize,
        rows: Range<usize>,
        largest: &[f32; TILE_LEN],
        factor: f32,
    ) {
        let scores = self
            .matrices
            .scores
            .slice(chunk * CHUNK_SCORES..(chunk + 1) * CHUNK_SCORES);
        let (low, high) = scores.as_chunks().0.split_at(TILE_LEN);
        let weights = self
            .matrices
            .weights
            .slice(chunk * TILE_ELEMENTS..(chunk + 1) * TILE_ELEMENTS);
        let weights = &mut weights.as_chunks_mut().0[rows.clone()];
        // SAFETY: `amx` proves the instructions.
        unsafe {
            soften(
                [&low[rows.clone()], &high[rows.clone()]],
                &largest[rows],
                factor,
                weights,
            );
        }
    }

    /// What tiles multiply in one of four turns: two tiles of scores of the next group, in the place of those of a chunk
    /// that has weights, and then that chunk's first columns of values.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn take_turn(&mut self, turn: usize, chunk: usize, next: Option<usize>) {
        // SAFETY: passed on.
        unsafe {
            match (turn, next) {
                (0 | 1, Some(next)) => self.score(next, chunk, turn),
                (0 | 1, None) => {}
                (2, _) => {
                    self.load_weights(chunk);
                    self.add_values::<0>(chunk, 0);
                    self.add_values::<1>(chunk, 0);
                }
                _ => {
                    self.add_values::<2>(chunk, 0);
                    self.add_values::<3>(chunk, 0);
                    self.amx.load::<RIGHT>(ONES.as_ptr().cast());
                    self.amx.multiply::<TOTALS, LEFT, RIGHT>();
                }
            }
        }
    }

    #[inline(always)]
    fn clear_sums(&self) {
        self.amx.zero::<0>();
        self.amx.zero::<1>();
        self.amx.zero::<2>();
        self.amx.zero::<3>();
    }

    /// Loads the weights of a chunk.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn load_weights(&mut self, chunk: usize) {
        let start = chunk * TILE_ELEMENTS;
        let weights = self.matrices.weights.slice(start..start + TILE_ELEMENTS);
        // SAFETY: a tile.
        unsafe { self.amx.load::<LEFT>(weights.as_ptr().cast()) };
    }

    /// Multiplies the weights of a chunk, which are loaded, by the values' tile of columns `first + SUM`, if there is one.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn add_values<const SUM: usize>(&mut self, chunk: usize, first: usize) {
        let num_columns = self.tile.head_dim() / TILE_LEN;
        if first + SUM < num_columns {
            let start = (chunk * num_columns + first + SUM) * TILE_ELEMENTS;
            let values = self.matrices.values.slice(start..start + TILE_ELEMENTS);
            // SAFETY: a tile.
            unsafe { self.amx.load_past::<RIGHT>(values.as_ptr().cast()) };
            self.amx.multiply::<SUM, LEFT, RIGHT>();
        }
    }

    /// Writes rows of partial results, the first columns of which are there; the others follow.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn write(&mut self, num_chunks: usize, largest: &[f32; TILE_LEN], partial: &mut [f32]) {
        let (amx, width) = (self.amx, self.tile.head_dim());
        let row_len = partial_row_len(width);
        let is_whole = partial.len() == TILE_LEN * row_len;
        // A tile has sixteen rows, whether the group has them or not.
        let rows = if is_whole {
            partial.as_mut_ptr()
        } else {
            self.matrices.sums.slice(0..TILE_LEN * row_len).as_mut_ptr()
        };
        let stride = row_len * size_of::<f32>();
        // SAFETY: all columns of the tile are totals, and there is room for sixteen numbers behind those of the head.
        unsafe { amx.store::<TOTALS>(rows.wrapping_add(width).cast(), stride) };
        for first in (0..width / TILE_LEN).step_by(NUM_SUMS) {
            if first > 0 {
                self.clear_sums();
                for chunk in 0..num_chunks {
                    // SAFETY: passed on.
                    unsafe {
                        self.load_weights(chunk);
                        self.add_values::<0>(chunk, first);
                        self.add_values::<1>(chunk, first);
                        self.add_values::<2>(chunk, first);
                        self.add_values::<3>(chunk, first);
                    }
                }
            }
            let place = |idx: usize| rows.wrapping_add((first + idx) * TILE_LEN).cast();
            let num_columns = width / TILE_LEN - first;
            // SAFETY: room for these columns of sixteen rows; there are two at least, as the width is one of whole chunks.
            unsafe {
                amx.store::<0>(place(0), stride);
                amx.store::<1>(place(1), stride);
                if num_columns > 2 {
                    amx.store::<2>(place(2), stride);
                    amx.store::<3>(place(3), stride);
                }
            }
        }
        if !is_whole {
            let len = partial.len();
            partial.copy_from_slice(self.matrices.sums.slice(0..len));
        }
        for (row, largest) in partial.chunks_exact_mut(row_len).zip(largest) {
            row[width] = *largest;
        }
    }

    /// Transposes all keys of the split.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn pack_all_keys(&mut self) {
        let (tile, cache) = (self.tile, &self.tile.key_cache);
        let len = tile.head_dim() / DEPTH * TILE_ELEMENTS;
        let stride = cache.slot_stride * cache.dtype.size();
        let packed = self.matrices.keys.slice(0..SPLIT_LEN / TILE_LEN * len);
        let positions = (0..self.num_keys).step_by(TILE_LEN);
        for (first, packed) in positions.zip(packed.chunks_exact_mut(len)) {
            if first % PACK_STEP == 0 {
                let num_slots = PACK_STEP.min(self.num_keys - first);
                self.prefetch.advance(Avx512::from(self.amx), num_slots);
            }
            let slots = sixteen_slots(tile, cache, self.idx * SPLIT_LEN + first);
            // SAFETY: sixteen slots of one block; `amx` proves the instructions.
            unsafe { pack_keys(slots, stride, packed) };
        }
    }

    /// Interleaves all values of the split.
    ///
    /// # Safety
    /// As `compute`.
    #[inline(always)]
    unsafe fn pack_all_values(&mut self) {
        let width = self.tile.head_dim();
        let packed = self.matrices.values.slice(0..SPLIT_LEN / 2 * width);
        let positions = (0..self.num_keys).step_by(PACK_STEP);
        for (first, packed) in positions.zip(packed.chunks_exact_mut(PACK_STEP / 2 * width)) {
            let positions = first..self.num_keys.min(first + PACK_STEP);
            self.prefetch.advance(Avx512::from(self.amx), positions.len());
            // SAFETY: passed on; `amx` proves the instructions.
            unsafe { pack_values(self.tile, self.idx, positions, packed) };
        }
    }
}
