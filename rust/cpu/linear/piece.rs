//! A piece of a product, computed by one thread: some rows of x against some panels.
//!
//! Loops from the outside in: chunks of rows that stay in the second-level cache, groups of panels, cuts of K that let
//! the group stay in the nearest cache while all rows of the chunk pass by, blocks of rows. The innermost step is a
//! tile. When the last cut of a block is done, its sums are still near: bias, activation and rounding follow at once.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::super::activation::silu;
use super::super::element::{Dtype, store_row};
use super::super::isa::{AlignedBuffer, Kernel, LANES, Simd};
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::fma::{Bf16, F16, F32, Fma};
use super::{Arithmetic, Linear};
use crate::cpu::tensor::MatrixView;

/// Bytes of x that are wanted again for every group of panels: half of a second-level cache.
const CHUNK_BYTES: usize = 1 << 20;
/// Most rows of a chunk, and what their number is a multiple of.
const CHUNK_ROWS: (usize, usize) = (256, 32);

/// Rows of a chunk, where a row of x has so many bytes.
pub(super) fn rows_per_chunk(row_bytes: usize) -> usize {
    let (most, step) = CHUNK_ROWS;
    (CHUNK_BYTES / row_bytes / step * step).clamp(step, most)
}

/// Which of the blocks of rows that are multiplied by the same panels one after another.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Pass {
    /// There is no other.
    Only,
    /// The first one.
    First,
    /// One of the others, which find the panels in a cache.
    Later,
}

/// One tile: rows of x times panels, summed over a cut of K.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile {
    pub(super) num_rows: usize,
    pub(super) num_panels: usize,
    /// Elements along K, whole steps.
    pub(super) depth: usize,
    pub(super) x: *const u8,
    /// Bytes from a row of x to the next.
    pub(super) x_stride: usize,
    pub(super) panels: *const u8,
    /// Bytes from a panel to the next.
    pub(super) panel_stride: usize,
    /// `[num_rows, num_panels * LANES]`, f32.
    pub(super) sums: *mut f32,
    /// Elements from a row of sums to the next.
    pub(super) sums_stride: usize,
    /// Whether to go on from what `sums` holds.
    pub(super) resumes: bool,
    /// Who else multiplies these panels.
    pub(super) pass: Pass,
    /// What the thread will probably read after these panels: to be fetched meanwhile, and not otherwise accessed.
    pub(super) ahead: *const u8,
}

/// The inner loops of an arithmetic. An element's sum takes its products in the same order whatever the size of the
/// tile.
pub(super) trait MicroKernel: Copy {
    /// Most rows of a tile.
    const MAX_ROWS: usize;
    /// Elements along K after which the sums are put aside, if there is more than one block of rows.
    const MAX_DEPTH: usize;

    /// Most panels of a tile when there are so many rows.
    fn max_panels(self, num_rows: usize) -> usize;

    /// Computes a tile.
    ///
    /// # Safety
    /// Rows and panels are readable, the sums writable, for what the tile says; numbers of rows and panels are at
    /// least 1 and no more than the limits.
    unsafe fn tile(self, tile: &Tile);
}

/// Some rows of a call against some panels.
#[derive(Clone, Debug)]
pub(super) struct Piece<'k> {
    pub(super) call: &'k Linear<'k>,
    /// x as the arithmetic reads it.
    pub(super) x: MatrixView,
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
    /// Panels that the thread will probably read after these, if it is known; else some that it has read.
    pub(super) then: *const u8,
}

// SAFETY: `then` is never followed, only fetched from; the rest may be sent.
unsafe impl Send for Piece<'_> {}

impl Kernel for &mut Piece<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match (self.call.weight.arithmetic(), self.call.weight.dtype()) {
            (Arithmetic::Fma(_), Dtype::F32) => self.multiply(simd, Fma::<S, F32>::new(simd)),
            (Arithmetic::Fma(_), Dtype::Bf16) => self.multiply(simd, Fma::<S, Bf16>::new(simd)),
            (Arithmetic::Fma(_), Dtype::F16) => self.multiply(simd, Fma::<S, F16>::new(simd)),
            #[cfg(target_arch = "x86_64")]
            (Arithmetic::DotBf16(dot), _) => self.multiply(simd, dot),
            #[cfg(target_arch = "x86_64")]
            (Arithmetic::Amx(amx), _) => amx::with_tiles(amx, |tiles| self.multiply(simd, tiles)),
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn multiply<S: Simd, M: MicroKernel>(&self, simd: S, kernel: M) {
        let mut sums = AlignedBuffer::default();
        let rows_per_chunk = rows_per_chunk(self.x.row_bytes());
        let num_rows = self.rows.len().min(rows_per_chunk);
        // Gated columns come in pairs of panels, and both must be there when the sums are complete.
        let group = kernel.max_panels(num_rows).next_multiple_of(2);
        sums.reserve(num_rows * group * LANES);
        for first_row in self.rows.clone().step_by(rows_per_chunk) {
            let rows = first_row..self.rows.end.min(first_row + rows_per_chunk);
            for first_panel in self.panels.clone().step_by(group) {
                let panels = first_panel..self.panels.end.min(first_panel + group);
                let sums = sums.slice(0..num_rows * group * LANES);
                self.multiply_group(simd, kernel, rows.clone(), panels, sums);
            }
        }
    }

