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
//! Scores are computed transposed, sixteen keys by so many rows: the keys are multiplied where they lie in the cache.
//! Rows are taken sixteen at a time, or four where there are few: the decodes of one sequence are as many rows as query
//! heads share a key head. A row's numbers do not depend on the others in its matrices: a position that it does not see
//! has a weight of zero, and adds zero. Only zero times infinity or NaN would not be zero; where a row of the tile sees
//! such a value and another one does not, the tokens of the tile are computed one by one. Slots behind what the tile
//! sees may be read, but only into rows of scores that nobody looks at.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{
    _mm512_loadu_ps, _mm512_loadu_si512, _mm512_permutex2var_ps, _mm512_set1_ps, _mm512_setzero_si512,
    _mm512_storeu_ps, _mm512_storeu_si512, _mm512_unpackhi_epi16, _mm512_unpacklo_epi16,
};
use std::ops::Range;

use super::amx::{Amx, ROW_BYTES, Shapes, TILE_LEN};
use super::element::Dtype;
use super::isa::{AlignedBuffer, LANES, Simd};
use super::prefetch::Prefetch;
use super::softmax_amx::soften;
use super::tensor::{CacheView, RowsView};
use super::tile::Tile;
use super::tile_loops::{SPLIT_LEN, Slots, partial_row_len, vector_at, vector_at_mut};
use super::x86::{Avx512, transpose_avx512};

/// bf16 of a row of a tile, and products that one instruction adds up.
const DEPTH: usize = 32;

/// f32, or pairs of bf16, of a tile.
const TILE_ELEMENTS: usize = TILE_LEN * TILE_LEN;

/// Accumulators of scores, and of columns of values.
const NUM_SUMS: usize = 4;

/// Rows of a tile with few of them.
const FEW_ROWS: usize = 4;

/// Tiles with at most this many rows are computed `FEW_ROWS` at a time: reading the keys again costs less than the idle
/// lanes of softmax.
const MAX_FEW_ROWS: usize = 8;

/// Positions whose values are interleaved at a time, a step before they are multiplied: they stay in the nearest cache,
/// and the stores are over when the tiles are loaded.
const VALUE_STEP: usize = 64;

/// A tile of ones, as bf16.
static ONES: [u16; 2 * TILE_ELEMENTS] = [0x3f80; 2 * TILE_ELEMENTS];

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Matrices {
    /// `[rows / R][head_dim / 32][16 pairs][16 rows]`, of which R are used, four or sixteen
    queries: AlignedBuffer,
    /// `[2][scores_len]`, for two groups of rows: `[SPLIT_LEN][R rows]`, and the unused end of a row of a tile
    scores: AlignedBuffer,
    /// `[SPLIT_LEN / 32][R rows][16 pairs]`, and what a tile reads behind its R rows
    weights: AlignedBuffer,
    /// `[head_dim / 64][positions / 32][4 or 2][16 pairs][16 columns]`
    values: AlignedBuffer,
    /// `[16 rows][4 or 2][16 columns]`, then `[16 rows][16]` totals
    sums: AlignedBuffer,
}

/// The proof of the instructions, if a tile has the types and sizes for them.
#[inline(always)]
pub(super) fn suits<S: Simd>(simd: S, query: &RowsView, cache: &CacheView) -> Option<Amx> {
    let bf16 = query.dtype == Dtype::Bf16 && cache.dtype == Dtype::Bf16;
    let whole = query.head_dim.is_multiple_of(DEPTH) && cache.block_size.is_multiple_of(TILE_LEN);
    simd.amx().filter(|_| bf16 && whole)
}

/// The use of the tiles by one thread, all of the largest size: setting their shapes takes as long as some tens of
/// keys.
pub(super) struct Configured(Amx);

impl Configured {
    /// Begins to use them.
    pub(super) fn new(amx: Amx) -> Self {
        amx.configure(&Shapes::FULL);
        Self(amx)
    }
}

impl Drop for Configured {
    fn drop(&mut self) {
        self.0.release();
    }
}

