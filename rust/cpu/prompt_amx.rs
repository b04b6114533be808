//! Attention of tiles with more rows than `few_rows` takes: prompts, chunks of them, and decodes that share a prefix.
//!
//! The arithmetic is that of `tile_amx`, bit by bit. So many rows share a split's keys and values that both are packed
//! once for all of them, the keys transposed: scores then come row by row, as the weights are multiplied. Rows are taken
//! two groups of sixteen at a time, and a tile of keys or values that is loaded is multiplied twice. The processor does
//! not multiply vectors and tiles at the same time, but a unit that was idle for half a microsecond takes nearly as long
//! to come back; so the totals are added up while weights are computed.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{_mm512_loadu_ps, _mm512_storeu_ps};

use super::amx::{DEPTH, ROW_BYTES, TILE_LEN};
use super::isa::LANES;
use super::keys_amx::pack_keys;
use super::softmax_amx::soften;
use super::tile::Tile;
use super::tile_amx::{Matrices, ONES, Split, TILE_ELEMENTS};
use super::tile_loops::{SPLIT_LEN, partial_row_len};
use super::values_amx::{pack_values, sixteen_slots};
use super::x86::Avx512;

/// Columns of values that are multiplied at a time, two tiles.
const COLUMNS: usize = 2 * TILE_LEN;

/// Positions whose keys or values are packed, and as many asked for ahead, at a time.
const PACK_STEP: usize = 64;

