//! Tiles of AMX: `tdpbf16ps` multiplies 16 rows of 32 elements by 16 columns.
//!
//! Rust has no stable intrinsics for it, so the loops are assembly. A block of 32 rows by two panels keeps four tiles
//! of sums, two of x and two of weights: the eight that there are. Up to 16 rows alone are multiplied by four panels at
//! a time, behind blocks of 32 by two.
//!
//! Every product needs a tile to be loaded, and its operands bound it. A block of rows stays in the nearest cache while
//! panels pass by (`Tiles::pass`), which come from the second-level cache without displacing it (`tileloaddt1`).
//! A step along K of such a block took 27 ns so, and 38 where both were loaded alike.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;

use super::piece::{Meanwhile, MicroKernel, Tile, chunk_step};
use crate::cpu::amx::{Amx, DEPTH, ROW_BYTES, Shapes, TILE_LEN};
use crate::cpu::isa::LANES;
use crate::memory::CACHE_LINE_BYTES;

/// Bytes of the panels that a block of rows passes by before the next block does, a part of the second-level cache, into
/// which those that come next are asked for meanwhile.
const SPAN_BYTES: usize = 256 << 10;
/// Steps along K between what is multiplied and what is asked for from memory: 8 KB of each panel.
const LEAD_STEPS: usize = 8;
/// Bytes of a step along K in a panel, one tile, and its cache lines.
const STEP_BYTES: usize = TILE_LEN * ROW_BYTES;
const STEP_LINES: usize = STEP_BYTES / CACHE_LINE_BYTES;
/// Lines of a step of two panels.
const OWN_LINES: usize = 2 * STEP_LINES;
/// Places in the step of a tile of two panels where lines are asked for.
const PLACES: usize = 8;

/// Rows of the upper and of the lower tiles, as configured; none at first.
pub(super) type Shape = Cell<(usize, usize)>;

/// The tiles of this thread, which gives them up afterwards (`Amx::release`). `PARTS` rows make up one of x.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a, const PARTS: usize> {
    amx: Amx,
    shape: &'a Shape,
}

/// Panels of the widest tile of so many rows.
pub(super) fn group_panels(num_rows: usize) -> usize {
    if num_rows > TILE_LEN { 2 } else { 4 }
}

impl<'a, const PARTS: usize> Tiles<'a, PARTS> {
    /// They have no shape yet.
    pub(super) fn new(amx: Amx, shape: &'a Shape) -> Self {
        Self { amx, shape }
    }

    /// Gives the tiles their shapes: 0 and 1 hold sums of the upper rows, 2 and 3 of the lower ones (or, if there are
    /// none, more sums of the upper ones), 4 and 5 rows of x, 6 and 7 weights.
    fn configure(self, upper: usize, lower: usize) {
        if self.shape.get() == (upper, lower) {
            return;
        }
        let byte = |rows: usize| u8::try_from(rows).expect("at most 16");
        let (first, second) = (byte(upper), byte(if lower == 0 { upper } else { lower }));
        let shapes = Shapes::new([first, first, second, second, first, second, 16, 16]);
        self.amx.configure(&shapes);
        self.shape.set((upper, lower));
    }
}

/// Asks for what is read next from memory, in small parts between the instructions of a tile.
///
/// A core waits for few lines at a time, and for a request that finds no room it either waits, and with it all that
/// comes after, or drops it. So the lines are asked for one by one, as many as are used, and only once: requests of the
/// tiles that are loaded next from the second-level cache cost more than they save.
struct Requests {
    /// Where the first panel is asked for in this step.
    at: *const u8,
    /// Bytes from a panel that is asked for to the next one.
    stride: usize,
    /// The step from which on the panels end within `LEAD_STEPS`.
    last_steps: usize,
    /// What is asked for then, and bytes from a panel of it to the next.
    ahead: *const u8,
    ahead_stride: usize,
}

impl Requests {
    #[inline(always)]
    fn new(tile: &Tile) -> Self {
        let num_steps = tile.depth / DEPTH;
        let last_steps = num_steps.saturating_sub(LEAD_STEPS);
        let missing = last_steps + LEAD_STEPS - num_steps;
        Self {
            at: tile.panels.wrapping_add(LEAD_STEPS * STEP_BYTES),
            stride: tile.panel_stride,
            last_steps,
            ahead: tile.ahead.wrapping_add(missing * STEP_BYTES),
            ahead_stride: tile.ahead_stride,
        }
    }

    /// Begins a step. Panels are asked for `LEAD_STEPS` before they are read, those of the next tile at the end.
    #[inline(always)]
    fn begin_step(&mut self, step: usize) {
        if step == self.last_steps {
            (self.at, self.stride) = (self.ahead, self.ahead_stride);
        }
    }