/// Rows that are computed at a time.
#[inline(always)]
fn rows_at_a_time(tile: &Tile<'_>) -> usize {
    if tile.num_rows() <= MAX_FEW_ROWS {
        FEW_ROWS
    } else {
        TILE_LEN
    }
}

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512bf16,avx2,fma,f16c")]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, matrices: &mut Matrices) {
    let (num_rows, chunks, width) = (tile.num_rows(), tile.head_dim() / DEPTH, rows_at_a_time(tile));
    let len = num_rows.div_ceil(width) * chunks * TILE_ELEMENTS;
    matrices.queries.reserve(len);
    matrices.scores.reserve(2 * scores_len(width));
    matrices.weights.reserve(SPLIT_LEN / 2 * width + TILE_ELEMENTS);
    matrices.values.reserve(SPLIT_LEN / 2 * tile.head_dim());
    matrices.sums.reserve((NUM_SUMS + 1) * TILE_ELEMENTS);
    let tiles = matrices.queries.slice(0..len).chunks_exact_mut(TILE_ELEMENTS);
    for (idx, packed) in tiles.enumerate() {
        let (group, chunk) = (idx / chunks, idx % chunks);
        let mut rows = [_mm512_set1_ps(0.0); LANES];
        for (row, place) in (group * width..num_rows.min((group + 1) * width)).zip(&mut rows) {
            let (token, head) = tile.place(row);
            let address = tile.query.row(token, head).wrapping_add(chunk * ROW_BYTES);
            // SAFETY: 32 elements of a row, for which the caller vouches.
            *place = unsafe { _mm512_loadu_ps(address.cast()) };
        }
        for (column, place) in transpose_avx512(&rows)
            .into_iter()
            .zip(packed.as_chunks_mut::<LANES>().0)
        {
            // SAFETY: sixteen numbers.
            unsafe { _mm512_storeu_ps(place.as_mut_ptr(), column) };
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
        let mut split = Split {
            amx,
            tile,
            matrices,
            prefetch,
            idx: split,
            num_keys,
        };
        match rows_at_a_time(tile) {
            FEW_ROWS => split.compute::<FEW_ROWS>(partial),
            _ => split.compute::<TILE_LEN>(partial),
        }
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
    positions.fold(true, |all, _| {
        let row = slots.next_row().expect("checked: the table holds the sequence");
        // SAFETY: the caller vouches for the cache; the row is aligned to its type.
        #[expect(clippy::cast_ptr_alignment, reason = "the caller vouches for the alignment")]
        let row = unsafe { std::slice::from_raw_parts(row.cast::<u16>(), tile.head_dim()) };
        row.iter()
            .fold(all, |all, bits| all & (bits & EXPONENT != EXPONENT))
    })
}

/// One split of a tile, whose queries are loaded.
struct Split<'k, 'a, 'p> {
    amx: Amx,
    tile: &'k Tile<'a>,
    matrices: &'k mut Matrices,
    prefetch: &'k mut Prefetch<'p>,
    /// Its number.
    idx: usize,
    /// Positions of it that the tile sees.
    num_keys: usize,
}

