//! Attention of tiles with few rows, as decodes are, on vectors: the arithmetic of `tile_amx` without matrix tiles.
//!
//! Such a tile is bound by reading its keys and values. Vectors let the reads go on behind the arithmetic, where one
//! line is asked for ahead for every line that is used; between instructions on matrix tiles it does not. The bits are
//! those of the tiles, since the same token may be computed in a prompt or in a cascade. An instruction of theirs adds
//! 32 products to a sum like this, every step rounded once and what is too small for a normal number taken as zero:
//!
//! ```text
//! even = fma(a[2 i], b[2 i], even), odd = fma(a[2 i + 1], b[2 i + 1], odd)     both from zero, i from 0 to 15
//! sum  = sum + (even + odd)
//! ```
//!
//! For scores the 32 are elements and a lane is a key: keys are transposed in registers, in pairs of elements. For
//! values they are positions and a lane is a column. Only the payload of a NaN may differ.

#![expect(
    clippy::needless_range_loop,
    reason = "rows and columns in each other's company read better"
)]

use std::arch::x86_64::{
    __m128, __m512, _mm_add_ps, _mm_loadu_ps, _mm_setzero_ps, _mm_storeu_ps, _mm512_add_ps, _mm512_fmadd_ps,
    _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_reduce_max_ps,
    _mm512_set1_ps, _mm512_setzero_ps, _mm512_storeu_ps,
};

use super::amx::{DEPTH, ROW_BYTES};
use super::isa::{AlignedBuffer, LANES, Simd};
use super::prefetch::{Prefetch, prefetch_bytes};
use super::softmax_amx::exp2;
use super::tile::Tile;
use super::tile_loops::{SPLIT_LEN, partial_row_len, vector_at};
use super::values_amx::sixteen_slots;
use super::x86::{Avx512, transpose_within_quarters};
use vectors::{interleave, load_by_quarters, round, widen};

/// Tiles with at most so many rows are computed here: beyond that arithmetic takes longer than reading.
pub(super) const MAX_ROWS: usize = 8;

/// Bytes between what is read and what is asked for when a job begins, four blocks of sixteen slots of 128 bytes. More
/// is a little slower.
pub(super) const LEAD_BYTES: usize = 8 << 10;

/// Rows whose weights lie side by side.
const SIDE: usize = 4;

/// Weights of a split, for `SIDE` rows.
const WEIGHTS_LEN: usize = SPLIT_LEN * SIDE;

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Buffers {
    /// `[rows][head_dim / 32][2][16]`: of each 32 elements those of even index, then those of odd index.
    queries: AlignedBuffer,
    /// `[MAX_ROWS][SPLIT_LEN]`
    scores: AlignedBuffer,
    /// `[MAX_ROWS / SIDE][SPLIT_LEN / 16][4][4][SIDE]`, position 4 j + i of sixteen at [i][j]; zeros for missing rows.
    weights: AlignedBuffer,
}

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits (`tile_amx`).
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, buffers: &mut Buffers) {
    let (num_rows, head_dim) = (tile.num_rows(), tile.head_dim());
    buffers.queries.reserve(num_rows * head_dim);
    buffers.scores.reserve(MAX_ROWS * SPLIT_LEN);
    buffers.weights.reserve(MAX_ROWS / SIDE * WEIGHTS_LEN);
    let queries = buffers.queries.slice(0..num_rows * head_dim);
    for (row, query) in queries.chunks_exact_mut(head_dim).enumerate() {
        let (token, head) = tile.place(row);
        let source = tile.query.row(token, head);
        for (chunk, places) in query.as_chunks_mut::<LANES>().0.chunks_exact_mut(2).enumerate() {
            // SAFETY: 32 elements of a row, for which the caller vouches; two vectors.
            unsafe {
                let [even, odd] = widen(_mm512_loadu_ps(source.wrapping_add(chunk * ROW_BYTES).cast()));
                _mm512_storeu_ps(places[0].as_mut_ptr(), even);
                _mm512_storeu_ps(places[1].as_mut_ptr(), odd);
            }
        }
    }
}