    /// One of `PARTS` parts of the requests that belong to a panel of the tile.
    #[inline(always)]
    fn part<const PARTS: usize>(&self, part: usize, panel: usize) {
        let lines = STEP_LINES / PARTS;
        let at = self.at.wrapping_add(panel * self.stride);
        for line in lines * part..lines * (part + 1) {
            prefetch(at.wrapping_add(line * CACHE_LINE_BYTES));
        }
    }

    #[inline(always)]
    fn end_step(&mut self) {
        self.at = self.at.wrapping_add(STEP_BYTES);
    }
}

/// Asks for a line, which may be any, into the second-level cache.
#[inline(always)]
fn prefetch(address: *const u8) {
    // SAFETY: a prefetch accesses nothing.
    unsafe { _mm_prefetch::<_MM_HINT_T1>(address.cast()) };
}

/// Nothing to do meanwhile.
struct Nothing;

impl Meanwhile for Nothing {
    fn next(&mut self) -> bool {
        false
    }
}

/// Zeroes a tile.
macro_rules! zero {
    ($($tile:literal),+) => {
        asm!($(concat!("tilezero tmm", $tile)),+, options(nostack, nomem, preserves_flags))
    };
}

/// Loads a tile of x, rows some bytes apart, and keeps them in the nearest cache.
macro_rules! load_x {
    ($tile:literal, $address:expr, $stride:expr) => {
        load!("tileloadd", $tile, $address, $stride)
    };
}

/// Loads a tile of weights, which displace nothing of x in the nearest cache.
macro_rules! load_weights {
    ($tile:literal, $address:expr) => {
        load!("tileloaddt1", $tile, $address, ROW_BYTES)
    };
}

/// Loads a tile from an address, rows some bytes apart.
macro_rules! load {
    ($instruction:literal, $tile:literal, $address:expr, $stride:expr) => {
        asm!(
            concat!($instruction, " tmm", $tile, ", [{address} + {stride}*1]"),
            address = in(reg) $address,
            stride = in(reg) $stride,
            options(nostack, readonly, preserves_flags),
        )
    };
}

/// Adds the product of a tile of x and one of weights to one of sums.
macro_rules! multiply {
    ($sums:literal, $x:literal, $weights:literal) => {
        asm!(
            concat!("tdpbf16ps tmm", $sums, ", tmm", $x, ", tmm", $weights),
            options(nostack, nomem, preserves_flags)
        )
    };
}

/// Stores a tile of sums.
macro_rules! store {
    ($tile:literal, $sums:expr, $stride:expr) => {
        asm!(
            concat!("tilestored [{sums} + {stride}*1], tmm", $tile),
            sums = in(reg) $sums,
            stride = in(reg) $stride,
            options(nostack, preserves_flags),
        )
    };
}

/// Up to 32 rows, more than 16, by two panels. Between the instructions, which leave most units of the processor idle,
/// as many lines of what is read later are asked for in a step as `LINES` says (`OWN_LINES`: of these panels, which come
/// from memory), and a part of `meanwhile` is done in every step.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured.
#[inline(always)]
unsafe fn two_by_two<const LINES: usize>(tile: &Tile, meanwhile: &mut impl Meanwhile) {
    let mut x = [0, TILE_LEN].map(|row| tile.x.wrapping_add(row * tile.x_stride));
    let mut weights = [0, 1].map(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut requests = Requests::new(tile);
    let mut ahead = tile.ahead;
    // SAFETY: the caller vouches for the memory, and configured the tiles. What the registers hold stays from one
    // instruction to the next, since the compiler knows none of them.
    unsafe {
        macro_rules! ask {
            ($panel:literal, $part:literal) => {
                if LINES == OWN_LINES {
                    requests.part::<4>($part, $panel);
                } else if LINES > 0 && (4 * $panel + $part) % (PLACES / LINES) == 0 {
                    prefetch(ahead);
                    ahead = ahead.wrapping_add(CACHE_LINE_BYTES);
                }
            };
        }
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            requests.begin_step(step);
            // Each tile is loaded just before the first product that needs it.
            load_x!(4, x[0], tile.x_stride);
            load_weights!(6, weights[0]);
            ask!(0, 0);
            multiply!(0, 4, 6);
            ask!(0, 1);
            load_weights!(7, weights[1]);
            ask!(0, 2);
            multiply!(1, 4, 7);
            ask!(0, 3);
            load_x!(5, x[1], tile.x_stride);
            ask!(1, 0);
            multiply!(2, 5, 6);
            ask!(1, 1);
            ask!(1, 2);
            multiply!(3, 5, 7);
            ask!(1, 3);
            requests.end_step();
            meanwhile.next();
            x = x.map(|rows| rows.wrapping_add(ROW_BYTES));
            weights = weights.map(|panel| panel.wrapping_add(STEP_BYTES));
        }
        let stride = tile.sums_stride * size_of::<f32>();
        let lower = tile.sums.wrapping_add(TILE_LEN * tile.sums_stride);
        store!(0, tile.sums, stride);
        store!(1, tile.sums.wrapping_add(LANES), stride);
        store!(2, lower, stride);
        store!(3, lower.wrapping_add(LANES), stride);
    }
}

