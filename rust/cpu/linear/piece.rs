//! A piece of a product, computed by one thread: some rows of x against some panels.
//!
//! Loops from the outside in: chunks of rows that stay in the second-level cache, groups of panels, cuts of K that let
//! the group stay in the nearest cache while all rows of the chunk pass by, blocks of rows. The innermost step is a
//! tile. Where a kernel asks for it (`MicroKernel::pass`), rows stay in the nearest cache instead, while a span of
//! groups passes by. When the last cut of a block is done, its sums are still near: bias, activation and rounding
//! follow, at once or, where the multiplier is a unit of its own, while the next tile is multiplied.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::cell::Cell;
use std::ops::Range;

use super::ahead::{self, Ahead, Then};
#[cfg(target_arch = "x86_64")]
use super::amx;
use super::fma::Fma;
use super::near::{CodedPanels, NEAR, TilePanels};
#[cfg(target_arch = "x86_64")]
use super::thirds;
use super::write::{Block, Writing};
use super::{Arithmetic, Linear};
use crate::cpu::element::{Bf16, Dtype, F16, F32};
use crate::cpu::isa::{AlignedBuffer, Kernel, LANES, Simd};
use crate::cpu::tensor::MatrixView;
use crate::memory::CACHE_LINE_BYTES;

/// Bytes of x that are wanted again for every group of panels: half of a second-level cache.
const CHUNK_BYTES: usize = 1 << 20;
/// Most rows of a chunk.
const CHUNK_ROWS: usize = 512;
/// Rows of the largest tile.
const TILE_ROWS: usize = 32;
/// Most blocks of rows for each of which elements of coded panels are put together again: to keep them for that many costs
/// more, since they do not stay in the nearest cache.
const MOST_EXPANDED: usize = 2;
thread_local! {
    /// Of the piece that a thread computes: kept, since a piece of few rows is soon done and fresh memory would have to be
    /// zeroed, which displaces x from the nearest cache.
    static SUMS: Cell<AlignedBuffer> = Cell::default();
}

/// What the rows of a chunk are a multiple of: those of the largest tile that has all parts of each row of x.
pub(super) fn chunk_step(parts: usize) -> usize {
    TILE_ROWS / parts * parts
}

/// Rows of a chunk, where a row that the arithmetic reads has so many bytes, and it reads so many for one of x.
pub(super) fn rows_per_chunk(row_bytes: usize, parts: usize) -> usize {
    let step = chunk_step(parts);
    (CHUNK_BYTES / row_bytes / step * step).clamp(step, CHUNK_ROWS / step * step)
}

/// One tile: rows of x times panels, summed over a cut of K.
#[derive(Clone, Copy, Debug)]
pub(super) struct Tile<'k> {
    pub(super) num_rows: usize,
    pub(super) num_panels: usize,
    /// Elements along K, whole steps.
    pub(super) depth: usize,
    pub(super) x: *const u8,
    /// Bytes from a row of x to the next.
    pub(super) x_stride: usize,
    /// The elements; where they come to be, if they are `coded`.
    pub(super) panels: *const u8,
    /// Bytes from a panel to the next.
    pub(super) panel_stride: usize,
    pub(super) coded: Option<CodedPanels<'k>>,
    /// `[num_rows, num_panels * LANES]`, f32.
    pub(super) sums: *mut f32,
    /// Elements from a row of sums to the next.
    pub(super) sums_stride: usize,
    /// Whether to go on from what `sums` holds.
    pub(super) resumes: bool,
    /// Whether the panels come from memory: no rows before these read them, nor were they asked for.
    pub(super) reads: bool,
    /// What the thread will probably read after these panels: to be fetched meanwhile, and not otherwise accessed.
    pub(super) ahead: *const u8,
    /// Bytes from a panel of it to the next.
    pub(super) ahead_stride: usize,
    /// Cache lines of it to fetch in a step along K: blocks of rows and cuts share them out, since memory delivers little
    /// at a time. The kernel of AMX has lines of its own to fetch where it `reads`, and these where it does not.
    pub(super) ahead_lines: usize,
}

/// Small parts of other work. Not a closure, which would be compiled without the instructions of its kernel.
pub(super) trait Meanwhile {
    /// Does the next part; false if none is left then.
    fn next(&mut self) -> bool;
}

