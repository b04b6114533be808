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
//! Scores of at most sixteen rows are computed here, transposed, sixteen keys by so many rows: the keys are multiplied
//! where they lie in the cache. Where there are at most four rows softmax takes four: the decodes of one sequence are as
//! many rows as query heads share a key head. Tiles with more rows are computed in `prompt_amx`. A row's numbers do not depend on the others in its matrices: a position that it does not see
//! has a weight of zero, and adds zero. Only zero times infinity or NaN would not be zero; where a row of the tile sees
//! such a value and another one does not, the tokens of the tile are computed one by one. Slots behind what the tile
//! sees may be read, but only into rows of scores that nobody looks at.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{_mm512_loadu_ps, _mm512_set1_ps, _mm512_storeu_ps};
use std::ops::Range;

use super::amx::{Amx, DEPTH, ROW_BYTES, Shapes, TILE_LEN};
use super::element::Dtype;
use super::isa::{AlignedBuffer, LANES, Simd};
use super::prefetch::Prefetch;
use super::prompt_amx;
use super::softmax_amx::soften;
use super::tensor::{CacheView, RowsView};
use super::tile::Tile;
use super::tile_loops::{SPLIT_LEN, Slots, partial_row_len};
use super::values_amx::{pack_values, sixteen_slots};
use super::x86::{Avx512, transpose_avx512};

/// f32, or pairs of bf16, of a tile.
pub(super) const TILE_ELEMENTS: usize = TILE_LEN * TILE_LEN;

/// Accumulators of scores, and of columns of values.
const NUM_SUMS: usize = 4;

/// Rows of a tile with few of them.
const FEW_ROWS: usize = 4;

/// Positions whose values are interleaved at a time, a step before they are multiplied: they stay in the nearest cache,
/// and the stores are over when the tiles are loaded.
pub(super) const VALUE_STEP: usize = 64;

