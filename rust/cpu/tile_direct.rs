//! The loops of attention on a tile of few rows, as decodes are: keys and values straight from the cache.
//!
//! Such a tile is bound by reading them. So nothing is copied: sixteen keys are transposed in registers right before they
//! are multiplied, and values are widened where they are added. One line is asked for ahead for every line that is read,
//! evenly among the arithmetic, so that memory delivers behind it. The sums take their products in the order of
//! `tile_loops`. That takes the 32 registers of AVX-512; other instruction sets copy.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::element::{Bf16, Dtype, Element, F16, F32};
use super::isa::{Kernel, LANES, Simd};
use super::prefetch::{AHEAD_LINES, Prefetch};
use super::tile_loops::{
    ROW_TILE, SPLIT_LEN, Slots, by_dtype, load_tail, partial_row_len, vector_at, vector_at_mut,
};
use crate::memory::CACHE_LINE_BYTES;

/// Most rows of such a tile. Keys are transposed again for every `ROW_TILE` of them, which still takes less time than
/// reading them from memory.
const MAX_ROWS: usize = 2 * ROW_TILE;

/// Whether tiles of so many rows, all of which see the same, are computed by these loops.
#[inline(always)]
pub(super) fn suits<S: Simd>(num_rows: usize) -> bool {
    S::TILE_VECTORS == ROW_TILE && num_rows <= MAX_ROWS
}

/// Lines to ask for, handed out a few at a time.
struct Ahead<'p, 'a> {
    prefetch: &'p mut Prefetch<'a>,
    lines: *const u8,
    num_left: usize,
    /// Whether the caller goes on; if not, it reads once more what it has asked the successors of.
    goes_on: bool,
}

impl<'p, 'a> Ahead<'p, 'a> {
    fn new(prefetch: &'p mut Prefetch<'a>) -> Self {
        Self {
            prefetch,
            lines: std::ptr::null(),
            num_left: 0,
            goes_on: true,
        }
    }

    /// The next lines, at most `AHEAD_LINES`; those at `here` where there are none. A rest that is too short is dropped: it
    /// is left where a head has an odd vector of columns.
    #[inline(always)]
    fn take<S: Simd>(&mut self, simd: S, num_lines: usize, here: *const u8) -> *const u8 {
        if !self.goes_on {
            return here;
        }
        if self.num_left < num_lines {
            self.lines = self.prefetch.ahead(simd, here);
            self.num_left = AHEAD_LINES;
        }
        let lines = self.lines;
        self.lines = lines.wrapping_add(num_lines * CACHE_LINE_BYTES);
        self.num_left -= num_lines;
        lines
    }
}

/// Scores of rows against the next keys of a sequence; the last key fills the last sixteen up. A kernel of its own, so
/// that it is compiled once, not wherever a split is computed.
pub(super) struct ScoreKeys<'k, 's, 'p> {
    pub(super) slots: Slots<'s>,
    pub(super) num_keys: usize,
    pub(super) prefetch: &'k mut Prefetch<'p>,
    /// `[rows][head_dim]`
    pub(super) query: &'k [f32],
    /// `[rows][SPLIT_LEN]`, written.
    pub(super) scores: &'k mut [f32],
}

impl Kernel for ScoreKeys<'_, '_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if const { S::TILE_VECTORS == ROW_TILE } {
            // SAFETY: whoever makes one vouches for the slots.
            unsafe { by_dtype!(self.slots.dtype(), score_by_rows::<S>(simd, self)) }
        }
    }
}

/// `ScoreKeys` for elements of one type.
#[inline(always)]
unsafe fn score_by_rows<S: Simd, E: Element>(simd: S, work: ScoreKeys<'_, '_, '_>) {
    let ScoreKeys {
        mut slots,
        num_keys,
        prefetch,
        query,
        scores,
    } = work;
    let head_dim = slots.head_dim();
    let mut ahead = Ahead::new(prefetch);
    for first in (0..num_keys).step_by(LANES) {
        let keys = slots.next_rows(LANES.min(num_keys - first));
        let tiles = scores[first..].chunks_mut(ROW_TILE * SPLIT_LEN);
        for (idx, (query, scores)) in query.chunks(ROW_TILE * head_dim).zip(tiles).enumerate() {
            ahead.goes_on = idx == 0;
            let ahead = &mut ahead;
            // SAFETY: the caller vouches for the slots.
            unsafe {
                match query.len() / head_dim {
                    1 => score_sixteen::<S, E, 1>(simd, &keys, ahead, query, scores),
                    2 => score_sixteen::<S, E, 2>(simd, &keys, ahead, query, scores),
                    3 => score_sixteen::<S, E, 3>(simd, &keys, ahead, query, scores),
                    _ => score_sixteen::<S, E, ROW_TILE>(simd, &keys, ahead, query, scores),
                }
            }
        }
    }
}

