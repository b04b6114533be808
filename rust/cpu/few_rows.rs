//! Attention of tiles with few rows, as decodes are: keys on matrix tiles as they lie in the cache, values on vectors.
//!
//! Such a tile is bound by reading its keys and values. A block of keys, whose slots are rows of a matrix, is multiplied
//! by the queries without being packed. Values would have to be; vectors take them as they are, and let the reads go on
//! behind the arithmetic, where one line is asked for ahead for every line that is used. The bits are those of
//! `prompt_amx`, since the same token may be computed in a prompt or in a cascade. An instruction on tiles adds 32
//! products to a sum like this, every step rounded once and what is too small for a normal number taken as zero:
//!
//! ```text
//! even = fma(a[2 i], b[2 i], even), odd = fma(a[2 i + 1], b[2 i + 1], odd)     both from zero, i from 0 to 15
//! sum  = sum + (even + odd)
//! ```
//!
//! For scores the 32 are elements. For values, where vectors do the same, they are positions and a lane is a column. Only
//! the payload of a NaN may differ.

#![expect(
    clippy::needless_range_loop,
    reason = "rows and columns in each other's company read better"
)]

use std::arch::x86_64::{
    __m128, __m512, _mm_add_ps, _mm_loadu_ps, _mm_setzero_ps, _mm_storeu_ps, _mm512_add_ps,
    _mm512_cmpgt_epi32_mask, _mm512_fmadd_ps, _mm512_fmsub_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_mask_mov_ps, _mm512_max_ps, _mm512_mul_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_setzero_ps,
    _mm512_shuffle_f32x4, _mm512_storeu_ps,
};

use super::amx::{Amx, DEPTH, ROW_BYTES, TILE_LEN};
use super::isa::{AlignedBuffer, LANES, Simd};
use super::prefetch::{AHEAD_LINES, Prefetch, prefetch_bytes};
use super::softmax_amx::exp2;
use super::tile::Tile;
use super::tile_amx::TILE_ELEMENTS;
use super::tile_loops::{SPLIT_LEN, partial_row_len};
use super::values_amx::sixteen_slots;
use super::x86::Avx512;
use vectors::{interleave, round, widen};

/// Tiles with at most so many rows are computed here: beyond that arithmetic takes longer than reading.
pub(super) const MAX_ROWS: usize = 8;

/// Bytes between what is read and what is asked for when a job begins, four blocks of sixteen slots of 128 bytes. More
/// is a little slower.
pub(super) const LEAD_BYTES: usize = 8 << 10;

/// Rows whose totals are added up side by side.
const SIDE: usize = 4;

/// Memory of one thread, reused from tile to tile.
#[derive(Default, Debug)]
pub(super) struct Buffers {
    /// `[head_dim / 32][16 pairs of elements][16]`, a row of the tile in each column; what is in the others does not matter.
    queries: AlignedBuffer,
    /// `[SPLIT_LEN][side_len(rows)]`, then weights in their place; behind them what a matrix tile has too many.
    scores: AlignedBuffer,
}

/// Scores of a key that lie side by side: `rows` of them mean something.
const fn side_len(rows: usize) -> usize {
    if rows <= SIDE { SIDE } else { MAX_ROWS }
}

/// Reads the queries.
///
/// # Safety
/// As `Tile::load_queries`; the tile suits (`tile_amx`).
#[target_feature(enable = "avx512f")]
pub(super) unsafe fn load_queries(tile: &Tile<'_>, buffers: &mut Buffers) {
    let (num_rows, num_chunks) = (tile.num_rows(), tile.head_dim() / DEPTH);
    buffers.queries.reserve(num_chunks * TILE_ELEMENTS);
    buffers.scores.reserve(SPLIT_LEN * MAX_ROWS + TILE_LEN);
    let queries = buffers.queries.slice(0..num_chunks * TILE_ELEMENTS);
    for row in 0..num_rows {
        let (token, head) = tile.place(row);
        let source = tile.query.row(token, head);
        for (chunk, places) in queries.chunks_exact_mut(TILE_ELEMENTS).enumerate() {
            let mut pairs = [0.0; LANES];
            // SAFETY: 32 elements of a row, for which the caller vouches; a vector.
            unsafe {
                let elements = _mm512_loadu_ps(source.wrapping_add(chunk * ROW_BYTES).cast());
                _mm512_storeu_ps(pairs.as_mut_ptr(), elements);
            }
            for (pair, places) in pairs.into_iter().zip(places.as_chunks_mut::<TILE_LEN>().0) {
                places[row] = pair;
            }
        }
    }
}

