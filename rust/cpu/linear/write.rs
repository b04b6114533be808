//! What is done to sums that are complete: bias, gate and rounding, on their way to the result.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::Linear;
use super::piece::Meanwhile;
use crate::cpu::activation::silu;
use crate::cpu::element::{Dtype, store_row, store_vector};
use crate::cpu::isa::{LANES, Simd};
use crate::cpu::tensor::MatrixView;
use crate::memory::CACHE_LINE_BYTES;

/// Rows that are written at a time while a tile is multiplied: those of a block take 16 steps along K.
const ROWS_A_STEP: usize = 2;

/// Sums of a block of rows that are complete, and not yet written.
#[derive(Clone, Debug)]
pub(super) struct Block {
    /// Rows of the product.
    pub(super) rows: Range<usize>,
    /// Their panels.
    pub(super) panels: Range<usize>,
    /// `[rows, panels * LANES]`, dense.
    pub(super) sums: *const f32,
}

impl Block {
    /// Of no rows.
    pub(super) fn empty() -> Self {
        Self {
            rows: 0..0,
            panels: 0..0,
            sums: std::ptr::null(),
        }
    }
}

/// Writes a block while a tile is multiplied, which leaves few instructions to each step: it is for sums of two panels
/// whose columns are all there, and results in bf16, as layers have them.
pub(super) struct Writing<'k, S> {
    simd: S,
    is_gated: bool,
    bias: Option<[&'k [f32; LANES]; 2]>,
    /// Rows that are left.
    num_rows: usize,
    /// Sums of the next row.
    sums: *const [[f32; LANES]; 2],
    /// Where its results go.
    out: *mut u8,
    /// Bytes from there to those of the row after it.
    out_stride: usize,
}

impl<'k, S: Simd> Writing<'k, S> {
    /// Begins to write a block; if it is not such a one, it is written at once.
    ///
    /// # Safety
    /// As `write_block`, until nothing is left.
    #[inline(always)]
    pub(super) unsafe fn begin(simd: S, call: &'k Linear<'k>, block: &Block) -> Self {
        let (weight, out) = (call.weight, &call.out);
        let is_gated = weight.is_gated();
        let column = block.panels.start * LANES / if is_gated { 2 } else { 1 };
        let num_columns = if is_gated { LANES } else { 2 * LANES };
        let is_plain =
            out.dtype == Dtype::Bf16 && block.panels.len() == 2 && column + num_columns <= out.width;
        if !is_plain {
            // SAFETY: passed on.
            unsafe { write_block(simd, call, block) };
        }
        let bias = weight.bias().as_chunks().0.get(block.panels.clone());
        Self {
            simd,
            is_gated,
            bias: bias.and_then(|bias| Some([bias.first()?, bias.get(1)?])),
            num_rows: if is_plain { block.rows.len() } else { 0 },
            sums: block.sums.cast(),
            out: out.at(block.rows.start, column),
            out_stride: out.row_stride * out.dtype.size(),
        }
    }
}

impl<S: Simd> Meanwhile for Writing<'_, S> {
    #[inline(always)]
    fn next(&mut self) -> bool {
        for _ in 0..ROWS_A_STEP.min(self.num_rows) {
            let simd = self.simd;
            // SAFETY: rows of sums follow each other, and whoever called `begin` vouches for them and for the results.
            unsafe {
                let [mut first, mut second] = (*self.sums).each_ref().map(|sums| simd.load(sums));
                if let Some([first_bias, second_bias]) = self.bias {
                    first = simd.add(first, simd.load(first_bias));
                    second = simd.add(second, simd.load(second_bias));
                }
                // The next panels of these rows are written there. A store that finds its line nowhere near holds up
                // those after it, and at last the tiles.
                simd.prefetch(self.out.wrapping_add(CACHE_LINE_BYTES));
                if self.is_gated {
                    simd.store_bf16(simd.mul(silu(simd, first), second), self.out);
                } else {
                    simd.store_bf16_pair([first, second], self.out);
                }
            }
            self.sums = self.sums.wrapping_add(1);
            self.out = self.out.wrapping_add(self.out_stride);
            self.num_rows -= 1;
        }
        self.num_rows > 0
    }
}

/// Writes a block.
///
/// # Safety
/// The sums are readable; the results are within `out`, which is writable, and nobody else accesses them.
#[inline(always)]
unsafe fn write_block<S: Simd>(simd: S, call: &Linear<'_>, block: &Block) {
    let stride = block.panels.len() * LANES;
    for (idx, row) in block.rows.clone().enumerate() {
        // SAFETY: the caller vouches for the sums.
        let sums = unsafe { std::slice::from_raw_parts(block.sums.wrapping_add(idx * stride), stride) };
        write_row(simd, call, row, block.panels.start, sums.as_chunks().0);
    }
}

/// Adds the bias, applies the gate, rounds and writes.
#[inline(always)]
fn write_row<S: Simd>(simd: S, call: &Linear<'_>, row: usize, first_panel: usize, sums: &[[f32; LANES]]) {
    let (weight, out) = (call.weight, &call.out);
    // Gated columns and those that gate them come by turns.
    let turns = if weight.is_gated() { 2 } else { 1 };
    for idx in 0..sums.len() / turns {
        let result = if weight.is_gated() {
            let [gate, up] = [&sums[2 * idx], &sums[2 * idx + 1]];
            let panel = first_panel + 2 * idx;
            let gate = silu(simd, shifted(simd, call, gate, panel));
            simd.mul(gate, shifted(simd, call, up, panel + 1))
        } else {
            shifted(simd, call, &sums[idx], first_panel + idx)
        };
        write(simd, out, row, (first_panel / turns + idx) * LANES, result);
    }
}

/// Sums of a panel's columns, and the bias.
#[inline(always)]
fn shifted<S: Simd>(simd: S, call: &Linear<'_>, sums: &[f32; LANES], panel: usize) -> S::V {
    let sums = simd.load(sums);
    match call.weight.bias().as_chunks().0.get(panel) {
        Some(bias) => simd.add(sums, simd.load(bias)),
        None => sums,
    }
}

/// Rounds and writes sixteen columns, or those of them that there are.
#[inline(always)]
fn write<S: Simd>(simd: S, out: &MatrixView, row: usize, column: usize, vector: S::V) {
    let len = LANES.min(out.width.saturating_sub(column));
    // SAFETY: the columns are within `out`, for which the caller of `Linear::run` vouches, and no other piece has them.
    unsafe {
        if len == LANES {
            store_vector(simd, out.dtype, vector, out.at(row, column));
        } else if len > 0 {
            let mut lanes = [0.0; LANES];
            simd.store(vector, &mut lanes);
            store_row(out.dtype, &lanes[..len], out.at(row, column));
        }
    }
}
