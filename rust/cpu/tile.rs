//! Attention of a tile of queries: the arithmetic, in one fixed order.
//!
//! A tile is a few tokens that read the same blocks (`plan`) with the query heads that share a key head: its rows are
//! (token, head), tokens first. The keys are cut at multiples of `SPLIT_LEN` positions. For one row and one split:
//!
//! ```text
//! score[j] = sum over d of query[d] * key[j][d]     d ascending, one accumulator   (query times scale * log2 e)
//! weight[j] = 2^(score[j] - largest score)
//! total    = sum over j of weight[j]                j ascending in lanes j mod 16, then halves of lanes
//! value[d] = sum over j of weight[j] * value[j][d]  j ascending, one accumulator
//! ```
//!
//! and a row folds its splits in ascending order. Nothing in it depends on how many rows a tile has, on which of them
//! are computed together, or on which thread computes which split: so a token gets the same bits as a decode, in any
//! chunk of its prompt and in any batch. Tiles only decide what is loaded once: keys and values are widened once for
//! all rows of a tile, keys transposed to `[head_dim][16 keys]`, such that sixteen scores are one vector (`tile_loops`
//! does so in memory, `tile_direct` in registers).
//!
//! Slots that a row may not see are never multiplied, not even by zero: their contents may be NaN. Those beyond the
//! tile's last position are not read at all.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::element::{load_row, store_row};
use super::isa::{AlignedBuffer, LANES, Simd};
use super::plan::TileToken;
use super::prefetch::Prefetch;
use super::tensor::{CacheView, RowsView};
#[cfg(target_arch = "x86_64")]
use super::tile_amx;
use super::tile_direct::{self, ScoreKeys, WeighValues};
use super::tile_loops::{
    KEY_TILE, ROW_TILE, SPLIT_LEN, Slots, pack_keys, pack_values, padded, partial_row_len, score_groups,
    soften, vector_at, vector_at_mut, weigh,
};

/// Rows up to which values in f32 are read where they are.
const MAX_ROWS_IN_PLACE: usize = 8;

/// The work on one tile.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tile<'a> {
    /// `[T, H, D]`
    pub(crate) query: RowsView,
    /// `[T, H, D]`
    pub(crate) out: RowsView,
    /// Keys of all sequences.
    pub(crate) key_cache: CacheView,
    /// Values of all sequences.
    pub(crate) value_cache: CacheView,
    /// The tokens, in ascending order of what they see.
    pub(crate) tokens: &'a [TileToken],
    /// The blocks that they read.
    pub(crate) table: &'a [i32],
    /// The key head.
    pub(crate) kv_head: usize,
    /// Query heads that share the key head.
    pub(crate) group_size: usize,
    /// Factor on the scores.
    pub(crate) scale: f32,
}

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(crate) struct Scratch {
    /// `[rows][head_dim]`, scaled.
    query: AlignedBuffer,
    /// `[KEY_TILE / 16][head_dim][16]`
    keys: AlignedBuffer,
    /// `[KEY_TILE][padded head_dim]`
    values: AlignedBuffer,
    /// `[rows][SPLIT_LEN]`, scores and then weights.
    scores: AlignedBuffer,
    /// What the arithmetic on matrix tiles needs instead.
    #[cfg(target_arch = "x86_64")]
    pub(super) matrices: tile_amx::Matrices,
    /// Partial results of one split.
    pub(crate) split: AlignedBuffer,
    /// Partial results of the splits before it.
    pub(crate) folded: AlignedBuffer,
}