/// The inner loops of an arithmetic. An element's sum takes its products in the same order whatever the size of the
/// tile.
pub(super) trait MicroKernel: Copy {
    /// Most rows of a tile.
    const MAX_ROWS: usize;
    /// Rows that follow each other whose sums are added to one result: see `Arithmetic::parts`.
    const PARTS: usize = 1;
    /// Elements along K after which the sums are put aside, if there is more than one block of rows.
    const MAX_DEPTH: usize;

    /// Most panels of a tile when there are so many rows.
    fn max_panels(self, num_rows: usize) -> usize;

    /// Rows and panels of a pass over a chunk: so many rows are multiplied by so many panels, group by group, before the
    /// next rows are. By default all rows by one group.
    fn pass(self, num_rows: usize, group: usize, panel_bytes: usize) -> (usize, usize) {
        let _ = panel_bytes;
        (num_rows, group)
    }

    /// Computes a tile.
    ///
    /// # Safety
    /// Rows and panels are readable, the sums writable, for what the tile says; numbers of rows and panels are at
    /// least 1 and no more than the limits.
    unsafe fn tile(self, tile: &Tile<'_>);

    /// Computes a tile, and does `meanwhile` until nothing is left of it: first, unless the instructions of the tile
    /// leave the units idle that it needs.
    ///
    /// # Safety
    /// As `tile`; `meanwhile` touches nothing that the tile reads or writes.
    #[inline(always)]
    unsafe fn tile_while(self, tile: &Tile<'_>, meanwhile: &mut impl Meanwhile) {
        while meanwhile.next() {}
        // SAFETY: passed on.
        unsafe { self.tile(tile) };
    }
}

/// Two places for the sums of a block of rows, by turns. Those in one of them may be complete, and to be written.
struct Sums {
    places: [*mut f32; 2],
    /// Which of them the complete ones came into.
    turn: usize,
    complete: Block,
}

/// Some rows of a call against some panels.
#[derive(Clone, Debug)]
pub(super) struct Piece<'k> {
    pub(super) call: &'k Linear<'k>,
    /// x as the arithmetic reads it.
    pub(super) x: MatrixView,
    /// Of these, `PARTS` for each row of the result.
    pub(super) rows: Range<usize>,
    pub(super) panels: Range<usize>,
    pub(super) then: Then,
}

// SAFETY: `then` is never followed, only fetched from; the rest may be sent.
unsafe impl Send for Piece<'_> {}

impl Kernel for &mut Piece<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        match (self.call.weight.arithmetic(), self.call.weight.panel_dtype()) {
            (Arithmetic::Fma(_), Dtype::F32) => self.multiply(simd, Fma::<S, F32>::new(simd)),
            (Arithmetic::Fma(_), Dtype::Bf16) => self.multiply(simd, Fma::<S, Bf16>::new(simd)),
            (Arithmetic::Fma(_), Dtype::F16) => self.multiply(simd, Fma::<S, F16>::new(simd)),
            #[cfg(target_arch = "x86_64")]
            (Arithmetic::DotBf16(dot), _) => self.multiply(simd, dot),
            #[cfg(target_arch = "x86_64")]
            // Not in closures, which would be compiled without the instructions of `simd`.
            (Arithmetic::Amx(amx), _) => {
                let shape = amx::Shape::default();
                self.multiply(simd, amx::Tiles::<1>::new(amx, &shape));
                amx.release();
            }
            #[cfg(target_arch = "x86_64")]
            (Arithmetic::AmxThirds(amx), _) => {
                let shape = amx::Shape::default();
                self.multiply(simd, amx::Tiles::<{ thirds::PARTS }>::new(amx, &shape));
                amx.release();
            }
        }
    }
}

/// What is asked for while a group of panels is multiplied.
enum Asks<'a> {
    /// What is read after the group, which comes from memory itself.
    Own,
    /// What is read after the span.
    Ahead(&'a mut Ahead),
    /// Nothing.
    None,
}

impl Asks<'_> {
    /// Those of a tile of so many steps, as in `Tile`: from where on, bytes from a panel to the next, lines in a step.
    #[inline(always)]
    fn take(
        &mut self,
        num_steps: usize,
        own: impl FnOnce() -> (*const u8, usize, usize),
    ) -> (*const u8, usize, usize) {
        match self {
            Self::Own => own(),
            Self::Ahead(ahead) => ahead.take(num_steps),
            Self::None => (std::ptr::null(), 0, 0),
        }
    }
}