impl Split<'_, '_, '_> {
    /// Computes the partial results, R rows at a time.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn compute<const R: usize>(&mut self, partial: &mut [f32]) {
        let group_len = R * partial_row_len(self.tile.head_dim());
        let num_groups = self.tile.num_rows().div_ceil(R);
        if num_groups > 1 {
            // SAFETY: passed on.
            unsafe { self.pack_all_values() };
        }
        for (pair, partial) in partial.chunks_mut(2 * group_len).enumerate() {
            let first = 2 * pair;
            let is_pair = first + 1 < num_groups;
            // The later rows of a tile see more.
            let num_keys = self.num_keys_of::<R>(first + usize::from(is_pair));
            // SAFETY: passed on.
            unsafe {
                match (num_keys, is_pair) {
                    (0, _) => {}
                    (_, false) => self.score::<R>(first, num_keys),
                    (_, true) => self.score_pair::<R>(first, num_keys),
                }
            }
            for (idx, partial) in partial.chunks_mut(group_len).enumerate() {
                // SAFETY: the scores are there, and the values if there are more groups than this one.
                unsafe { self.weigh::<R>(first + idx, idx, num_groups == 1, partial) };
            }
        }
    }

    /// Positions that the last row of a group sees.
    #[inline(always)]
    fn num_keys_of<const R: usize>(&self, group: usize) -> usize {
        let end = self.tile.num_rows().min((group + 1) * R);
        self.tile.visible(end - 1, self.idx)
    }

    /// Turns the scores of a group of rows, the first or the second ones that there is room for, into partial results.
    #[inline(always)]
    unsafe fn weigh<const R: usize>(
        &mut self,
        group: usize,
        place: usize,
        is_single: bool,
        partial: &mut [f32],
    ) {
        let width = self.tile.head_dim();
        let rows = partial.chunks_exact_mut(partial_row_len(width));
        let num_keys = self.num_keys_of::<R>(group);
        if num_keys == 0 {
            for row in rows {
                row[width + 1] = 0.0;
            }
            return;
        }
        let (first, last) = (group * R, rows.len() - 1);
        let visible: [usize; R] =
            std::array::from_fn(|row| self.tile.visible(first + row.min(last), self.idx));
        let padded = num_keys.next_multiple_of(DEPTH);
        let scores = place * scores_len(R);
        let (scores, weights) = (
            self.matrices.scores.slice(scores..scores + padded * R),
            self.matrices.weights.slice(0..padded / 2 * R),
        );
        let factor = self.tile.scale * std::f32::consts::LOG2_E;
        // SAFETY: `amx` proves the instructions.
        let largest = unsafe { soften::<R>(scores, weights, &visible, factor) };
        // SAFETY: passed on; the weights are there.
        unsafe { self.mix::<R>(num_keys, is_single, partial) };
        for (row, largest) in partial.chunks_exact_mut(partial_row_len(width)).zip(largest) {
            row[width] = largest;
        }
    }

    /// Multiplies the keys by the queries of two groups of rows, two tiles of keys at a time: half as many keys pass
    /// through the nearest cache, and half as many tiles are loaded.
    #[inline(always)]
    unsafe fn score_pair<const R: usize>(&mut self, group: usize, num_keys: usize) {
        let (amx, tile) = (self.amx, self.tile);
        let chunks = tile.head_dim() / DEPTH;
        let len = chunks * TILE_ELEMENTS;
        let (cache, last) = (&tile.key_cache, (num_keys - 1) / TILE_LEN);
        let stride = cache.slot_stride * cache.dtype.size();
        for first in (0..=last).step_by(2) {
            // Behind the last group its scores are computed again, where nobody reads them.
            let mut keys = [first, last.min(first + 1)].map(|idx| {
                let position = self.idx * SPLIT_LEN + idx * TILE_LEN;
                sixteen_slots(tile, cache, position)
            });
            if group == 0 {
                let num_slots = (num_keys - first * TILE_LEN).min(2 * TILE_LEN);
                self.prefetch.advance(Avx512::from(amx), num_slots);
            }
            let queries = self.matrices.queries.slice(group * len..(group + 2) * len);
            let (queries, others) = queries.split_at(len);
            amx.clear();
            for (queries, others) in queries
                .chunks_exact(TILE_ELEMENTS)
                .zip(others.chunks_exact(TILE_ELEMENTS))
            {
                let queries = [queries.as_ptr().cast(), others.as_ptr().cast()];
                // SAFETY: sixteen slots of one block, and tiles of queries.
                unsafe { amx.add_products_of_pairs(keys, stride, queries) };
                keys = keys.map(|keys| keys.wrapping_add(ROW_BYTES));
            }
            let start = first * TILE_LEN * R;
            let scores = self.matrices.scores.slice(start..2 * scores_len(R));
            let step = [TILE_LEN * R, scores_len(R)].map(|len| len * size_of::<f32>());
            // As in `score`, the end of every row of a tile is overwritten.
            // SAFETY: room for two tiles of each group with rows of R numbers, and the end of the last row.
            unsafe { amx.store_pairs(scores.as_mut_ptr().cast(), step, R * size_of::<f32>()) };
        }
    }

    /// Multiplies the keys by the queries of a group of rows.
    #[inline(always)]
    unsafe fn score<const R: usize>(&mut self, group: usize, num_keys: usize) {
        let (amx, tile) = (self.amx, self.tile);
        let simd = Avx512::from(amx);
        let chunks = tile.head_dim() / DEPTH;
        let len = chunks * TILE_ELEMENTS;
        let (cache, last) = (&tile.key_cache, (num_keys - 1) / TILE_LEN);
        let stride = cache.slot_stride * cache.dtype.size();
        let row_bytes = R * size_of::<f32>();
        for first in (0..=last).step_by(NUM_SUMS) {
            let mut keys = [std::ptr::null(); NUM_SUMS];
            for (idx, keys) in keys.iter_mut().enumerate() {
                // Behind the last group its scores are computed again, where nobody reads them.
                let position = self.idx * SPLIT_LEN + (first + idx).min(last) * TILE_LEN;
                *keys = sixteen_slots(tile, cache, position);
            }
            let mut to_fetch = match group {
                0 => (num_keys - first * TILE_LEN).min(NUM_SUMS * TILE_LEN),
                _ => 0,
            };
            let queries = self.matrices.queries.slice(group * len..(group + 1) * len);
            amx.clear();
            for (chunk, queries) in queries.chunks_exact(TILE_ELEMENTS).enumerate() {
                // A little at a time: what asks for more lines than can be on their way at once waits.
                let num_slots = to_fetch / (chunks - chunk);
                self.prefetch.advance(simd, num_slots);
                to_fetch -= num_slots;
                // SAFETY: sixteen slots of one block, and a tile of queries.
                unsafe { amx.add_products_of_lefts(keys, stride, queries.as_ptr().cast()) };
                for keys in &mut keys {
                    *keys = keys.wrapping_add(ROW_BYTES);
                }
            }
            let start = first * TILE_LEN * R;
            let len = (NUM_SUMS * TILE_LEN - 1) * R + TILE_LEN;
            let scores = self.matrices.scores.slice(start..start + len);
            // The end of every row of a tile, of no use, is overwritten by the next row, which is stored after it.
            // SAFETY: room for four tiles with rows of R numbers, and the end of the last row.
            unsafe { amx.store::<NUM_SUMS>(scores.as_mut_ptr().cast(), TILE_LEN * row_bytes, row_bytes) };
        }
    }

    /// Multiplies the weights by the values, and adds up the weights, into rows of partial results.
    #[inline(always)]
    unsafe fn mix<const R: usize>(&mut self, num_keys: usize, is_single: bool, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        // SAFETY: a tile of ones.
        unsafe { self.amx.load_fifth(ONES.as_ptr().cast()) };
        for column in (0..width).step_by(NUM_SUMS * TILE_LEN) {
            // SAFETY: passed on.
            unsafe {
                if column + NUM_SUMS * TILE_LEN <= width {
                    self.mix_columns::<R, NUM_SUMS>(column, num_keys, is_single, partial);
                } else {
                    self.mix_columns::<R, 2>(column, num_keys, is_single, partial);
                }
            }
        }
    }

    /// The columns from one on, N tiles of them.
    #[inline(always)]
    unsafe fn mix_columns<const R: usize, const N: usize>(
        &mut self,
        column: usize,
        num_keys: usize,
        is_single: bool,
        partial: &mut [f32],
    ) {
        let (amx, width) = (self.amx, self.tile.head_dim());
        let row_len = partial_row_len(width);
        amx.clear();
        let columns = column..column + N * TILE_LEN;
        let step_len = VALUE_STEP / DEPTH * N * TILE_ELEMENTS;
        let num_steps = num_keys.div_ceil(VALUE_STEP);
        let positions = |step: usize| step * VALUE_STEP..num_keys.min((step + 1) * VALUE_STEP);
        if is_single {
            // SAFETY: passed on.
            unsafe { self.pack_values(positions(0), columns.clone(), 0) };
        }
        for step in 0..num_steps {
            let mut start = packed_start(self.num_keys, column) + step * step_len;
            if is_single {
                start = step % 2 * step_len;
                if step + 1 < num_steps {
                    // SAFETY: passed on.
                    unsafe { self.pack_values(positions(step + 1), columns.clone(), step_len - start) };
                }
            }
            let chunks = positions(step).len().div_ceil(DEPTH);
            let first = step * VALUE_STEP;
            for chunk in 0..chunks {
                if is_single && column == 0 {
                    let num_slots = DEPTH.min(num_keys - first - chunk * DEPTH);
                    self.prefetch.advance(Avx512::from(amx), num_slots);
                }
                let values = start + chunk * N * TILE_ELEMENTS;
                let values = self.matrices.values.slice(values..values + N * TILE_ELEMENTS);
                let weights = (first / DEPTH + chunk) * TILE_LEN * R;
                let weights = self.matrices.weights.slice(weights..weights + TILE_ELEMENTS);
                // SAFETY: a tile of weights and N of values.
                unsafe { amx.add_products_of_rights::<N>(weights.as_ptr().cast(), values.as_ptr().cast()) };
            }
        }
        let sums = self.matrices.sums.slice(0..(N + 1) * TILE_ELEMENTS);
        let (sums, totals) = sums.split_at_mut(N * TILE_ELEMENTS);
        // SAFETY: room for the tiles.
        unsafe {
            amx.store::<N>(sums.as_mut_ptr().cast(), ROW_BYTES, N * ROW_BYTES);
            amx.store_fifth(totals.as_mut_ptr().cast(), ROW_BYTES);
        }
        let rows = sums.chunks_exact(N * TILE_LEN).zip(totals.chunks_exact(TILE_LEN));
        for ((sums, totals), partial) in rows.zip(partial.chunks_exact_mut(row_len)) {
            let columns = partial[column..column + N * TILE_LEN].chunks_exact_mut(2 * TILE_LEN);
            for (sums, columns) in sums.chunks_exact(2 * TILE_LEN).zip(columns) {
                // SAFETY: the instructions are there.
                unsafe { restore_order(sums, columns) };
            }
            partial[width + 1] = totals[0];
        }
    }

    /// Interleaves all values of the split.
    #[inline(always)]
    unsafe fn pack_all_values(&mut self) {
        let width = self.tile.head_dim();
        for column in (0..width).step_by(NUM_SUMS * TILE_LEN) {
            let columns = column..width.min(column + NUM_SUMS * TILE_LEN);
            for first in (0..self.num_keys).step_by(VALUE_STEP) {
                let positions = first..self.num_keys.min(first + VALUE_STEP);
                if column == 0 {
                    self.prefetch.advance(Avx512::from(self.amx), positions.len());
                }
                let start = packed_start(self.num_keys, column) + first / DEPTH * columns.len() * TILE_LEN;
                // SAFETY: passed on.
                unsafe { self.pack_values(positions, columns.clone(), start) };
            }
        }
    }

    /// Interleaves the values of neighbouring positions, of some of the columns, into tiles from `start` on; zeros fill
    /// up the last ones. The first of every two tiles takes from each eight columns the lower four, the other one the
    /// upper four: `restore_order`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw")]
    unsafe fn pack_values(&mut self, positions: Range<usize>, columns: Range<usize>, start: usize) {
        let (tile, cache) = (self.tile, &self.tile.value_cache);
        let stride = cache.slot_stride * cache.dtype.size();
        let chunk_len = columns.len() * TILE_LEN;
        let num_chunks = positions.len().div_ceil(DEPTH);
        let values = self.matrices.values.slice(start..start + num_chunks * chunk_len);
        for (half, first) in (positions.start..positions.start + num_chunks * DEPTH)
            .step_by(TILE_LEN)
            .enumerate()
        {
            let count = positions.end.saturating_sub(first).min(TILE_LEN);
            let slots = if count > 0 {
                sixteen_slots(tile, cache, self.idx * SPLIT_LEN + first)
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
}

/// Interleaves 32 elements of each of sixteen slots, those from `count` on taken as zeros: the lower four of every
/// eight columns, and the upper four.
///
/// # Safety
/// `count` slots are readable.
#[inline(always)]
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

/// Numbers that the scores of R rows take.
#[inline(always)]
const fn scores_len(num_rows: usize) -> usize {
    SPLIT_LEN * num_rows + TILE_LEN
}

/// Where the packed values of the columns from one on begin.
#[inline(always)]
fn packed_start(num_keys: usize, column: usize) -> usize {
    num_keys.next_multiple_of(DEPTH) / 2 * column
}

/// Address of the first of sixteen slots that lie in one block; the position is a multiple of sixteen.
#[inline(always)]
fn sixteen_slots(tile: &Tile<'_>, cache: &CacheView, position: usize) -> *const u8 {
    let block = tile.table[position / cache.block_size];
    let block = usize::try_from(block).expect("checked: no block id is negative");
    cache.row(block, tile.kv_head, position % cache.block_size)
}

/// Puts the sums of two tiles of columns, as `pack_values` makes them, into the order of the columns.
#[inline]
#[target_feature(enable = "avx512f")]
fn restore_order(sums: &[f32], columns: &mut [f32]) {
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