/// One split of a tile, whose queries are loaded.
pub(super) struct Split<'k, 'a, 'p> {
    pub(super) simd: Avx512,
    pub(super) tile: &'k Tile<'a>,
    pub(super) buffers: &'k mut Buffers,
    pub(super) prefetch: &'k mut Prefetch<'p>,
    /// Its number.
    pub(super) idx: usize,
}

impl Split<'_, '_, '_> {
    /// Computes the partial results. Rows that see nothing are marked by a total of zero.
    ///
    /// # Safety
    /// As `Tile::compute_split`; the tile suits, and `Flushing` is in force.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    pub(super) unsafe fn compute(&mut self, partial: &mut [f32]) {
        // SAFETY: passed on.
        unsafe {
            match self.tile.num_rows() {
                1 => self.compute_rows::<1>(partial),
                2 => self.compute_rows::<2>(partial),
                3 => self.compute_rows::<3>(partial),
                4 => self.compute_rows::<4>(partial),
                5 => self.compute_rows::<5>(partial),
                6 => self.compute_rows::<6>(partial),
                7 => self.compute_rows::<7>(partial),
                _ => self.compute_rows::<MAX_ROWS>(partial),
            }
        }
    }

    /// Computes R rows.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn compute_rows<const R: usize>(&mut self, partial: &mut [f32]) {
        let width = self.tile.head_dim();
        let rows = partial.chunks_exact_mut(partial_row_len(width));
        let mut visible = [0; R];
        for (row, visible) in visible.iter_mut().enumerate() {
            *visible = self.tile.visible(row, self.idx);
        }
        let num_keys = visible[R - 1];
        if num_keys == 0 {
            rows.for_each(|row| row[width + 1] = 0.0);
            return;
        }
        // SAFETY: passed on; the scores are there when they are softened, and the weights when they are mixed.
        unsafe {
            let largest = self.score(&visible);
            let largest = self.soften(&largest, num_keys);
            let totals = self.mix::<R>(num_keys, partial);
            let rows = partial.chunks_exact_mut(partial_row_len(width));
            for ((row, largest), total) in rows.zip(largest).zip(totals) {
                row[width] = largest;
                row[width + 1] = total;
            }
        }
    }

    /// Multiplies the keys by the queries; scores that a row does not see are minus infinity. Returns the largest ones,
    /// lane by lane.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn score<const R: usize>(&mut self, visible: &[usize; R]) -> [__m512; R] {
        let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
        let mut largest = [nothing; R];
        let num_keys = visible[R - 1];
        for start in (0..num_keys).step_by(LANES) {
            // SAFETY: passed on.
            let mut scores = unsafe {
                match num_keys - start {
                    LANES.. => self.score_sixteen::<R, true>(start, LANES),
                    count => self.score_sixteen::<R, false>(start, count),
                }
            };
            if visible[0] < start + LANES {
                for (scores, &visible) in scores.iter_mut().zip(visible) {
                    let seen = visible.saturating_sub(start).min(LANES);
                    *scores = _mm512_mask_mov_ps(nothing, lanes_below(seen), *scores);
                }
            }
            for row in 0..R {
                largest[row] = _mm512_max_ps(largest[row], scores[row]);
                let place = row * SPLIT_LEN + start;
                let place = self.buffers.scores.slice(place..place + LANES);
                // SAFETY: sixteen numbers.
                unsafe { _mm512_storeu_ps(place.as_mut_ptr(), scores[row]) };
            }
        }
        largest
    }

    /// Scores of sixteen keys of one block, of which `count` are read: all if `FULL`.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn score_sixteen<const R: usize, const FULL: bool>(
        &mut self,
        start: usize,
        count: usize,
    ) -> [__m512; R] {
        let (simd, cache) = (self.simd, &self.tile.key_cache);
        let (stride, head_dim) = (cache.slot_stride * cache.dtype.size(), cache.head_dim);
        let keys = sixteen_slots(self.tile, cache, self.idx * SPLIT_LEN + start);
        let num_chunks = head_dim / DEPTH;
        let mut scores = [_mm512_setzero_ps(); R];
        for chunk in 0..num_chunks {
            let column = keys.wrapping_add(chunk * ROW_BYTES);
            let ahead = self.prefetch.ahead(simd, column);
            let all = self.buffers.queries.slice(0..R * head_dim);
            let all = all.as_chunks::<LANES>().0.as_chunks::<2>().0;
            let mut queries = [&all[0]; R];
            for (row, query) in queries.iter_mut().enumerate() {
                *query = &all[row * num_chunks + chunk];
            }
            let mut rows = [column; LANES];
            for (key, row) in rows.iter_mut().enumerate() {
                let key = if FULL { key } else { key.min(count - 1) };
                *row = column.wrapping_add(key * stride);
            }
            // SAFETY: 32 elements of each slot, for which the caller vouches.
            let [a, b, c, d] = unsafe { load_by_quarters(&rows) };
            let mut sums = [[_mm512_setzero_ps(); 2]; R];
            // Not a loop, so that the vectors stay in registers.
            multiply_pairs::<R, 0>(simd, &a, &queries, ahead, &mut sums);
            multiply_pairs::<R, 4>(simd, &b, &queries, ahead, &mut sums);
            multiply_pairs::<R, 8>(simd, &c, &queries, ahead, &mut sums);
            multiply_pairs::<R, 12>(simd, &d, &queries, ahead, &mut sums);
            for (score, [even, odd]) in scores.iter_mut().zip(sums) {
                *score = _mm512_add_ps(*score, _mm512_add_ps(even, odd));
            }
        }
        scores
    }

    /// Turns scores into weights, as `softmax_amx` does. Returns the largest scores, times the factor.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn soften<const R: usize>(&mut self, largest: &[__m512; R], num_keys: usize) -> [f32; R] {
        let factor = _mm512_set1_ps(self.tile.scale * std::f32::consts::LOG2_E);
        let mut shifts = [_mm512_setzero_ps(); R];
        for (shift, &largest) in shifts.iter_mut().zip(largest) {
            let largest = _mm512_mul_ps(_mm512_set1_ps(_mm512_reduce_max_ps(largest)), factor);
            *shift = _mm512_max_ps(_mm512_set1_ps(f32::MIN), largest);
        }
        let scores = self.buffers.scores.slice(0..R * SPLIT_LEN);
        for first in (0..R).step_by(SIDE) {
            let start = first / SIDE * WEIGHTS_LEN;
            let weights = self
                .buffers
                .weights
                .slice(start..start + num_keys.next_multiple_of(LANES) * SIDE);
            for (group, places) in weights.chunks_exact_mut(LANES * SIDE).enumerate() {
                let mut rows = [_mm512_setzero_ps(); SIDE];
                for (row, weights) in (first..R).zip(&mut rows) {
                    let place = vector_at(scores, row * SPLIT_LEN + group * LANES);
                    // SAFETY: sixteen numbers.
                    let scores = unsafe { _mm512_loadu_ps(place.as_ptr()) };
                    *weights = round(exp2(_mm512_fmsub_ps(scores, factor, shifts[row])));
                }
                let places = places.as_chunks_mut::<LANES>().0;
                for (place, column) in places.iter_mut().zip(transpose_within_quarters(rows)) {
                    // SAFETY: sixteen numbers.
                    unsafe { _mm512_storeu_ps(place.as_mut_ptr(), column) };
                }
            }
        }
        let mut first_lanes = [0.0; R];
        for (lane, shift) in first_lanes.iter_mut().zip(shifts) {
            *lane = first_lane(shift);
        }
        first_lanes
    }

    /// Multiplies the weights by the values into rows of partial results. Returns the sums of the weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn mix<const R: usize>(&mut self, num_keys: usize, partial: &mut [f32]) -> [f32; MAX_ROWS] {
        let width = self.tile.head_dim();
        let row_len = partial_row_len(width);
        for row in partial.chunks_exact_mut(row_len) {
            row[..width].fill(0.0);
        }
        let mut totals = [_mm_setzero_ps(); MAX_ROWS / SIDE];
        for start in (0..num_keys).step_by(DEPTH) {
            let count = (num_keys - start).min(DEPTH);
            let mut column = 0;
            while column < width {
                // Of more rows the sums of 64 columns do not fit the registers.
                let num_chunks = if R <= SIDE {
                    (width - column).div_ceil(DEPTH).min(2)
                } else {
                    1
                };
                // SAFETY: passed on.
                let sums = unsafe {
                    match (num_chunks, count) {
                        (2, DEPTH) => self.mix_columns::<R, 2, true>(start, count, column, partial),
                        (2, _) => self.mix_columns::<R, 2, false>(start, count, column, partial),
                        (_, DEPTH) => self.mix_columns::<R, 1, true>(start, count, column, partial),
                        _ => self.mix_columns::<R, 1, false>(start, count, column, partial),
                    }
                };
                if column == 0 {
                    for (total, sum) in totals.iter_mut().zip(sums) {
                        *total = _mm_add_ps(*total, sum);
                    }
                }
                column += num_chunks * DEPTH;
            }
        }
        for row in partial.chunks_exact_mut(row_len) {
            for columns in row[..width].as_chunks_mut::<DEPTH>().0 {
                interleave(columns);
            }
        }
        let mut lanes = [0.0; MAX_ROWS];
        for (lanes, total) in lanes.as_chunks_mut::<SIDE>().0.iter_mut().zip(totals) {
            // SAFETY: four numbers.
            unsafe { _mm_storeu_ps(lanes.as_mut_ptr(), total) };
        }
        lanes
    }

    /// Adds the weighted values of 32 positions, or of `count` if not `FULL`, to N times 32 columns of the rows, of each
    /// 32 those of even index first. Returns the sums of the weights.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn mix_columns<const R: usize, const N: usize, const FULL: bool>(
        &mut self,
        start: usize,
        count: usize,
        column: usize,
        partial: &mut [f32],
    ) -> [__m128; MAX_ROWS / SIDE] {
        let (simd, cache) = (self.simd, &self.tile.value_cache);
        let stride = cache.slot_stride * cache.dtype.size();
        let mut halves = [std::ptr::null::<u8>(); 2];
        for (half, values) in halves.iter_mut().enumerate() {
            if half * LANES < count {
                let position = self.idx * SPLIT_LEN + start + half * LANES;
                *values = sixteen_slots(self.tile, cache, position).wrapping_add(column * 2);
            }
        }
        let mut sums = [[[[_mm512_setzero_ps(); 2]; N]; R]; 2];
        let mut totals = [[_mm_setzero_ps(); MAX_ROWS / SIDE]; 2];
        for parity in 0..2 {
            let mut ahead = [halves[0]; N];
            if FULL || count > parity * LANES {
                for lines in &mut ahead {
                    *lines = self.prefetch.ahead(simd, halves[0]);
                    if !FULL {
                        // There are not as many steps as lines.
                        prefetch_bytes(simd, *lines, ROW_BYTES * LANES);
                        *lines = halves[0];
                    }
                }
            }
            let all = self
                .buffers
                .weights
                .slice(0..MAX_ROWS / SIDE * WEIGHTS_LEN)
                .as_chunks::<SIDE>()
                .0;
            let mut weights = [&all[..DEPTH]; MAX_ROWS / SIDE];
            for (side, weights) in weights.iter_mut().enumerate() {
                let start = side * SPLIT_LEN + start;
                *weights = &all[start..start + DEPTH];
            }
            let (sums, totals) = (&mut sums[parity], &mut totals[parity]);
            for quarter in 0..DEPTH / 4 {
                let (half, place) = (quarter / 4, quarter % 4);
                for slot in [parity, parity + 2] {
                    if !FULL && 4 * quarter + slot >= count {
                        break;
                    }
                    let idx = half * LANES + slot * 4 + place;
                    for (total, weights) in totals.iter_mut().zip(weights).take(R.div_ceil(SIDE)) {
                        // SAFETY: four numbers.
                        *total = _mm_add_ps(*total, unsafe { _mm_loadu_ps(weights[idx].as_ptr()) });
                    }
                    let values = halves[half].wrapping_add((4 * place + slot) * stride);
                    for n in 0..N {
                        let line = (2 * quarter + slot / 2) * N + n;
                        simd.prefetch(ahead[line / LANES].wrapping_add(line % LANES * ROW_BYTES));
                        // SAFETY: 32 elements of a slot, for which the caller vouches.
                        let columns = unsafe { _mm512_loadu_ps(values.wrapping_add(n * ROW_BYTES).cast()) };
                        let columns = widen(columns);
                        for row in 0..R {
                            let weight = _mm512_set1_ps(weights[row / SIDE][idx][row % SIDE]);
                            for half in 0..2 {
                                sums[row][n][half] =
                                    _mm512_fmadd_ps(weight, columns[half], sums[row][n][half]);
                            }
                        }
                    }
                }
            }
        }
        add_to_rows(&sums, partial, column);
        let [even, odd] = totals;
        [_mm_add_ps(even[0], odd[0]), _mm_add_ps(even[1], odd[1])]
    }
}