/// Up to 16 rows by one, two or four panels, and a part of `meanwhile` in every step.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured.
#[inline(always)]
unsafe fn one_by_some<const PANELS: usize>(tile: &Tile, meanwhile: &mut impl Meanwhile) {
    let mut x = tile.x;
    let mut weights: [_; PANELS] =
        std::array::from_fn(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut requests = Requests::new(tile);
    let asks = tile.reads;
    // SAFETY: as in `two_by_two`.
    unsafe {
        macro_rules! panel {
            ($panel:literal, $weights:literal) => {
                if $panel < PANELS {
                    load_weights!($weights, weights[$panel]);
                    if asks {
                        requests.part::<2>(0, $panel);
                    }
                    multiply!($panel, 4, $weights);
                    if asks {
                        requests.part::<2>(1, $panel);
                    }
                }
            };
        }
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            requests.begin_step(step);
            load_x!(4, x, tile.x_stride);
            panel!(0, 6);
            panel!(1, 7);
            panel!(2, 6);
            panel!(3, 7);
            requests.end_step();
            meanwhile.next();
            x = x.wrapping_add(ROW_BYTES);
            weights = weights.map(|panel| panel.wrapping_add(STEP_BYTES));
        }
        macro_rules! store_panel {
            ($panel:literal) => {
                if $panel < PANELS {
                    let sums = tile.sums.wrapping_add($panel * LANES);
                    store!($panel, sums, tile.sums_stride * size_of::<f32>());
                }
            };
        }
        store_panel!(0);
        store_panel!(1);
        store_panel!(2);
        store_panel!(3);
    }
}

impl<const PARTS: usize> MicroKernel for Tiles<'_, PARTS> {
    const MAX_ROWS: usize = 2 * TILE_LEN;
    const PARTS: usize = PARTS;
    const MAX_DEPTH: usize = usize::MAX;

    fn max_panels(self, num_rows: usize) -> usize {
        group_panels(num_rows)
    }

    fn pass(self, _num_rows: usize, group: usize, panel_bytes: usize) -> (usize, usize) {
        let num_groups = (SPAN_BYTES / (group * panel_bytes)).max(1);
        (chunk_step(PARTS), num_groups * group)
    }

    #[inline(always)]
    unsafe fn tile_while(self, tile: &Tile, meanwhile: &mut impl Meanwhile) {
        debug_assert!(!tile.resumes, "no sums are put aside");
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        self.configure(tile.num_rows - lower, lower);
        // SAFETY: passed on.
        unsafe {
            match (tile.num_panels, lower) {
                (2, 1..) if tile.reads => two_by_two::<OWN_LINES>(tile, meanwhile),
                (2, 1..) => match tile.ahead_lines {
                    0 => two_by_two::<0>(tile, meanwhile),
                    1 | 2 => two_by_two::<2>(tile, meanwhile),
                    3 | 4 => two_by_two::<4>(tile, meanwhile),
                    _ => two_by_two::<8>(tile, meanwhile),
                },
                (4, 0) => one_by_some::<4>(tile, meanwhile),
                (2, 0) => one_by_some::<2>(tile, meanwhile),
                _ => self.tile(tile),
            }
        }
        while meanwhile.next() {}
    }

    unsafe fn tile(self, tile: &Tile) {
        for first_row in (0..tile.num_rows).step_by(TILE_LEN) {
            let num_rows = TILE_LEN.min(tile.num_rows - first_row);
            self.configure(num_rows, 0);
            for panel in 0..tile.num_panels {
                let part = Tile {
                    num_rows,
                    num_panels: 1,
                    x: tile.x.wrapping_add(first_row * tile.x_stride),
                    panels: tile.panels.wrapping_add(panel * tile.panel_stride),
                    sums: tile
                        .sums
                        .wrapping_add(first_row * tile.sums_stride + panel * LANES),
                    ahead: tile.ahead.wrapping_add(panel * tile.ahead_stride),
                    ..*tile
                };
                // SAFETY: a part of what the caller vouches for.
                unsafe { one_by_some::<1>(&part, &mut Nothing) };
            }
        }
    }
}
