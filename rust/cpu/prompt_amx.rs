//! Attention of tiles with more rows than a matrix: prompts, chunks of them, and decodes that share a prefix.
//!
//! The arithmetic is that of `tile_amx`, bit by bit. What bounds it is less the products than what passes through the
//! nearest cache, which the keys and values of a split fill: so rows are taken two groups at a time, and a tile of keys
//! or values that is loaded is multiplied twice. The processor does not multiply vectors and tiles at the same time, but
//! a unit that was idle for half a microsecond takes nearly as long to come back; so the totals are added up while
//! weights are computed.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::amx::{DEPTH, ROW_BYTES, TILE_LEN};
use super::softmax_amx::soften;
use super::tile_amx::{ONES, Split, TILE_ELEMENTS, VALUE_STEP, scores_len, weights_len};
use super::tile_loops::{SPLIT_LEN, partial_row_len};
use super::values_amx::{pack_values, restore_order, sixteen_slots};
use super::x86::Avx512;

/// Columns of values that are multiplied at a time, two tiles.
const COLUMNS: usize = 2 * TILE_LEN;

impl Split<'_, '_, '_> {
    /// Computes the partial results, twice R rows at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn compute_pairs<const R: usize>(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        let row_len = partial_row_len(width);
        let num_groups = self.tile.num_rows().div_ceil(R);
        // SAFETY: passed on.
        unsafe { self.pack_all_values() };
        for (pair, partial) in partial.chunks_mut(2 * R * row_len).enumerate() {
            let first = 2 * pair;
            // An odd group out is multiplied twice.
            let groups = [first, (first + 1).min(num_groups - 1)];
            let visible = groups.map(|group| self.visible::<R>(group));
            // Later rows see more.
            let num_keys = visible[1][R - 1];
            if num_keys == 0 {
                for row in partial.chunks_exact_mut(row_len) {
                    row[width + 1] = 0.0;
                }
                continue;
            }
            // SAFETY: passed on; the scores are there when they are weighed, and the weights when they are mixed.
            unsafe {
                self.score_pair::<R>(groups, num_keys);
                for (place, (visible, partial)) in
                    visible.iter().zip(partial.chunks_mut(R * row_len)).enumerate()
                {
                    self.weigh::<R>(place, num_keys, visible, partial);
                }
                self.mix_pair::<R>(num_keys, partial);
            }
        }
    }

    /// Multiplies the keys by the queries of two groups of rows, two tiles of keys at a time.
    #[inline(always)]
    unsafe fn score_pair<const R: usize>(&mut self, groups: [usize; 2], num_keys: usize) {
        let (amx, tile) = (self.amx, self.tile);
        let chunks = tile.head_dim() / DEPTH;
        let len = chunks * TILE_ELEMENTS;
        let queries = groups.map(|group| {
            self.matrices
                .queries
                .slice(group * len..(group + 1) * len)
                .as_ptr()
        });
        let (cache, last) = (&tile.key_cache, (num_keys - 1) / TILE_LEN);
        let stride = cache.slot_stride * cache.dtype.size();
        for first in (0..=last).step_by(2) {
            // Behind the last tile its scores are computed again, where nobody reads them.
            let mut keys = [first, last.min(first + 1)]
                .map(|idx| sixteen_slots(tile, cache, self.idx * SPLIT_LEN + idx * TILE_LEN));
            if groups[0] == 0 {
                let num_slots = (num_keys - first * TILE_LEN).min(2 * TILE_LEN);
                self.prefetch.advance(Avx512::from(amx), num_slots);
            }
            amx.clear();
            for chunk in 0..chunks {
                let queries = queries.map(|queries| queries.wrapping_add(chunk * TILE_ELEMENTS).cast());
                // SAFETY: sixteen slots of one block, and tiles of queries.
                unsafe { amx.add_products_of_pairs(keys, stride, queries) };
                keys = keys.map(|keys| keys.wrapping_add(ROW_BYTES));
            }
            let start = first * TILE_LEN * R;
            let scores = self.matrices.scores.slice(start..2 * scores_len(R));
            let steps = [TILE_LEN * R, scores_len(R)].map(|len| len * size_of::<f32>());
            // The end of every row of a tile, of no use, is overwritten by the next row, which is stored after it.
            // SAFETY: room for two tiles of each group with rows of R numbers, and the end of the last row.
            unsafe { amx.store_pairs(scores.as_mut_ptr().cast(), steps, R * size_of::<f32>()) };
        }
    }

    /// Turns the scores of one of two groups of rows into weights, and writes the largest scores and the totals of
    /// weights into rows of partial results. A row that sees nothing gets a total of zero.
    #[inline(always)]
    unsafe fn weigh<const R: usize>(
        &mut self,
        place: usize,
        num_keys: usize,
        visible: &[usize; R],
        partial: &mut [f32],
    ) {
        let amx = self.amx;
        let padded = num_keys.next_multiple_of(DEPTH);
        let start = place * scores_len(R);
        let scores = self.matrices.scores.slice(start..start + padded * R);
        let start = place * weights_len(R);
        let weights = self.matrices.weights.slice(start..start + padded / 2 * R);
        let tiles = weights.as_ptr();
        let factor = self.tile.scale * std::f32::consts::LOG2_E;
        // A tile late, when the stores to it are over.
        let add = |tile: usize| {
            let weights = tiles.wrapping_add(tile * TILE_LEN * R).cast();
            // SAFETY: a tile of weights, and whatever lies behind its R rows.
            unsafe { amx.add_fifth_product(weights) };
        };
        amx.clear();
        // SAFETY: a tile of ones; `amx` proves the instructions.
        let largest = unsafe {
            amx.load_fifth(ONES.as_ptr().cast());
            soften::<R>(scores, weights, visible, factor, |tile| {
                if tile > 0 {
                    add(tile - 1);
                }
            })
        };
        add(padded / DEPTH - 1);
        let totals = self.matrices.sums.slice(0..TILE_ELEMENTS);
        // SAFETY: room for a tile.
        unsafe { amx.store_fifth(totals.as_mut_ptr().cast(), ROW_BYTES) };
        let width = self.tile.head_dim();
        let rows = partial.chunks_exact_mut(partial_row_len(width));
        for ((row, totals), largest) in rows.zip(totals.chunks_exact(TILE_LEN)).zip(largest) {
            row[width] = largest;
            row[width + 1] = totals[0];
        }
    }

    /// Multiplies the weights of two groups of rows by the values, into rows of partial results.
    #[inline(always)]
    unsafe fn mix_pair<const R: usize>(&mut self, num_keys: usize, partial: &mut [f32]) {
        let (amx, width) = (self.amx, self.tile.head_dim());
        let num_chunks = num_keys.div_ceil(DEPTH);
        let places = if partial.len() > R * partial_row_len(width) {
            [0, 1]
        } else {
            [0, 0]
        };
        let weights = self.matrices.weights.slice(0..2 * weights_len(R)).as_ptr();
        let weights = places.map(|place| weights.wrapping_add(place * weights_len(R)));
        for column in (0..width).step_by(COLUMNS) {
            let start = packed_start(self.num_keys, column);
            let values = self
                .matrices
                .values
                .slice(start..start + num_chunks * 2 * TILE_ELEMENTS);
            amx.clear();
            for (chunk, values) in values.chunks_exact(2 * TILE_ELEMENTS).enumerate() {
                let weights = weights.map(|weights| weights.wrapping_add(chunk * TILE_LEN * R).cast());
                let values = values.as_chunks::<TILE_ELEMENTS>().0;
                let values = [&values[0], &values[1]].map(|values| values.as_ptr().cast());
                // SAFETY: tiles of weights and of values.
                unsafe { amx.add_products_of_pairs(weights, ROW_BYTES, values) };
            }
            let group_len = TILE_LEN * COLUMNS;
            let sums = self.matrices.sums.slice(0..2 * group_len);
            let steps = [group_len * size_of::<f32>(), ROW_BYTES];
            // SAFETY: room for two tiles of each group, side by side.
            unsafe { amx.store_pairs(sums.as_mut_ptr().cast(), steps, 2 * ROW_BYTES) };
            let groups = partial.chunks_mut(R * partial_row_len(width));
            for (sums, group) in sums.chunks_exact(group_len).zip(groups) {
                let rows = group.chunks_exact_mut(partial_row_len(width));
                for (sums, row) in sums.chunks_exact(COLUMNS).zip(rows) {
                    // SAFETY: `amx` proves the instructions.
                    unsafe { restore_order(sums, &mut row[column..column + COLUMNS]) };
                }
            }
        }
    }

    /// Interleaves all values of the split.
    #[inline(always)]
    unsafe fn pack_all_values(&mut self) {
        for first in (0..self.num_keys).step_by(VALUE_STEP) {
            let positions = first..self.num_keys.min(first + VALUE_STEP);
            self.prefetch.advance(Avx512::from(self.amx), positions.len());
            for column in (0..self.tile.head_dim()).step_by(COLUMNS) {
                let start = packed_start(self.num_keys, column) + first / DEPTH * 2 * TILE_ELEMENTS;
                let len = positions.len().div_ceil(DEPTH) * 2 * TILE_ELEMENTS;
                let values = self.matrices.values.slice(start..start + len);
                // SAFETY: passed on; `amx` proves the instructions.
                unsafe {
                    pack_values(
                        self.tile,
                        self.idx,
                        positions.clone(),
                        column..column + COLUMNS,
                        values,
                    );
                }
            }
        }
    }
}

/// Where the packed values of the columns from one on begin.
#[inline(always)]
fn packed_start(num_keys: usize, column: usize) -> usize {
    num_keys.next_multiple_of(DEPTH) / 2 * column
}