/// Adds what even and odd positions gave to N times 32 columns of rows of partial results.
#[inline]
#[target_feature(enable = "avx512f")]
fn add_to_rows<const R: usize, const N: usize>(
    [even, odd]: &[[[[__m512; 2]; N]; R]; 2],
    partial: &mut [f32],
    column: usize,
) {
    let rows = partial.chunks_exact_mut(partial.len() / R);
    for ((row, even), odd) in rows.zip(even).zip(odd) {
        let places = row[column..].as_chunks_mut::<LANES>().0;
        let sums = even.as_flattened().iter().zip(odd.as_flattened());
        for (place, (&even, &odd)) in places.iter_mut().zip(sums) {
            let sum = _mm512_add_ps(even, odd);
            // SAFETY: sixteen numbers.
            unsafe {
                _mm512_storeu_ps(
                    place.as_mut_ptr(),
                    _mm512_add_ps(_mm512_loadu_ps(place.as_ptr()), sum),
                );
            };
        }
    }
}

/// Multiplies four pairs of elements, from the given one on, of sixteen keys by those of the queries.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
fn multiply_pairs<const R: usize, const FIRST: usize>(
    simd: Avx512,
    keys: &[__m512; 4],
    queries: &[&[[f32; LANES]; 2]; R],
    ahead: *const u8,
    sums: &mut [[__m512; 2]; R],
) {
    for (idx, pairs) in transpose_within_quarters(*keys).into_iter().enumerate() {
        let pair = FIRST + idx;
        simd.prefetch(ahead.wrapping_add(pair * ROW_BYTES));
        let pairs = widen(pairs);
        for (sums, query) in sums.iter_mut().zip(queries) {
            for parity in 0..2 {
                let element = _mm512_set1_ps(query[parity][pair]);
                sums[parity] = _mm512_fmadd_ps(pairs[parity], element, sums[parity]);
            }
        }
    }
}

/// A mask of the first lanes.
#[inline]
fn lanes_below(count: usize) -> u16 {
    u16::try_from((1_u32 << count) - 1).expect("at most sixteen lanes")
}

/// The first lane.
#[inline]
#[target_feature(enable = "avx512f")]
fn first_lane(vector: __m512) -> f32 {
    let mut lanes = [0.0; LANES];
    // SAFETY: sixteen numbers.
    unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), vector) };
    lanes[0]
}

#[cfg(test)]
mod tests;
mod vectors;