impl Tile<'_> {
    pub(super) fn head_dim(&self) -> usize {
        self.query.head_dim
    }

    /// Rows of the tile.
    pub(crate) fn num_rows(&self) -> usize {
        self.tokens.len() * self.group_size
    }

    /// Numbers that the partial results of a split take.
    pub(crate) fn partial_len(&self) -> usize {
        self.num_rows() * partial_row_len(self.head_dim())
    }

    /// Positions of a split that a row sees. It does not fall from a row to the next.
    #[inline(always)]
    pub(super) fn visible(&self, row: usize, split: usize) -> usize {
        let visible = self.tokens[row / self.group_size].visible;
        visible.saturating_sub(split * SPLIT_LEN).min(SPLIT_LEN)
    }

    /// Whether it reads keys and values straight from the cache, since copies would pay only if more rows read them.
    fn is_direct<S: Simd>(&self) -> bool {
        self.tokens.len() == 1 && tile_direct::suits::<S>(self.group_size)
    }

    /// The slots of the sequence from a position on.
    fn slots<'c>(&'c self, cache: &'c CacheView, position: usize) -> Slots<'c> {
        Slots::new(cache, self.table, self.kv_head, position)
    }

    /// Token of the step and query head of a row.
    pub(super) fn place(&self, row: usize) -> (usize, usize) {
        let token = self.tokens[row / self.group_size].token;
        (token, self.kv_head * self.group_size + row % self.group_size)
    }

    /// Reads the queries. To be called before the tile's splits are computed with the same scratch.
    ///
    /// # Safety
    /// The views are valid and the batch was checked against them.
    #[inline(always)]
    pub(crate) unsafe fn load_queries<S: Simd>(&self, simd: S, scratch: &mut Scratch) {
        #[cfg(target_arch = "x86_64")]
        if tile_amx::suits(simd, &self.query, &self.key_cache).is_some() {
            // SAFETY: passed on.
            return unsafe { tile_amx::load_queries(self, &mut scratch.matrices) };
        }
        let (rows, head_dim) = (self.num_rows(), self.head_dim());
        scratch.query.reserve(rows * head_dim);
        scratch.scores.reserve(rows * SPLIT_LEN);
        scratch.keys.reserve(KEY_TILE * head_dim);
        scratch.values.reserve(KEY_TILE * padded(head_dim));
        let factor = self.scale * std::f32::consts::LOG2_E;
        for (row, query) in scratch
            .query
            .slice(0..rows * head_dim)
            .chunks_exact_mut(head_dim)
            .enumerate()
        {
            let (token, head) = self.place(row);
            // SAFETY: the place is within the view, for which the caller vouches.
            unsafe { load_row(self.query.dtype, self.query.row(token, head), query) };
            for element in query {
                *element *= factor;
            }
        }
    }

    /// Computes one split into `partial`. Rows that see nothing of it are marked by a total of zero.
    ///
    /// # Safety
    /// As `load_queries`, which was called with this scratch.
    #[inline(always)]
    pub(crate) unsafe fn compute_split<S: Simd>(
        &self,
        simd: S,
        scratch: &mut Scratch,
        prefetch: &mut Prefetch<'_>,
        split: usize,
        partial: &mut [f32],
    ) {
        #[cfg(target_arch = "x86_64")]
        if let Some(amx) = tile_amx::suits(simd, &self.query, &self.key_cache) {
            // SAFETY: passed on.
            return unsafe {
                tile_amx::compute_split(amx, self, &mut scratch.matrices, prefetch, split, partial);
            };
        }
        let (rows, row_len) = (self.num_rows(), partial_row_len(self.head_dim()));
        let first_row = (0..rows)
            .step_by(self.group_size)
            .find(|&row| self.visible(row, split) > 0);
        let first_row = first_row.unwrap_or(rows);
        partial.fill(0.0);
        // SAFETY: passed on.
        unsafe { self.compute_scores(simd, scratch, prefetch, split, first_row) };
        let scores = scratch.scores.slice(0..rows * SPLIT_LEN);
        for (row, weights) in scores.chunks_exact_mut(SPLIT_LEN).enumerate().skip(first_row) {
            let (largest, total) = soften(simd, weights, self.visible(row, split));
            let state = &mut partial[(row + 1) * row_len - LANES..];
            state[0] = largest;
            state[1] = total;
        }
        // SAFETY: passed on.
        unsafe { self.sum_values(simd, scratch, prefetch, (split, first_row), partial) };
    }

    /// Fills the scores of every row from `first_row` on.
    #[inline(always)]
    unsafe fn compute_scores<S: Simd>(
        &self,
        simd: S,
        scratch: &mut Scratch,
        prefetch: &mut Prefetch<'_>,
        split: usize,
        first_row: usize,
    ) {
        let (rows, head_dim) = (self.num_rows(), self.head_dim());
        let num_keys = self.visible(rows - 1, split);
        let query = scratch.query.slice(0..rows * head_dim);
        let scores = scratch.scores.slice(0..rows * SPLIT_LEN);
        let keys = scratch.keys.slice(0..KEY_TILE * head_dim);
        let start = split * SPLIT_LEN;
        let mut slots = self.slots(&self.key_cache, start);
        if self.is_direct::<S>() {
            return simd.run(ScoreKeys {
                slots,
                num_keys,
                prefetch,
                query,
                scores,
            });
        }
        for tile_start in (0..num_keys).step_by(KEY_TILE) {
            let tile_len = KEY_TILE.min(num_keys - tile_start);
            // SAFETY: the caller vouches for the cache; the positions are below the sequence's length.
            unsafe { pack_keys(simd, &mut slots, tile_len, prefetch, keys) };
            let groups = tile_len.div_ceil(LANES);
            let mut row = first_row;
            while row < rows {
                let count = ROW_TILE.min(rows - row);
                // Rows that end before this tile would compute scores that nobody reads.
                if self.visible(row + count - 1, split) > tile_start {
                    let query = &query[row * head_dim..(row + count) * head_dim];
                    let scores = &mut scores[row * SPLIT_LEN + tile_start..(row + count) * SPLIT_LEN];
                    let whole = groups - groups % S::TILE_VECTORS;
                    let (wide, narrow) = keys[..groups * head_dim * LANES].split_at(whole * head_dim * LANES);
                    match S::TILE_VECTORS {
                        4 => score_groups::<S, 4>(simd, count, query, wide, scores),
                        _ => score_groups::<S, 1>(simd, count, query, wide, scores),
                    }
                    score_groups::<S, 1>(simd, count, query, narrow, &mut scores[whole * LANES..]);
                }
                row += count;
            }
        }
    }

    /// Adds up the weighted values of every row from `first_row` on.
    #[inline(always)]
    unsafe fn sum_values<S: Simd>(
        &self,
        simd: S,
        scratch: &mut Scratch,
        prefetch: &mut Prefetch<'_>,
        (split, first_row): (usize, usize),
        partial: &mut [f32],
    ) {
        let (rows, width) = (self.num_rows(), padded(self.head_dim()));
        let row_len = partial_row_len(self.head_dim());
        let num_keys = self.visible(rows - 1, split);
        let weights = scratch.scores.slice(0..rows * SPLIT_LEN);
        let packed = scratch.values.slice(0..KEY_TILE * width);
        let start = split * SPLIT_LEN;
        let mut slots = self.slots(&self.value_cache, start);
        if self.is_direct::<S>() {
            return simd.run(WeighValues {
                slots,
                num_keys,
                prefetch,
                weights,
                sums: partial,
            });
        }
        // Copies would pay only if more rows read them.
        let in_place = rows <= MAX_ROWS_IN_PLACE && slots.are_f32_rows();
        let mut tile_start = 0;
        while tile_start < num_keys {
            let max_len = KEY_TILE.min(num_keys - tile_start);
            // SAFETY: the caller vouches for the cache; the positions are below the sequence's length.
            let values = unsafe {
                if in_place {
                    let run = slots.next_run(max_len);
                    prefetch.advance(simd, run.len() / width);
                    run
                } else {
                    pack_values(simd, &mut slots, max_len, prefetch, packed);
                    &packed[..max_len * width]
                }
            };
            let tile_len = values.len() / width;
            let mut row = first_row;
            while row < rows {
                let count = ROW_TILE.min(rows - row);
                // The keys that all of these rows see, then for each row the few that it sees beyond them.
                let in_tile = |row: usize| self.visible(row, split).saturating_sub(tile_start).min(tile_len);
                let common = in_tile(row);
                let sums = &mut partial[row * row_len..(row + count) * row_len];
                let weights = &weights[row * SPLIT_LEN + tile_start..(row + count) * SPLIT_LEN];
                weigh(simd, count, weights, &values[..common * width], sums, width);
                for extra in 1..count {
                    let weights = &weights[extra * SPLIT_LEN + common..];
                    let values = &values[common * width..in_tile(row + extra).max(common) * width];
                    weigh(
                        simd,
                        1,
                        weights,
                        values,
                        &mut sums[extra * row_len..(extra + 1) * row_len],
                        width,
                    );
                }
                row += count;
            }
            tile_start += tile_len;
        }
    }

    /// Adds the partial results of the next split to those of the splits before it, which begin as zeros.
    #[inline(always)]
    pub(crate) fn fold<S: Simd>(&self, simd: S, folded: &mut [f32], partial: &[f32]) {
        let (row_len, width) = (partial_row_len(self.head_dim()), padded(self.head_dim()));
        let blocks = folded
            .chunks_mut(LANES * row_len)
            .zip(partial.chunks(LANES * row_len));
        for (folded, partial) in blocks {
            // What the sums of sixteen rows are multiplied by, at a time.
            let mut factors = [[0.0; LANES]; 2];
            let rows = folded.chunks_exact(row_len).zip(partial.chunks_exact(row_len));
            for (idx, (folded, partial)) in rows.enumerate() {
                let largest_of_both = larger(folded[width], partial[width]);
                factors[0][idx] = folded[width] - largest_of_both;
                factors[1][idx] = partial[width] - largest_of_both;
            }
            for factors in &mut factors {
                let powers = simd.exp2(simd.load(factors));
                simd.store(powers, factors);
            }
            let rows = folded
                .chunks_exact_mut(row_len)
                .zip(partial.chunks_exact(row_len));
            for (idx, (folded, partial)) in rows.enumerate() {
                let total = partial[width + 1];
                if total == 0.0 {
                    continue;
                }
                if folded[width + 1] == 0.0 {
                    folded.copy_from_slice(partial);
                    continue;
                }
                let [before, after] = [simd.splat(factors[0][idx]), simd.splat(factors[1][idx])];
                let largest_of_both = larger(folded[width], partial[width]);
                for start in (0..width).step_by(LANES) {
                    let scaled = simd.mul(simd.load(vector_at(folded, start)), before);
                    let sum = simd.mul_add(simd.load(vector_at(partial, start)), after, scaled);
                    simd.store(sum, vector_at_mut(folded, start));
                }
                let scaled = simd.mul(simd.splat(folded[width + 1]), before);
                let total = simd.mul_add(simd.splat(total), after, scaled);
                simd.store(total, vector_at_mut(folded, width));
                folded[width] = largest_of_both;
            }
        }
    }

    /// Divides by the totals and writes the result.
    ///
    /// # Safety
    /// As `load_queries`; nobody else writes the rows of this tile.
    #[inline(always)]
    pub(crate) unsafe fn write_result(&self, folded: &mut [f32]) {
        let (row_len, width) = (partial_row_len(self.head_dim()), padded(self.head_dim()));
        for (row, folded) in folded.chunks_exact_mut(row_len).enumerate() {
            let total = folded[width + 1];
            let values = &mut folded[..self.head_dim()];
            for value in values.iter_mut() {
                *value /= total;
            }
            let (token, head) = self.place(row);
            // SAFETY: the place is within the view, for which the caller vouches.
            unsafe { store_row(self.out.dtype, values, self.out.row(token, head)) };
        }
    }
}

/// The larger of two numbers; the first one where the second one is NaN.
#[inline(always)]
fn larger(a: f32, b: f32) -> f32 {
    if b > a { b } else { a }
}
