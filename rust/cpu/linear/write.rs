//! What is done to sums that are complete, on their way to the result: bias, gate, rounding, addition to the residual.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::marker::PhantomData;
use std::ops::Range;

use super::Linear;
use super::piece::{Meanwhile, MicroKernel};
use crate::cpu::activation::silu;
use crate::cpu::element::{Dtype, load_row, load_vector, round_vector, store_row, store_vector};
use crate::cpu::isa::{LANES, Simd};
use crate::memory::CACHE_LINE_BYTES;

/// Rows of two panels that are written at a time while a tile is multiplied: those of a block take 16 steps along K.
const ROWS_A_STEP: usize = 2;

/// Sums of a block of rows that are complete, and not yet written.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Rows of the result.
    pub(super) rows: Range<usize>,
    /// Their panels.
    pub(super) panels: Range<usize>,
    /// `[rows, PARTS, panels * LANES]`, dense: the parts of a sum are still to be added.
    pub(super) sums: *const f32,
}

impl Block {
    /// Of rows that are so many parts of one of the result each.
    #[inline(always)]
    pub(super) fn new(parts: usize, rows: &Range<usize>, panels: &Range<usize>, sums: *const f32) -> Self {
        Self {
            rows: rows.start / parts..rows.end / parts,
            panels: panels.clone(),
            sums,
        }
    }

    /// Of no rows.
    pub(super) fn empty() -> Self {
        Self {
            rows: 0..0,
            panels: 0..0,
            sums: std::ptr::null(),
        }
    }
}

/// Writes a block while a tile is multiplied, which leaves few instructions to each step: it is for sums of whole pairs
/// of panels whose columns are all there, and results in bf16 or f32. Pair by pair, row by row.
pub(super) struct Writing<'k, S, M> {
    simd: S,
    kernel: PhantomData<M>,
    is_gated: bool,
    adds: bool,
    /// Of the pairs that are left; empty if there is none.
    bias: &'k [[[f32; LANES]; 2]],
    num_rows: usize,
    /// Pairs in a row of sums, and those of them that are left, the present one included.
    num_pairs: usize,
    pairs_left: usize,
    /// Rows of the present pair that are left.
    rows_left: usize,
    /// Sums of the next row, or of its first part.
    sums: *const [[f32; LANES]; 2],
    /// Where its results go, and bytes from there to those of the row after it and of the next pair.
    out: *mut u8,
    out_stride: usize,
    pair_bytes: usize,
    dtype: Dtype,
}

impl<'k, S: Simd, M: MicroKernel> Writing<'k, S, M> {
    /// Begins to write a block; if it is not such a one, it is written at once.
    ///
    /// # Safety
    /// As `write_block`, until nothing is left.
    #[inline(always)]
    pub(super) unsafe fn begin(simd: S, call: &'k Linear<'k>, block: &Block) -> Self {
        let (weight, out) = (call.weight, &call.out);
        let is_gated = weight.is_gated();
        let width = if is_gated { LANES } else { 2 * LANES };
        let column = block.panels.start / 2 * width;
        let num_pairs = block.panels.len() / 2;
        let are_pairs = block.panels.start.is_multiple_of(2) && block.panels.len().is_multiple_of(2);
        let is_plain = out.dtype != Dtype::F16 && are_pairs && column + num_pairs * width <= out.width;
        if !is_plain {
            // SAFETY: passed on.
            unsafe { write_block::<S, M>(simd, call, block) };
        }
        let bias = weight.bias().as_chunks().0.get(block.panels.clone());
        let num_rows = if is_plain { block.rows.len() } else { 0 };
        Self {
            simd,
            kernel: PhantomData,
            is_gated,
            adds: call.adds,
            bias: bias.unwrap_or_default().as_chunks().0,
            num_rows,
            num_pairs,
            pairs_left: num_pairs,
            rows_left: num_rows,
            sums: block.sums.cast(),
            out: out.at(block.rows.start, column),
            out_stride: out.row_stride * out.dtype.size(),
            pair_bytes: width * out.dtype.size(),
            dtype: out.dtype,
        }
    }

