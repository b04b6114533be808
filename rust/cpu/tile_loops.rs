//! The loops of attention on one tile: widening keys and values, scores, softmax, weighted sums.
//!
//! Everything but the reads of the cache works on f32 in plain slices. `tile` calls these functions and says in which
//! order they add up; no function here may add in an order that depends on how many rows it is given.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use super::element::{Bf16, Dtype, Element, F16, F32, load_row};
use super::isa::{LANES, Simd};
use super::prefetch::Prefetch;
use super::tensor::CacheView;

/// Positions of a split. Part of the definition of the result: another value gives other last bits.
pub(super) const SPLIT_LEN: usize = 256;

/// Keys that are widened at a time; their f32 copies stay in the nearest cache.
pub(super) const KEY_TILE: usize = 64;

/// Query rows whose accumulators share the loads of keys and values.
pub(super) const ROW_TILE: usize = 4;

/// Slots of a sequence in ascending positions.
pub(super) struct Slots<'a> {
    cache: &'a CacheView,
    table: &'a [i32],
    kv_head: usize,
    block_idx: usize,
    offset: usize,
}

impl<'a> Slots<'a> {
    pub(super) fn new(cache: &'a CacheView, table: &'a [i32], kv_head: usize, position: usize) -> Self {
        let (block_idx, offset) = (position / cache.block_size, position % cache.block_size);
        Self {
            cache,
            table,
            kv_head,
            block_idx,
            offset,
        }
    }

    /// Address of the next position's row; None behind the end of the table.
    #[inline(always)]
    pub(super) fn next_row(&mut self) -> Option<*const u8> {
        let block =
            usize::try_from(*self.table.get(self.block_idx)?).expect("checked: no block id is negative");
        let row = self.cache.row(block, self.kv_head, self.offset);
        self.skip(1);
        Some(row)
    }

    /// Elements of a row.
    pub(super) fn head_dim(&self) -> usize {
        self.cache.head_dim
    }

    /// Their type.
    pub(super) fn dtype(&self) -> Dtype {
        self.cache.dtype
    }

    /// Addresses of the next positions' rows, at most sixteen; the last one fills the rest up.
    #[inline(always)]
    pub(super) fn next_rows(&mut self, count: usize) -> [*const u8; LANES] {
        let first = self.next_row().expect("checked: the table holds the sequence");
        let mut rows = [first; LANES];
        if self.offset != 0 && self.offset - 1 + count <= self.cache.block_size {
            // They are in one block, as they mostly are.
            let stride = self.cache.slot_stride * self.cache.dtype.size();
            for (idx, row) in rows.iter_mut().enumerate() {
                *row = first.wrapping_add(idx.min(count - 1) * stride);
            }
            self.skip(count - 1);
            return rows;
        }
        for row in &mut rows[1..count] {
            *row = self.next_row().expect("checked: the table holds the sequence");
        }
        let last = rows[count - 1];
        rows[count..].fill(last);
        rows
    }

    /// Whether a run of slots is an array of f32 rows without gaps, which needs no widening.
    pub(super) fn are_f32_rows(&self) -> bool {
        let cache = self.cache;
        cache.dtype == Dtype::F32
            && cache.slot_stride == cache.head_dim
            && cache.head_dim.is_multiple_of(LANES)
    }

    /// The next slots of one block, at most so many, where they are f32 rows without gaps.
    ///
    /// # Safety
    /// They are readable, and nobody writes them in the lifetime of the result.
    #[inline(always)]
    pub(super) unsafe fn next_run<'r>(&mut self, max_rows: usize) -> &'r [f32] {
        let num_rows = max_rows.min(self.cache.block_size - self.offset);
        let first = self.next_row().expect("checked: the table holds the sequence");
        self.skip(num_rows - 1);
        #[expect(clippy::cast_ptr_alignment, reason = "the rows are f32")]
        // SAFETY: passed on; the rows of a block lie one after the other.
        unsafe {
            std::slice::from_raw_parts(first.cast::<f32>(), num_rows * self.cache.head_dim)
        }
    }