/// Numbers that the scores of a group of rows take.
const GROUP_SCORES: usize = SPLIT_LEN * TILE_LEN;

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
    matrices.scores.reserve(2 * GROUP_SCORES);
    matrices.sums.reserve(4 * TILE_ELEMENTS);
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
    /// Computes the partial results, two groups of rows at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn compute_pairs(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        let row_len = partial_row_len(width);
        let num_groups = self.tile.num_rows().div_ceil(TILE_LEN);
        // SAFETY: passed on.
        unsafe {
            self.pack_all_keys();
            self.pack_all_values();
        }
        for (pair, partial) in partial.chunks_mut(2 * TILE_LEN * row_len).enumerate() {
            let first = 2 * pair;
            // An odd group out is multiplied twice.
            let groups = [first, (first + 1).min(num_groups - 1)];
            let visible = groups.map(|group| self.visible(group));
            // Later rows see more.
            let num_keys = visible[1][TILE_LEN - 1];
            if num_keys == 0 {
                for row in partial.chunks_exact_mut(row_len) {
                    row[width + 1] = 0.0;
                }
                continue;
            }
            // SAFETY: passed on; the scores are there when they are weighed, and the weights when they are mixed.
            unsafe {
                self.score_pair(groups, num_keys);
                for (place, (visible, partial)) in visible
                    .iter()
                    .zip(partial.chunks_mut(TILE_LEN * row_len))
                    .enumerate()
                {
                    self.weigh(place, num_keys, visible, partial);
                }
                self.mix_pair(num_keys, partial);
            }
        }
    }

    /// Multiplies the queries of two groups of rows by the keys, into scores `[group][keys / 16][16 rows][16 keys]`.
    #[inline(always)]
    unsafe fn score_pair(&mut self, groups: [usize; 2], num_keys: usize) {
        let amx = self.amx;
        let chunks = self.tile.head_dim() / DEPTH;
        let len = chunks * TILE_ELEMENTS;
        let last = (num_keys - 1) / TILE_LEN;
        let keys = self.matrices.keys.slice(0..(last + 1) * len).as_ptr();
        let queries = self.matrices.queries.slice(0..(groups[1] + 1) * len).as_ptr();
        let queries = groups.map(|group| queries.wrapping_add(group * len));
        let scores = self.matrices.scores.slice(0..2 * GROUP_SCORES);
        for (tile, scores) in (0..=last)
            .step_by(2)
            .zip(scores.chunks_exact_mut(2 * TILE_ELEMENTS))
        {
            // Behind the last tile its scores are computed again, where nobody reads them.
            let keys = [tile, last.min(tile + 1)].map(|tile| keys.wrapping_add(tile * len));
            amx.clear();
            for chunk in 0..chunks {
                let place = |tiles: *const f32| tiles.wrapping_add(chunk * TILE_ELEMENTS).cast();
                // SAFETY: tiles of queries and of keys.
                unsafe { amx.add_products_of_pairs(queries.map(place), keys.map(place)) };
            }
            let steps = [GROUP_SCORES, TILE_ELEMENTS].map(|len| len * size_of::<f32>());
            // SAFETY: room for two tiles of each group.
            unsafe { amx.store_pairs(scores.as_mut_ptr().cast(), steps, ROW_BYTES) };
        }
    }

    /// Turns the scores of one of two groups of rows into weights, and writes the largest scores and the totals of
    /// weights into rows of partial results. A row that sees nothing gets a total of zero.
    #[inline(always)]
    unsafe fn weigh(
        &mut self,
        place: usize,
        num_keys: usize,
        visible: &[usize; TILE_LEN],
        partial: &mut [f32],
    ) {
        let amx = self.amx;
        let start = place * GROUP_SCORES;
        let len = num_keys.next_multiple_of(DEPTH) * TILE_LEN;
        let scores = self.matrices.scores.slice(start..start + len);
        let factor = self.tile.scale * std::f32::consts::LOG2_E;
        amx.clear();
        // SAFETY: a tile of ones, and tiles of weights; `amx` proves the instructions.
        let largest = unsafe {
            amx.load_fifth(ONES.as_ptr().cast());
            soften(scores, visible, factor, |weights| {
                amx.add_fifth_product(weights.as_ptr().cast());
            })
        };
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
    unsafe fn mix_pair(&mut self, num_keys: usize, partial: &mut [f32]) {
        let (amx, width) = (self.amx, self.tile.head_dim());
        let row_len = partial_row_len(width);
        let num_chunks = num_keys.div_ceil(DEPTH);
        let num_rows = partial.len() / row_len;
        // An odd group out is multiplied twice, and stored twice.
        let step = usize::from(num_rows > TILE_LEN);
        let weights = self.matrices.scores.slice(0..2 * GROUP_SCORES).as_ptr();
        let weights = [0, step].map(|place| weights.wrapping_add(place * GROUP_SCORES));
        let values = self
            .matrices
            .values
            .slice(0..num_chunks * width * TILE_LEN)
            .as_ptr();
        for column in (0..width).step_by(COLUMNS) {
            amx.clear();
            for chunk in 0..num_chunks {
                let weights = weights.map(|weights| weights.wrapping_add(chunk * 2 * TILE_ELEMENTS).cast());
                let place = chunk * width * TILE_LEN + column * TILE_LEN;
                let values =
                    [place, place + TILE_ELEMENTS].map(|place| values.wrapping_add(place).cast::<u8>());
                // SAFETY: tiles of weights and of values.
                unsafe { amx.add_products_of_pairs(weights, values) };
            }
            if num_rows.is_multiple_of(TILE_LEN) {
                let steps = [step * TILE_LEN * row_len * size_of::<f32>(), ROW_BYTES];
                let place = partial[column..].as_mut_ptr().cast();
                // SAFETY: rows of one or two whole groups.
                unsafe { amx.store_pairs(place, steps, row_len * size_of::<f32>()) };
                continue;
            }
            let sums = self.matrices.sums.slice(0..2 * TILE_LEN * COLUMNS);
            let steps = [TILE_LEN * COLUMNS * size_of::<f32>(), ROW_BYTES];
            // SAFETY: room for two tiles of each group, side by side.
            unsafe { amx.store_pairs(sums.as_mut_ptr().cast(), steps, 2 * ROW_BYTES) };
            for (sums, row) in sums.chunks_exact(COLUMNS).zip(partial.chunks_exact_mut(row_len)) {
                row[column..column + COLUMNS].copy_from_slice(sums);
            }
        }
    }

    /// Transposes all keys of the split.
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