    /// Writes a row of two panels.
    ///
    /// # Safety
    /// There is one left, and whoever called `begin` vouches for sums and results.
    #[inline(always)]
    unsafe fn write_pair(&self) {
        let (simd, out) = (self.simd, self.out);
        // SAFETY: passed on; the parts of a row follow each other.
        unsafe {
            let part = |part: usize| self.sums.wrapping_add(part * self.num_pairs);
            let [mut first, mut second] = load_columns(simd, part(M::PARTS - 1));
            for idx in (0..M::PARTS - 1).rev() {
                let [first_part, second_part] = load_columns(simd, part(idx));
                (first, second) = (simd.add(first, first_part), simd.add(second, second_part));
            }
            if let Some([first_bias, second_bias]) = self.bias.first() {
                first = simd.add(first, simd.load(first_bias));
                second = simd.add(second, simd.load(second_bias));
            }
            if self.is_gated {
                let result = simd.mul(silu(simd, first), second);
                store_vector(simd, self.dtype, self.summed(result, out), out);
            } else {
                // The next panels of these rows are written there. A load or a store that finds its line nowhere near
                // holds up those after it; a gate, which takes more instructions, leaves them the time.
                let next = out.wrapping_add(self.pair_bytes);
                simd.prefetch(next);
                if self.pair_bytes > CACHE_LINE_BYTES {
                    simd.prefetch(next.wrapping_add(CACHE_LINE_BYTES));
                }
                let second_out = out.wrapping_add(LANES * self.dtype.size());
                let columns = [self.summed(first, out), self.summed(second, second_out)];
                store_columns(simd, self.dtype, columns, out);
            }
        }
    }

    /// A vector of results, added to what lies where it goes, if the call adds.
    ///
    /// # Safety
    /// As `add_rounded`.
    #[inline(always)]
    unsafe fn summed(&self, vector: S::V, out: *const u8) -> S::V {
        if self.adds {
            // SAFETY: passed on.
            unsafe { add_rounded(self.simd, self.dtype, vector, out) }
        } else {
            vector
        }
    }

    /// Turns to the first row of the next pair, if there is one.
    #[inline(always)]
    fn next_pair(&mut self) {
        if self.pairs_left > 1 {
            self.pairs_left -= 1;
            self.rows_left = self.num_rows;
            self.bias = self.bias.get(1..).unwrap_or_default();
            let sums_before = self.num_rows * M::PARTS * self.num_pairs;
            self.sums = self.sums.wrapping_sub(sums_before).wrapping_add(1);
            let out = self.out.wrapping_sub(self.num_rows * self.out_stride);
            self.out = out.wrapping_add(self.pair_bytes);
        }
    }
}

impl<S: Simd, M: MicroKernel> Meanwhile for Writing<'_, S, M> {
    #[inline(always)]
    fn next(&mut self) -> bool {
        for _ in 0..ROWS_A_STEP.div_ceil(M::PARTS).min(self.rows_left) {
            // SAFETY: there is one left; whoever called `begin` vouches for the rest.
            unsafe { self.write_pair() };
            self.sums = self.sums.wrapping_add(M::PARTS * self.num_pairs);
            self.out = self.out.wrapping_add(self.out_stride);
            self.rows_left -= 1;
        }
        if self.rows_left == 0 && self.num_rows > 0 {
            self.next_pair();
        }
        self.rows_left > 0
    }
}

/// What lies at `out`, plus a vector that is rounded first.
///
/// # Safety
/// `out` is readable for sixteen elements of the type, and nobody else writes them.
#[inline(always)]
unsafe fn add_rounded<S: Simd>(simd: S, dtype: Dtype, vector: S::V, out: *const u8) -> S::V {
    // SAFETY: passed on.
    simd.add(
        unsafe { load_vector(simd, dtype, out) },
        round_vector(simd, dtype, vector),
    )
}

/// Sums of two panels.
///
/// # Safety
/// They are readable.
#[inline(always)]
unsafe fn load_columns<S: Simd>(simd: S, sums: *const [[f32; LANES]; 2]) -> [S::V; 2] {
    // SAFETY: passed on.
    let [first, second] = unsafe { &*sums };
    [simd.load(first), simd.load(second)]
}