/// Scores of R rows against sixteen keys, transposed sixteen elements at a time.
#[inline(always)]
unsafe fn score_sixteen<S: Simd, E: Element, const R: usize>(
    simd: S,
    keys: &[*const u8; LANES],
    ahead: &mut Ahead<'_, '_>,
    query: &[f32],
    scores: &mut [f32],
) {
    let head_dim = query.len() / R;
    let whole = head_dim - head_dim % LANES;
    let query: [&[f32]; R] = std::array::from_fn(|row| &query[row * head_dim..][..head_dim]);
    let mut sums = [simd.splat(0.0); R];
    // Plain loops: the closures of an array's methods are not compiled for the instruction set.
    let mut rows = [simd.splat(0.0); LANES];
    let bytes = LANES * E::DTYPE.size();
    for first in (0..whole).step_by(LANES) {
        let offset = first * E::DTYPE.size();
        let lines = ahead.take(simd, LANES * bytes / CACHE_LINE_BYTES, keys[0]);
        for (idx, (row, key)) in rows.iter_mut().zip(keys).enumerate() {
            if (idx * bytes).is_multiple_of(CACHE_LINE_BYTES) {
                simd.prefetch(lines.wrapping_add(idx * bytes));
            }
            // SAFETY: the caller vouches for `head_dim` elements of each key.
            *row = unsafe { E::load(simd, key.wrapping_add(offset)) };
        }
        let columns = simd.transpose(rows);
        for d in 0..LANES {
            for row in 0..R {
                sums[row] = simd.mul_add(simd.splat(query[row][first + d]), columns[d], sums[row]);
            }
        }
    }
    if whole < head_dim {
        for (row, key) in rows.iter_mut().zip(keys) {
            let source = key.wrapping_add(whole * E::DTYPE.size());
            // SAFETY: as above.
            *row = unsafe { load_tail::<S, E>(simd, source, head_dim - whole) };
        }
        for (d, column) in simd
            .transpose(rows)
            .into_iter()
            .enumerate()
            .take(head_dim - whole)
        {
            for row in 0..R {
                sums[row] = simd.mul_add(simd.splat(query[row][whole + d]), column, sums[row]);
            }
        }
    }
    for (row, sum) in sums.into_iter().enumerate() {
        simd.store(sum, vector_at_mut(scores, row * SPLIT_LEN));
    }
}

/// Adds the next values of a sequence, weighted, to the sums of rows. A kernel of its own, as `ScoreKeys`.
pub(super) struct WeighValues<'k, 's, 'p> {
    pub(super) slots: Slots<'s>,
    pub(super) num_keys: usize,
    pub(super) prefetch: &'k mut Prefetch<'p>,
    /// `[rows][SPLIT_LEN]`
    pub(super) weights: &'k [f32],
    /// Rows of partial results.
    pub(super) sums: &'k mut [f32],
}

impl Kernel for WeighValues<'_, '_, '_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        if const { S::TILE_VECTORS == ROW_TILE } {
            // SAFETY: whoever makes one vouches for the slots.
            unsafe { by_dtype!(self.slots.dtype(), weigh_by_rows::<S>(simd, self)) }
        }
    }
}

/// `WeighValues` for elements of one type.
#[inline(always)]
unsafe fn weigh_by_rows<S: Simd, E: Element>(simd: S, work: WeighValues<'_, '_, '_>) {
    let WeighValues {
        mut slots,
        num_keys,
        prefetch,
        weights,
        sums,
    } = work;
    let row_len = partial_row_len(slots.head_dim());
    let mut ahead = Ahead::new(prefetch);
    for first in (0..num_keys).step_by(LANES) {
        let count = LANES.min(num_keys - first);
        let values = Values {
            rows: slots.next_rows(count),
            count,
            head_dim: slots.head_dim(),
        };
        let tiles = weights[first..].chunks(ROW_TILE * SPLIT_LEN);
        for (idx, (sums, weights)) in sums.chunks_mut(ROW_TILE * row_len).zip(tiles).enumerate() {
            ahead.goes_on = idx == 0;
            let ahead = &mut ahead;
            // SAFETY: the caller vouches for the slots.
            unsafe {
                match sums.len() / row_len {
                    1 => weigh_sixteen::<S, E, 1>(simd, &values, ahead, weights, sums),
                    2 => weigh_sixteen::<S, E, 2>(simd, &values, ahead, weights, sums),
                    3 => weigh_sixteen::<S, E, 3>(simd, &values, ahead, weights, sums),
                    _ => weigh_sixteen::<S, E, ROW_TILE>(simd, &values, ahead, weights, sums),
                }
            }
        }
    }
}