/// One split of a tile, whose queries are loaded.
pub(super) struct Split<'k, 'a, 'p> {
    pub(super) amx: Amx,
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
    /// As `Tile::compute_split`; the tile suits, and `Configured` is in force.
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
            self.score(num_keys, side_len(R));
            let largest = self.soften(&visible);
            let totals = self.mix::<R>(num_keys, partial);
            let rows = partial.chunks_exact_mut(partial_row_len(width));
            for ((row, largest), total) in rows.zip(largest).zip(totals) {
                row[width] = largest;
                row[width + 1] = total;
            }
        }
    }

    /// Multiplies the keys, as they lie in the cache, by the queries, two blocks of sixteen at a time. Keys behind the
    /// last one of a block have scores that nobody looks at.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn score(&mut self, num_keys: usize, side_len: usize) {
        let (amx, cache) = (self.amx, &self.tile.key_cache);
        let stride = cache.slot_stride * cache.dtype.size();
        let num_chunks = cache.head_dim / DEPTH;
        let queries = self.buffers.queries.slice(0..num_chunks * TILE_ELEMENTS).as_ptr();
        let scores = self.buffers.scores.slice(0..SPLIT_LEN * side_len + TILE_LEN);
        for start in (0..num_keys).step_by(DEPTH) {
            let num_blocks = if start + LANES < num_keys { 2 } else { 1 };
            let block = |idx: usize| {
                let position = start + LANES * idx.min(num_blocks - 1);
                sixteen_slots(self.tile, cache, self.idx * SPLIT_LEN + position)
            };
            let blocks = [block(0), block(1)];
            amx.clear_two();
            for chunk in 0..num_chunks {
                let keys = blocks.map(|block| block.wrapping_add(chunk * ROW_BYTES));
                for keys in &keys[..num_blocks] {
                    let simd = Avx512::from(amx);
                    let lines = self.prefetch.ahead(simd, *keys);
                    prefetch_bytes(simd, lines, AHEAD_LINES * ROW_BYTES);
                }
                let queries = queries.wrapping_add(chunk * TILE_ELEMENTS).cast();
                // SAFETY: sixteen slots each, for which the caller vouches, and a tile of queries.
                unsafe { amx.add_products_of_rows(keys, stride, queries) };
            }
            let scores = &mut scores[start * side_len..];
            let step = LANES * side_len * size_of::<f32>();
            // SAFETY: room for 32 rows of so many scores, and for what the last one has too many.
            unsafe { amx.store_two(scores.as_mut_ptr().cast(), step, side_len * size_of::<f32>()) };
        }
    }

    /// Turns scores into weights, as `softmax_amx` does; those that a row does not see weigh nothing. Returns the largest
    /// scores, times the factor.
    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma,f16c")]
    unsafe fn soften<const R: usize>(&mut self, visible: &[usize; R]) -> [f32; LANES] {
        let len = visible[R - 1].next_multiple_of(LANES) * side_len(R);
        let scores = self.buffers.scores.slice(0..len).as_chunks_mut::<LANES>().0;
        hide(scores, visible);
        let mut largest = [_mm512_set1_ps(f32::NEG_INFINITY); 4];
        for scores in scores.as_chunks::<4>().0 {
            for (largest, scores) in largest.iter_mut().zip(scores) {
                // SAFETY: sixteen numbers.
                *largest = _mm512_max_ps(*largest, unsafe { _mm512_loadu_ps(scores.as_ptr()) });
            }
        }
        let [a, b, c, d] = largest;
        let mut largest = _mm512_max_ps(_mm512_max_ps(a, b), _mm512_max_ps(c, d));
        // Lanes of the same row.
        largest = _mm512_max_ps(largest, _mm512_shuffle_f32x4::<0x4e>(largest, largest));
        if side_len(R) == SIDE {
            largest = _mm512_max_ps(largest, _mm512_shuffle_f32x4::<0xb1>(largest, largest));
        }
        self.amx.keep_awake();
        let factor = _mm512_set1_ps(self.tile.scale * std::f32::consts::LOG2_E);
        let shift = _mm512_max_ps(_mm512_set1_ps(f32::MIN), _mm512_mul_ps(largest, factor));
        for scores in scores {
            // SAFETY: sixteen numbers.
            unsafe {
                let powers = exp2(_mm512_fmsub_ps(_mm512_loadu_ps(scores.as_ptr()), factor, shift));
                _mm512_storeu_ps(scores.as_mut_ptr(), round(powers));
            }
        }
        let mut lanes = [0.0; LANES];
        // SAFETY: sixteen numbers.
        unsafe { _mm512_storeu_ps(lanes.as_mut_ptr(), shift) };
        lanes
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
        let (simd, cache) = (Avx512::from(self.amx), &self.tile.value_cache);
        let stride = cache.slot_stride * cache.dtype.size();
        let mut halves = [std::ptr::null::<u8>(); 2];
        for (half, values) in halves.iter_mut().enumerate() {
            if half * LANES < count {
                let position = self.idx * SPLIT_LEN + start + half * LANES;
                *values = sixteen_slots(self.tile, cache, position).wrapping_add(column * 2);
            }
        }
        let side_len = side_len(R);
        let weights = self
            .buffers
            .scores
            .slice(start * side_len..(start + DEPTH) * side_len);
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
            self.amx.keep_awake();
            let (sums, totals) = (&mut sums[parity], &mut totals[parity]);
            for step in 0..LANES {
                let position = 2 * step + parity;
                if !FULL && position >= count {
                    break;
                }
                let weights = &weights[position * side_len..(position + 1) * side_len];
                for (total, weights) in totals.iter_mut().zip(weights.as_chunks::<SIDE>().0) {
                    // SAFETY: four numbers.
                    *total = _mm_add_ps(*total, unsafe { _mm_loadu_ps(weights.as_ptr()) });
                }
                let values = halves[position / LANES].wrapping_add(position % LANES * stride);
                for n in 0..N {
                    let line = step * N + n;
                    simd.prefetch(ahead[line / LANES].wrapping_add(line % LANES * ROW_BYTES));
                    // SAFETY: 32 elements of a slot, for which the caller vouches.
                    let columns = unsafe { _mm512_loadu_ps(values.wrapping_add(n * ROW_BYTES).cast()) };
                    let columns = widen(columns);
                    for row in 0..R {
                        let weight = _mm512_set1_ps(weights[row]);
                        for half in 0..2 {
                            sums[row][n][half] = _mm512_fmadd_ps(weight, columns[half], sums[row][n][half]);
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

/// Replaces the scores that a row does not see by minus infinity.
#[inline]
#[target_feature(enable = "avx512f")]
fn hide<const R: usize>(scores: &mut [[f32; LANES]], visible: &[usize; R]) {
    let keys_each = LANES / side_len(R);
    // Later rows see more.
    let first = visible[0] / keys_each;
    let mut limits = [0_i32; LANES];
    for (lane, limit) in limits.iter_mut().enumerate() {
        let visible = visible
            .get(lane % side_len(R))
            .map_or(0, |visible| visible.saturating_sub(lane / side_len(R)));
        *limit = i32::try_from(visible).expect("at most a split");
    }
    for (idx, scores) in scores.iter_mut().enumerate().skip(first) {
        let key = i32::try_from(idx * keys_each).expect("at most a split");
        // SAFETY: sixteen numbers each.
        unsafe {
            let limits = _mm512_loadu_si512(limits.as_ptr().cast());
            let seen = _mm512_cmpgt_epi32_mask(limits, _mm512_set1_epi32(key));
            let nothing = _mm512_set1_ps(f32::NEG_INFINITY);
            let shown = _mm512_mask_mov_ps(nothing, seen, _mm512_loadu_ps(scores.as_ptr()));
            _mm512_storeu_ps(scores.as_mut_ptr(), shown);
        }
    }
}

#[cfg(test)]
mod tests;
mod vectors;