/// Rounds and stores results of two panels.
///
/// # Safety
/// `out` is writable for them, and nobody else accesses it.
#[inline(always)]
unsafe fn store_columns<S: Simd>(simd: S, dtype: Dtype, [first, second]: [S::V; 2], out: *mut u8) {
    // SAFETY: passed on.
    unsafe {
        if dtype == Dtype::Bf16 {
            simd.store_bf16_pair([first, second], out);
        } else {
            store_vector(simd, dtype, first, out);
            store_vector(simd, dtype, second, out.wrapping_add(LANES * dtype.size()));
        }
    }
}

/// Writes a block.
///
/// # Safety
/// The sums are readable; the results are within `out`, which is writable, and nobody else accesses them.
#[inline(always)]
unsafe fn write_block<S: Simd, M: MicroKernel>(simd: S, call: &Linear<'_>, block: &Block) {
    let stride = M::PARTS * block.panels.len() * LANES;
    for (idx, row) in block.rows.clone().enumerate() {
        // SAFETY: the caller vouches for the sums.
        let sums = unsafe { std::slice::from_raw_parts(block.sums.wrapping_add(idx * stride), stride) };
        write_row(simd, call, row, block.panels.clone(), sums.as_chunks().0);
    }
}

/// Adds the parts and the bias, applies the gate, rounds and writes. `sums`: those of some panels, part by part.
#[inline(always)]
fn write_row<S: Simd>(simd: S, call: &Linear<'_>, row: usize, panels: Range<usize>, sums: &[[f32; LANES]]) {
    let weight = call.weight;
    // Gated columns and those that gate them come by turns.
    let turns = if weight.is_gated() { 2 } else { 1 };
    for idx in 0..panels.len() / turns {
        let result = if weight.is_gated() {
            let gate = silu(simd, total(simd, call, &panels, 2 * idx, sums));
            simd.mul(gate, total(simd, call, &panels, 2 * idx + 1, sums))
        } else {
            total(simd, call, &panels, idx, sums)
        };
        write(simd, call, row, (panels.start / turns + idx) * LANES, result);
    }
}

/// The sums of the columns of the panel `idx` of `panels`, the last parts first, and the bias.
#[inline(always)]
fn total<S: Simd>(
    simd: S,
    call: &Linear<'_>,
    panels: &Range<usize>,
    idx: usize,
    sums: &[[f32; LANES]],
) -> S::V {
    let mut place = sums.len() - panels.len() + idx;
    let mut total = simd.load(&sums[place]);
    while place >= panels.len() {
        place -= panels.len();
        total = simd.add(total, simd.load(&sums[place]));
    }
    match call.weight.bias().as_chunks().0.get(panels.start + idx) {
        Some(bias) => simd.add(total, simd.load(bias)),
        None => total,
    }
}

/// Rounds and writes sixteen columns, or those of them that there are, added to what lies there if the call adds.
#[inline(always)]
fn write<S: Simd>(simd: S, call: &Linear<'_>, row: usize, column: usize, vector: S::V) {
    let Linear { out, adds, .. } = call;
    let len = LANES.min(out.width.saturating_sub(column));
    let place = out.at(row, column);
    // SAFETY: the columns are within `out`, for which the caller of `Linear::run` vouches, and no other piece has them.
    unsafe {
        if len == LANES {
            let vector = if *adds {
                add_rounded(simd, out.dtype, vector, place)
            } else {
                vector
            };
            store_vector(simd, out.dtype, vector, place);
        } else if len > 0 {
            let mut lanes = [0.0; LANES];
            if *adds {
                load_row(out.dtype, place, &mut lanes[..len]);
                let rounded = round_vector(simd, out.dtype, vector);
                simd.store(simd.add(simd.load(&lanes), rounded), &mut lanes);
            } else {
                simd.store(vector, &mut lanes);
            }
            store_row(out.dtype, &lanes[..len], place);
        }
    }
}