/// Up to sixteen values.
struct Values {
    rows: [*const u8; LANES],
    count: usize,
    head_dim: usize,
}

/// Adds the values to R rows, four vectors of columns at a time where there are so many.
#[inline(always)]
unsafe fn weigh_sixteen<S: Simd, E: Element, const R: usize>(
    simd: S,
    values: &Values,
    ahead: &mut Ahead<'_, '_>,
    weights: &[f32],
    sums: &mut [f32],
) {
    let whole = values.head_dim / LANES;
    let mut column = 0;
    // SAFETY: passed on.
    unsafe {
        while column < whole {
            if column + 4 <= whole {
                weigh_columns::<S, E, R, 4>(simd, values, ahead, weights, sums, column);
                column += 4;
            } else {
                weigh_columns::<S, E, R, 1>(simd, values, ahead, weights, sums, column);
                column += 1;
            }
        }
        if !values.head_dim.is_multiple_of(LANES) {
            weigh_tail::<S, E, R>(simd, values, weights, sums);
        }
    }
}

/// R rows by C vectors of columns from a vector on, all sums in registers.
#[inline(always)]
unsafe fn weigh_columns<S: Simd, E: Element, const R: usize, const C: usize>(
    simd: S,
    values: &Values,
    ahead: &mut Ahead<'_, '_>,
    weights: &[f32],
    sums: &mut [f32],
    column: usize,
) {
    let row_len = partial_row_len(values.head_dim);
    let mut totals = [[simd.splat(0.0); C]; R];
    for (row, totals) in totals.iter_mut().enumerate() {
        for (c, total) in totals.iter_mut().enumerate() {
            *total = simd.load(vector_at(sums, row * row_len + (column + c) * LANES));
        }
    }
    let key_bytes = C * LANES * E::DTYPE.size();
    let step = LANES.min(AHEAD_LINES * CACHE_LINE_BYTES / key_bytes);
    for first in (0..values.count).step_by(step) {
        let lines = ahead.take(simd, step * key_bytes / CACHE_LINE_BYTES, values.rows[first]);
        for key in first..values.count.min(first + step) {
            for line in 0..key_bytes.div_ceil(CACHE_LINE_BYTES) {
                simd.prefetch(lines.wrapping_add((key - first) * key_bytes + line * CACHE_LINE_BYTES));
            }
            let source = values.rows[key].wrapping_add(column * LANES * E::DTYPE.size());
            let mut columns = [simd.splat(0.0); C];
            for (c, vector) in columns.iter_mut().enumerate() {
                // SAFETY: the caller vouches for the elements of each value.
                *vector = unsafe { E::load(simd, source.wrapping_add(c * LANES * E::DTYPE.size())) };
            }
            for (row, totals) in totals.iter_mut().enumerate() {
                let weight = simd.splat(weights[row * SPLIT_LEN + key]);
                for (total, column) in totals.iter_mut().zip(columns) {
                    *total = simd.mul_add(weight, column, *total);
                }
            }
        }
    }
    for (row, totals) in totals.into_iter().enumerate() {
        for (c, total) in totals.into_iter().enumerate() {
            simd.store(total, vector_at_mut(sums, row * row_len + (column + c) * LANES));
        }
    }
}

/// R rows by the columns behind the last whole vector.
#[inline(always)]
unsafe fn weigh_tail<S: Simd, E: Element, const R: usize>(
    simd: S,
    values: &Values,
    weights: &[f32],
    sums: &mut [f32],
) {
    let (row_len, rest) = (partial_row_len(values.head_dim), values.head_dim % LANES);
    let column = values.head_dim - rest;
    for (key, value) in values.rows[..values.count].iter().enumerate() {
        // SAFETY: the caller vouches for the elements of each value.
        let tail = unsafe { load_tail::<S, E>(simd, value.wrapping_add(column * E::DTYPE.size()), rest) };
        for row in 0..R {
            let place = vector_at_mut(sums, row * row_len + column);
            let weight = simd.splat(weights[row * SPLIT_LEN + key]);
            simd.store(simd.mul_add(weight, tail, simd.load(place)), place);
        }
    }
}