    /// Passes positions of the present block by.
    #[inline(always)]
    fn skip(&mut self, count: usize) {
        self.offset += count;
        if self.offset == self.cache.block_size {
            self.offset = 0;
            self.block_idx += 1;
        }
    }
}

/// Elements of a row of partial results: the values, padded to whole vectors, and one vector for `[largest, total]`.
pub(super) const fn partial_row_len(head_dim: usize) -> usize {
    padded(head_dim) + LANES
}

/// Rounds up to whole vectors.
pub(super) const fn padded(head_dim: usize) -> usize {
    head_dim.next_multiple_of(LANES)
}

/// Reads the last elements of a row, fewer than a vector; zeros pad it.
#[inline(always)]
pub(super) unsafe fn load_tail<S: Simd, E: Element>(simd: S, src: *const u8, len: usize) -> S::V {
    let mut tail = [0.0; LANES];
    // SAFETY: the caller vouches for the elements.
    unsafe { load_row(E::DTYPE, src, &mut tail[..len]) };
    simd.load(&tail)
}

/// Calls `$function` with the element type of `$dtype` as its second parameter.
macro_rules! by_dtype {
    ($dtype:expr, $function:ident::<$simd:ident>($($arg:expr),*)) => {
        match $dtype {
            Dtype::F32 => $function::<$simd, F32>($($arg),*),
            Dtype::Bf16 => $function::<$simd, Bf16>($($arg),*),
            Dtype::F16 => $function::<$simd, F16>($($arg),*),
        }
    };
}
pub(super) use by_dtype;

/// The sixteen numbers from `start` on.
#[inline(always)]
pub(super) fn vector_at(numbers: &[f32], start: usize) -> &[f32; LANES] {
    numbers[start..start + LANES]
        .try_into()
        .expect("a range of sixteen")
}

/// The sixteen numbers from `start` on, to be written.
#[inline(always)]
pub(super) fn vector_at_mut(numbers: &mut [f32], start: usize) -> &mut [f32; LANES] {
    (&mut numbers[start..start + LANES])
        .try_into()
        .expect("a range of sixteen")
}

/// Widens and transposes the next `num_keys` keys into groups of sixteen; the last key fills the last group up. Asks for
/// as many slots ahead.
///
/// # Safety
/// The next `num_keys` slots are readable.
#[inline(always)]
pub(super) unsafe fn pack_keys<S: Simd>(
    simd: S,
    slots: &mut Slots<'_>,
    num_keys: usize,
    prefetch: &mut Prefetch<'_>,
    keys: &mut [f32],
) {
    let head_dim = slots.cache.head_dim;
    for (group, packed) in (0..num_keys)
        .step_by(LANES)
        .zip(keys.chunks_exact_mut(head_dim * LANES))
    {
        let count = LANES.min(num_keys - group);
        let sources = slots.next_rows(count);
        prefetch.advance(simd, count);
        // SAFETY: the caller vouches for the slots.
        unsafe {
            by_dtype!(
                slots.cache.dtype,
                pack_group::<S>(simd, &sources, head_dim, packed)
            );
        };
    }
}

/// Widens and transposes sixteen keys.
#[inline(always)]
unsafe fn pack_group<S: Simd, E: Element>(
    simd: S,
    sources: &[*const u8; LANES],
    head_dim: usize,
    packed: &mut [f32],
) {
    let whole = head_dim - head_dim % LANES;
    // Plain loops: the closures of an array's methods are not compiled for the instruction set.
    let mut rows = [simd.splat(0.0); LANES];
    for first in (0..whole).step_by(LANES) {
        for (row, source) in rows.iter_mut().zip(sources) {
            // SAFETY: the caller vouches for `head_dim` elements at each source.
            *row = unsafe { E::load(simd, source.wrapping_add(first * E::DTYPE.size())) };
        }
        let places = packed[first * LANES..].as_chunks_mut().0;
        for (column, place) in simd.transpose(rows).into_iter().zip(places) {
            simd.store(column, place);
        }
    }
    if whole < head_dim {
        for (row, source) in rows.iter_mut().zip(sources) {
            let source = source.wrapping_add(whole * E::DTYPE.size());
            // SAFETY: as above.
            *row = unsafe { load_tail::<S, E>(simd, source, head_dim - whole) };
        }
        let places = packed[whole * LANES..].as_chunks_mut().0;
        for (column, place) in simd.transpose(rows).into_iter().zip(places) {
            simd.store(column, place);
        }
    }
}