/// A tile of ones, as bf16.
pub(super) static ONES: [u16; 2 * TILE_ELEMENTS] = [0x3f80; 2 * TILE_ELEMENTS];

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Matrices {
    /// `[head_dim / 32][16 pairs][16 rows]`, of which R are used, four or sixteen; with more rows than a matrix
    /// `[rows / 16][head_dim / 32][16 rows][32 elements]`
    pub(super) queries: AlignedBuffer,
    /// With more rows than a matrix, `[SPLIT_LEN / 16][head_dim / 32][16 pairs][16 keys]`
    pub(super) keys: AlignedBuffer,
    /// `[scores_len]`: `[SPLIT_LEN][R rows]`, and the unused end of a row of a tile; or as in `prompt_amx`, weights too
    pub(super) scores: AlignedBuffer,
    /// `[SPLIT_LEN / 32][R rows][16 pairs]`, and what a tile reads behind its R rows
    weights: AlignedBuffer,
    /// `[2 steps][2 chunks][4 or 2][16 pairs][16 columns]`, or all of a split as `[SPLIT_LEN / 32][head_dim / 16]` of
    /// such tiles
    pub(super) values: AlignedBuffer,
    /// `[16 rows][4 or 2][16 columns]` and then `[16 rows][16]` totals, or `[2 groups][16 rows][2][16 columns]`
    pub(super) sums: AlignedBuffer,
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
    if tile.num_rows() <= FEW_ROWS {
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
    if tile.num_rows() > TILE_LEN {
        // SAFETY: passed on.
        return unsafe { prompt_amx::load_queries(tile, matrices) };
    }
    let (num_rows, chunks, width) = (tile.num_rows(), tile.head_dim() / DEPTH, rows_at_a_time(tile));
    let len = num_rows.div_ceil(width) * chunks * TILE_ELEMENTS;
    matrices.queries.reserve(len);
    matrices.scores.reserve(scores_len(width));
    matrices.weights.reserve(weights_len(width));
    matrices.values.reserve(SPLIT_LEN / 2 * tile.head_dim());
    matrices.sums.reserve((NUM_SUMS + 2) * TILE_ELEMENTS);
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
        match (tile.num_rows() > TILE_LEN, rows_at_a_time(tile)) {
            (true, _) => split.compute_pairs(partial),
            (_, FEW_ROWS) => split.compute::<FEW_ROWS>(partial),
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
    /// Computes the partial results of at most R rows.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn compute<const R: usize>(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        let row_len = partial_row_len(width);
        if self.num_keys == 0 {
            for row in partial.chunks_exact_mut(row_len) {
                row[width + 1] = 0.0;
            }
            return;
        }
        // SAFETY: passed on.
        unsafe { self.score::<R>() };
        let padded = self.num_keys.next_multiple_of(DEPTH);
        let visible = self.visible::<R>(0);
        let largest = soften::<R>(
            self.matrices.scores.slice(0..padded * R),
            self.matrices.weights.slice(0..padded / 2 * R),
            &visible,
            self.tile.scale * std::f32::consts::LOG2_E,
            |_| {},
        );
        // SAFETY: the weights are there.
        unsafe { self.mix::<R>(partial) };
        for (row, largest) in partial.chunks_exact_mut(row_len).zip(largest) {
            row[width] = largest;
        }
    }

    /// Positions that the rows of a group see; the last row stands for those that are missing.
    #[inline(always)]
    pub(super) fn visible<const R: usize>(&self, group: usize) -> [usize; R] {
        let last = self.tile.num_rows() - 1;
        std::array::from_fn(|row| self.tile.visible(last.min(group * R + row), self.idx))
    }

    /// Multiplies the keys by the queries.
    #[inline(always)]
    unsafe fn score<const R: usize>(&mut self) {
        let (amx, tile, num_keys) = (self.amx, self.tile, self.num_keys);
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
            let mut to_fetch = (num_keys - first * TILE_LEN).min(NUM_SUMS * TILE_LEN);
            let queries = self.matrices.queries.slice(0..len);
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
    unsafe fn mix<const R: usize>(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        // SAFETY: a tile of ones.
        unsafe { self.amx.load_fifth(ONES.as_ptr().cast()) };
        for column in (0..width).step_by(NUM_SUMS * TILE_LEN) {
            // SAFETY: passed on.
            unsafe {
                if column + NUM_SUMS * TILE_LEN <= width {
                    self.mix_columns::<R, NUM_SUMS>(column, partial);
                } else {
                    self.mix_columns::<R, 2>(column, partial);
                }
            }
        }
    }

    /// The columns from one on, N tiles of them.
    #[inline(always)]
    unsafe fn mix_columns<const R: usize, const N: usize>(&mut self, column: usize, partial: &mut [f32]) {
        let (amx, tile, num_keys) = (self.amx, self.tile, self.num_keys);
        let width = tile.head_dim();
        let row_len = partial_row_len(width);
        amx.clear();
        let columns = column..column + N * TILE_LEN;
        let step_len = VALUE_STEP / DEPTH * N * TILE_ELEMENTS;
        let num_steps = num_keys.div_ceil(VALUE_STEP);
        let positions = |step: usize| step * VALUE_STEP..num_keys.min((step + 1) * VALUE_STEP);
        let pack = |step: usize, values: &mut AlignedBuffer| {
            let values = values.slice(step % 2 * step_len..(step % 2 + 1) * step_len);
            // SAFETY: passed on.
            unsafe { pack_values(tile, self.idx, positions(step), columns.clone(), values) };
        };
        pack(0, &mut self.matrices.values);
        for step in 0..num_steps {
            if step + 1 < num_steps {
                pack(step + 1, &mut self.matrices.values);
            }
            let start = step % 2 * step_len;
            let chunks = positions(step).len().div_ceil(DEPTH);
            let first = step * VALUE_STEP;
            for chunk in 0..chunks {
                if column == 0 {
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
            partial[column..column + N * TILE_LEN].copy_from_slice(sums);
            partial[width + 1] = totals[0];
        }
    }
}

/// Numbers that the scores of R rows take.
#[inline(always)]
const fn scores_len(num_rows: usize) -> usize {
    SPLIT_LEN * num_rows + TILE_LEN
}

/// Numbers that the weights of R rows take.
#[inline(always)]
const fn weights_len(num_rows: usize) -> usize {
    SPLIT_LEN / 2 * num_rows + TILE_ELEMENTS
}