impl Piece<'_> {
    #[inline(always)]
    fn multiply<S: Simd, M: MicroKernel>(&self, simd: S, kernel: M) {
        let weight = self.call.weight;
        let mut buffer = SUMS.take();
        let rows_per_chunk = rows_per_chunk(self.x.row_bytes(), M::PARTS);
        let num_rows = self.rows.len().min(rows_per_chunk);
        // Gated columns come in pairs of panels, and both must be there when the sums are complete.
        let widest = kernel.max_panels(num_rows);
        let group = if widest.is_multiple_of(2) {
            widest
        } else {
            2 * widest
        };
        let len_of_block = M::MAX_ROWS * group * LANES;
        let len = (num_rows * group * LANES).max(2 * len_of_block);
        buffer.reserve(len);
        let first = buffer.slice(0..len).as_mut_ptr();
        let mut sums = Sums {
            places: [first, first.wrapping_add(len_of_block)],
            turn: 0,
            complete: Block::empty(),
        };
        let mut near = NEAR.take();
        for first_row in self.rows.clone().step_by(rows_per_chunk) {
            let chunk = first_row..self.rows.end.min(first_row + rows_per_chunk);
            let (pass_rows, most_panels) = kernel.pass(chunk.len(), group, weight.plain_panel_bytes());
            let is_coded = weight.coding().is_some();
            let are_kept = !is_coded || chunk.len() > MOST_EXPANDED * pass_rows;
            let num_panels = group * block_len(self.panels.len().div_ceil(group), most_panels / group);
            for span in cuts(&self.panels, num_panels) {
                let is_near = ahead::are_asked(weight.panel(span.start));
                // Whole blocks ask for the next span, unless they read this one.
                let num_asking = (chunk.len() / pass_rows).saturating_sub(usize::from(!is_near));
                let mut ahead = self.after(&span, if are_kept { num_asking } else { 0 });
                for rows in cuts(&chunk, pass_rows) {
                    let is_first = rows.start == chunk.start;
                    let asks = are_kept && rows.len() == pass_rows && (is_near || !is_first);
                    for panels in cuts(&span, group) {
                        let places = if are_kept { &span } else { &panels };
                        let tile_panels = TilePanels::new(weight, places, [are_kept, is_first], &mut near);
                        let asks_for = match (is_first && !is_near, asks) {
                            (true, _) => Asks::Own,
                            (false, true) => Asks::Ahead(&mut ahead),
                            (false, false) => Asks::None,
                        };
                        self.multiply_group(
                            simd,
                            kernel,
                            [&rows, &panels],
                            (&tile_panels, asks_for),
                            &mut sums,
                        );
                    }
                }
                ahead.remember();
            }
        }
        NEAR.set(near);
        // SAFETY: as in `multiply_group`.
        let mut writing = unsafe { Writing::<S, M>::begin(simd, self.call, &sums.complete) };
        while writing.next() {}
        SUMS.set(buffer);
    }

    /// Rows against a group of panels. Writes what was complete before, and leaves the last block so.
    #[inline(always)]
    fn multiply_group<S: Simd, M: MicroKernel>(
        &self,
        simd: S,
        kernel: M,
        [rows, panels]: [&Range<usize>; 2],
        (tile_panels, mut asks_for): (&TilePanels<'_>, Asks<'_>),
        sums: &mut Sums,
    ) {
        let weight = self.call.weight;
        let depth = weight.depth();
        let stride = panels.len() * LANES;
        let max_panels = kernel.max_panels(rows.len());
        let block = M::PARTS * block_len(rows.len() / M::PARTS, M::MAX_ROWS / M::PARTS);
        let num_blocks = rows.len().div_ceil(block);
        let max_depth = if num_blocks > 1 { M::MAX_DEPTH } else { depth };
        let step = weight.arithmetic().step();
        let cut = block_len(depth, max_depth).next_multiple_of(step);
        debug_assert!(
            cut >= depth || weight.coding().is_none(),
            "coded panels are whole"
        );
        let step_bytes = step * LANES * weight.panel_dtype().size();
        for first_k in (0..depth).step_by(cut) {
            let next_k = depth.min(first_k + cut);
            let num_steps = (next_k - first_k) / step;
            for (idx, first) in rows.clone().step_by(block).enumerate() {
                let block_rows = first..rows.end.min(first + block);
                // Sums that do not wait for the next cut have two places in the nearest cache: while those in one are
                // written, the next ones come into the other.
                let turn = 1 - sums.turn;
                let before_cuts = sums.places[0].wrapping_add((first - rows.start) * stride);
                let place = if cut < depth {
                    before_cuts
                } else {
                    sums.places[turn]
                };
                for panel in panels.clone().step_by(max_panels) {
                    let num_panels = max_panels.min(panels.end - panel);
                    let own = || {
                        let lines = (num_panels * step_bytes).div_ceil(CACHE_LINE_BYTES);
                        let [before, own_lines] = share_of_lines(lines, idx, num_blocks);
                        let lines_before = first_k / step * lines + before * num_steps;
                        let (ahead, stride) = self.ahead(panels, panel);
                        (
                            ahead.wrapping_add(lines_before * CACHE_LINE_BYTES),
                            stride,
                            own_lines,
                        )
                    };
                    let (ahead, ahead_stride, ahead_lines) = asks_for.take(num_steps, own);
                    let tile = Tile {
                        num_rows: block_rows.len(),
                        num_panels,
                        depth: next_k - first_k,
                        x: self.x.at(first, first_k),
                        x_stride: self.x.row_stride * self.x.dtype.size(),
                        panels: tile_panels.panel(panel).wrapping_add(first_k / step * step_bytes),
                        panel_stride: tile_panels.stride,
                        coded: tile_panels.coded(weight, panel),
                        sums: place.wrapping_add((panel - panels.start) * LANES),
                        sums_stride: stride,
                        resumes: first_k > 0,
                        reads: matches!(asks_for, Asks::Own),
                        ahead,
                        ahead_stride,
                        ahead_lines,
                    };
                    let complete = std::mem::replace(&mut sums.complete, Block::empty());
                    // SAFETY: the caller of `Linear::run` vouches for x and the results; panels and sums are ours, and
                    // reach as far; what is written was in the other place, or complete before.
                    unsafe {
                        let mut writing = Writing::<S, M>::begin(simd, self.call, &complete);
                        kernel.tile_while(&tile, &mut writing);
                    }
                }
                if next_k == depth {
                    sums.turn = turn;
                    sums.complete = Block::new(M::PARTS, &block_rows, panels, place);
                }
            }
        }
    }

    /// What is read after a span, to be asked for by so many blocks of rows.
    #[inline(always)]
    fn after(&self, span: &Range<usize>, num_blocks: usize) -> Ahead {
        let weight = self.call.weight;
        let (address, num_bytes) = if span.end < self.panels.end {
            let num_panels = span.len().min(self.panels.end - span.end);
            (weight.panel(span.end), num_panels * weight.panel_bytes())
        } else {
            // How the piece after this one is cut is not known: its spans may be a group longer.
            let most_bytes = span.len() * weight.panel_bytes() * 5 / 4;
            (self.then.address, most_bytes.min(self.then.num_bytes))
        };
        let num_steps = num_blocks * span.len().div_ceil(2) * (weight.depth() / weight.arithmetic().step());
        Ahead::new(address, num_bytes, num_steps)
    }

    /// What is read after the panels from `panel` on of a group: those at the same place of the next group, and the
    /// bytes from each of them to the next.
    #[inline(always)]
    fn ahead(&self, group: &Range<usize>, panel: usize) -> (*const u8, usize) {
        let weight = self.call.weight;
        let next_panel = panel + group.len();
        if next_panel < self.panels.end {
            return (weight.panel(next_panel), weight.panel_bytes());
        }
        let Then { address, stride, .. } = self.then;
        (address.wrapping_add((panel - group.start) * stride), stride)
    }
}

/// Of the lines of a step, which so many blocks of rows share: how many others ask for before one of them, and its own.
#[inline(always)]
fn share_of_lines(num_lines: usize, block: usize, num_blocks: usize) -> [usize; 2] {
    let share = num_lines.div_ceil(num_blocks);
    [block * share, share.min(num_lines.saturating_sub(block * share))]
}

/// A range in pieces of so many, the last one of what is left.
#[inline(always)]
fn cuts(range: &Range<usize>, len: usize) -> impl Iterator<Item = Range<usize>> + use<> {
    let Range { start, end } = *range;
    (start..end)
        .step_by(len)
        .map(move |first| first..end.min(first + len))
}

/// The length of a block when `len` is cut into as few and as equal blocks as `max_len` allows.
#[inline(always)]
fn block_len(len: usize, max_len: usize) -> usize {
    len.div_ceil(len.div_ceil(max_len))
}