    /// A chunk of rows against a group of panels.
    #[inline(always)]
    fn multiply_group<S: Simd, M: MicroKernel>(
        &self,
        simd: S,
        kernel: M,
        rows: Range<usize>,
        panels: Range<usize>,
        sums: &mut [f32],
    ) {
        let weight = self.call.weight;
        let depth = weight.depth();
        let stride = panels.len() * LANES;
        let max_panels = kernel.max_panels(rows.len());
        let block = block_len(rows.len(), M::MAX_ROWS);
        let max_depth = if rows.len() > block { M::MAX_DEPTH } else { depth };
        let cut = block_len(depth, max_depth).next_multiple_of(weight.arithmetic().step());
        for first_k in (0..depth).step_by(cut) {
            let next_k = depth.min(first_k + cut);
            for first in rows.clone().step_by(block) {
                let block_rows = first..rows.end.min(first + block);
                // Sums that do not wait for the next cut share one place in the nearest cache.
                let waiting = if cut < depth { first - rows.start } else { 0 };
                let sums = &mut sums[waiting * stride..];
                let pass = if block_rows == rows {
                    Pass::Only
                } else if first == rows.start {
                    Pass::First
                } else {
                    Pass::Later
                };
                for panel in panels.clone().step_by(max_panels) {
                    let next_panel = panel + max_panels;
                    let tile = Tile {
                        num_rows: block_rows.len(),
                        num_panels: max_panels.min(panels.end - panel),
                        depth: next_k - first_k,
                        x: self.x.at(first, first_k),
                        x_stride: self.x.row_stride * self.x.dtype.size(),
                        panels: weight
                            .panel(panel)
                            .wrapping_add(first_k * LANES * weight.dtype().size()),
                        panel_stride: weight.panel_bytes(),
                        sums: sums[(panel - panels.start) * LANES..].as_mut_ptr(),
                        sums_stride: stride,
                        resumes: first_k > 0,
                        pass,
                        ahead: if next_panel < self.panels.end {
                            weight.panel(next_panel)
                        } else {
                            self.then
                        },
                    };
                    // SAFETY: the caller of `Linear::run` vouches for x; panels and sums are ours, and reach as far.
                    unsafe { kernel.tile(&tile) };
                }
                if next_k == depth {
                    self.write_block(simd, block_rows, panels.clone(), sums);
                }
            }
        }
    }

    /// Adds the bias, applies the gate, rounds and writes.
    #[inline(always)]
    fn write_block<S: Simd>(&self, simd: S, rows: Range<usize>, panels: Range<usize>, sums: &mut [f32]) {
        let (weight, out) = (self.call.weight, &self.call.out);
        let stride = panels.len() * LANES;
        for (row, sums) in rows.zip(sums.chunks_mut(stride)) {
            if !weight.bias().is_empty() {
                let bias = &weight.bias()[panels.start * LANES..panels.end * LANES];
                for (sum, bias) in sums.iter_mut().zip(bias) {
                    *sum += bias;
                }
            }
            let mut first_column = panels.start * LANES;
            let mut width = stride;
            if weight.is_gated() {
                gate(simd, sums);
                first_column /= 2;
                width /= 2;
            }
            let width = width.min(out.width - first_column);
            // SAFETY: the columns are within `out`, for which the caller of `Linear::run` vouches, and no other piece
            // has them.
            unsafe { store_row(out.dtype, &sums[..width], out.at(row, first_column)) };
        }
    }
}

/// `silu(gate) * up`: sums hold sixteen columns of one and of the other by turns; the products move to the front.
#[inline(always)]
fn gate<S: Simd>(simd: S, sums: &mut [f32]) {
    let vectors = sums.as_chunks_mut::<LANES>().0;
    for pair in 0..vectors.len() / 2 {
        let gated = silu(simd, simd.load(&vectors[2 * pair]));
        let product = simd.mul(gated, simd.load(&vectors[2 * pair + 1]));
        simd.store(product, &mut vectors[pair]);
    }
}

/// The length of a block when `len` is cut into as few and as equal blocks as `max_len` allows.
#[inline(always)]
fn block_len(len: usize, max_len: usize) -> usize {
    len.div_ceil(len.div_ceil(max_len))
}