/// Widens the next `num_keys` values, each padded with zeros to whole vectors. Asks for as many slots ahead.
///
/// # Safety
/// The next `num_keys` slots are readable.
#[inline(always)]
pub(super) unsafe fn pack_values<S: Simd>(
    simd: S,
    slots: &mut Slots<'_>,
    num_keys: usize,
    prefetch: &mut Prefetch<'_>,
    values: &mut [f32],
) {
    let head_dim = slots.cache.head_dim;
    for (idx, packed) in values
        .chunks_exact_mut(padded(head_dim))
        .take(num_keys)
        .enumerate()
    {
        if idx % LANES == 0 {
            prefetch.advance(simd, LANES.min(num_keys - idx));
        }
        let source = slots.next_row().expect("checked: the table holds the sequence");
        // SAFETY: the caller vouches for the slots.
        unsafe {
            by_dtype!(slots.cache.dtype, widen::<S>(simd, source, head_dim, packed));
        };
    }
}

/// Widens a row, and pads it with zeros to whole vectors.
#[inline(always)]
unsafe fn widen<S: Simd, E: Element>(simd: S, source: *const u8, head_dim: usize, out: &mut [f32]) {
    let (whole, rest) = (head_dim / LANES, head_dim % LANES);
    let vectors = out.as_chunks_mut::<LANES>().0;
    for (idx, place) in vectors[..whole].iter_mut().enumerate() {
        let address = source.wrapping_add(idx * LANES * E::DTYPE.size());
        // SAFETY: the caller vouches for `head_dim` elements.
        simd.store(unsafe { E::load(simd, address) }, place);
    }
    if rest > 0 {
        let address = source.wrapping_add(whole * LANES * E::DTYPE.size());
        // SAFETY: as above.
        let tail = unsafe { load_tail::<S, E>(simd, address, rest) };
        simd.store(tail, &mut vectors[whole]);
    }
}

/// Scores of up to `ROW_TILE` rows against groups of keys, G groups at a time.
#[inline(always)]
pub(super) fn score_groups<S: Simd, const G: usize>(
    simd: S,
    num_rows: usize,
    query: &[f32],
    keys: &[f32],
    scores: &mut [f32],
) {
    let head_dim = query.len() / num_rows;
    for (idx, keys) in keys.chunks_exact(G * head_dim * LANES).enumerate() {
        let scores = &mut scores[idx * G * LANES..];
        match num_rows {
            1 => score_tile::<S, 1, G>(simd, query, keys, scores),
            2 => score_tile::<S, 2, G>(simd, query, keys, scores),
            3 => score_tile::<S, 3, G>(simd, query, keys, scores),
            _ => score_tile::<S, ROW_TILE, G>(simd, query, keys, scores),
        }
    }
}

/// Scores of R rows against G groups of sixteen keys, all accumulators in registers.
#[expect(
    clippy::needless_range_loop,
    reason = "row and column in each other's company read better"
)]
#[inline(always)]
fn score_tile<S: Simd, const R: usize, const G: usize>(
    simd: S,
    query: &[f32],
    keys: &[f32],
    scores: &mut [f32],
) {
    let head_dim = query.len() / R;
    let query: [&[f32]; R] = std::array::from_fn(|row| &query[row * head_dim..][..head_dim]);
    let keys: [&[[f32; LANES]]; G] =
        std::array::from_fn(|group| &keys.as_chunks::<LANES>().0[group * head_dim..][..head_dim]);
    let mut sums = [[simd.splat(0.0); G]; R];
    for d in 0..head_dim {
        let mut columns = [simd.splat(0.0); G];
        for group in 0..G {
            columns[group] = simd.load(&keys[group][d]);
        }
        for row in 0..R {
            let element = simd.splat(query[row][d]);
            for group in 0..G {
                sums[row][group] = simd.mul_add(element, columns[group], sums[row][group]);
            }
        }
    }
    for row in 0..R {
        for group in 0..G {
            simd.store(
                sums[row][group],
                vector_at_mut(scores, row * SPLIT_LEN + group * LANES),
            );
        }
    }
}

/// Turns the first `num_keys` scores of a row into weights; returns the largest score and the sum of the weights.
#[inline(always)]
pub(super) fn soften<S: Simd>(simd: S, scores: &mut [f32], num_keys: usize) -> (f32, f32) {
    let padded_len = num_keys.next_multiple_of(LANES);
    // The last group may hold scores of later tokens, or of no token.
    scores[num_keys..padded_len].fill(f32::NEG_INFINITY);
    let groups = scores[..padded_len].as_chunks_mut::<LANES>().0;
    let mut largest = simd.splat(f32::NEG_INFINITY);
    for group in groups.iter() {
        largest = simd.max(largest, simd.load(group));
    }
    let largest = simd.max_lane(largest);
    let shift = simd.splat(largest);
    let mut total = simd.splat(0.0);
    for group in groups {
        let weights = simd.exp2(simd.sub(simd.load(group), shift));
        total = simd.add(total, weights);
        simd.store(weights, group);
    }
    (largest, simd.sum_lanes(total))
}

/// Adds the values of consecutive keys, weighted, to the sums of up to `ROW_TILE` rows.
#[inline(always)]
pub(super) fn weigh<S: Simd>(
    simd: S,
    num_rows: usize,
    weights: &[f32],
    values: &[f32],
    sums: &mut [f32],
    width: usize,
) {
    if values.is_empty() {
        return;
    }
    let mut column = 0;
    while column < width {
        if S::TILE_VECTORS == 4 && column + 4 * LANES <= width {
            weigh_columns::<S, 4>(simd, num_rows, weights, values, (sums, width, column));
            column += 4 * LANES;
        } else {
            weigh_columns::<S, 1>(simd, num_rows, weights, values, (sums, width, column));
            column += LANES;
        }
    }
}

/// The part of `weigh` on C vectors of columns from the given one on; `place` is (sums, width, first column).
#[inline(always)]
fn weigh_columns<S: Simd, const C: usize>(
    simd: S,
    num_rows: usize,
    weights: &[f32],
    values: &[f32],
    place: (&mut [f32], usize, usize),
) {
    match num_rows {
        1 => weigh_tile::<S, 1, C>(simd, weights, values, place),
        2 => weigh_tile::<S, 2, C>(simd, weights, values, place),
        3 => weigh_tile::<S, 3, C>(simd, weights, values, place),
        _ => weigh_tile::<S, ROW_TILE, C>(simd, weights, values, place),
    }
}

/// R rows by C vectors of columns, all accumulators in registers.
#[expect(
    clippy::needless_range_loop,
    reason = "row and column in each other's company read better"
)]
#[inline(always)]
fn weigh_tile<S: Simd, const R: usize, const C: usize>(
    simd: S,
    weights: &[f32],
    values: &[f32],
    (sums, width, first): (&mut [f32], usize, usize),
) {
    let row_len = width + LANES;
    let num_keys = values.len() / width;
    let weights: [&[f32]; R] = std::array::from_fn(|row| &weights[row * SPLIT_LEN..][..num_keys]);
    let mut totals = [[simd.splat(0.0); C]; R];
    for row in 0..R {
        for c in 0..C {
            totals[row][c] = simd.load(vector_at(sums, row * row_len + first + c * LANES));
        }
    }
    for (key, value) in values.chunks_exact(width).enumerate() {
        let value = &value[first..first + C * LANES];
        let mut columns = [simd.splat(0.0); C];
        for c in 0..C {
            columns[c] = simd.load(vector_at(value, c * LANES));
        }
        for row in 0..R {
            let weight = simd.splat(weights[row][key]);
            for c in 0..C {
                totals[row][c] = simd.mul_add(weight, columns[c], totals[row][c]);
            }
        }
    }
    for row in 0..R {
        for c in 0..C {
            simd.store(
                totals[row][c],
                vector_at_mut(sums, row * row_len + first + c * LANES),
            );
        }
    }
}
