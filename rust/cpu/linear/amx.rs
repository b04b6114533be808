//! Tiles of AMX: `tdpbf16ps` multiplies 16 rows of 32 elements by 16 columns.
//!
//! Rust has no stable intrinsics for it, so the loops are assembly. A block of 32 rows by two panels keeps four tiles
//! of sums, two of x and two of weights: the eight that there are. Up to 16 rows are multiplied by four panels at a
//! time.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T0, _MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;

use super::amx_blocks;
use super::piece::{Meanwhile, MicroKernel, Tile};
use crate::cpu::amx::{Amx, DEPTH, ROW_BYTES, Shapes, TILE_LEN};
use crate::cpu::isa::LANES;
use crate::memory::CACHE_LINE_BYTES;

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

/// Blocks of rows up to which reading the panels takes so much of the time that requests come in small parts.
const FEW_BLOCKS: usize = 2;
/// Steps along K between what is multiplied and what is asked for from memory: 8 KB of each panel.
const LEAD_STEPS: usize = 8;
/// Bytes of a step along K in a panel, one tile, and its cache lines.
const STEP_BYTES: usize = TILE_LEN * ROW_BYTES;
const STEP_LINES: usize = STEP_BYTES / CACHE_LINE_BYTES;

/// Asks for what is loaded next, in small parts between the instructions of a tile.
///
/// Requests that come many at a time fill the buffers in which the core waits for memory, and the loads of tiles queue
/// up behind them; and products that wait for loads from the second-level cache take longer. So every part asks for a
/// few lines from memory, into the second-level cache, and for as many of the next step into the nearest one.
struct Requests<'t> {
    tile: &'t Tile,
    /// The step from which on the panels end within `LEAD_STEPS`.
    last_steps: usize,
    /// What is asked for from memory next.
    ahead: *const u8,
    /// Bytes from a panel that is asked for to the next one.
    stride: usize,
    /// Where the first panel is asked for in this step.
    first: *const u8,
}

impl<'t> Requests<'t> {
    #[inline(always)]
    fn new(tile: &'t Tile) -> Self {
        Self {
            tile,
            last_steps: (tile.depth / DEPTH).saturating_sub(LEAD_STEPS),
            ahead: tile.ahead,
            stride: tile.panel_stride,
            first: tile.panels.wrapping_add(LEAD_STEPS * STEP_BYTES),
        }
    }

    /// Begins a step. Panels that are read once are asked for `LEAD_STEPS` before that, those of the next tile at the
    /// end. If other rows are multiplied by them too, what is asked for is the share of these rows of the next tile.
    #[inline(always)]
    fn begin_step(&mut self, step: usize) {
        if self.tile.num_blocks > 1 {
            return;
        }
        if step == self.last_steps {
            let missing = (step + LEAD_STEPS).saturating_sub(self.tile.depth / DEPTH);
            self.first = self.tile.ahead.wrapping_add(missing * STEP_BYTES);
            self.stride = self.tile.ahead_stride;
        }
        self.ahead = self.first;
        self.first = self.first.wrapping_add(STEP_BYTES);
    }

    /// One of `PARTS` parts of the requests that belong to a panel of the tile, which is at `weights`.
    #[inline(always)]
    fn part<const PARTS: usize>(&mut self, part: usize, panel: usize, weights: *const u8) {
        let lines = STEP_LINES / PARTS;
        if self.tile.num_blocks > 1 {
            let (slot, slots) = (panel * PARTS + part, self.tile.num_panels * PARTS);
            let until = |slot: usize| self.tile.ahead_lines * slot / slots;
            for _ in until(slot)..until(slot + 1) {
                prefetch::<_MM_HINT_T1>(self.ahead);
                self.ahead = self.ahead.wrapping_add(CACHE_LINE_BYTES);
            }
        } else {
            let at = self.ahead.wrapping_add(panel * self.stride);
            for line in lines * part..lines * (part + 1) {
                prefetch::<_MM_HINT_T1>(at.wrapping_add(line * CACHE_LINE_BYTES));
            }
        }
        let next = weights.wrapping_add(STEP_BYTES);
        for line in lines * part..lines * (part + 1) {
            prefetch::<_MM_HINT_T0>(next.wrapping_add(line * CACHE_LINE_BYTES));
        }
    }

    /// The same lines of x, of which there is one in every row, in the next step.
    #[inline(always)]
    fn rows<const LEN: usize>(&self, x: *const u8, first_row: usize) {
        for row in first_row..first_row + LEN {
            prefetch::<_MM_HINT_T0>(x.wrapping_add(ROW_BYTES + row * self.tile.x_stride));
        }
    }
}

/// Asks for a line, which may be any.
#[inline(always)]
fn prefetch<const HINT: i32>(address: *const u8) {
    // SAFETY: a prefetch accesses nothing.
    unsafe { _mm_prefetch::<HINT>(address.cast()) };
}

/// Zeroes a tile.
macro_rules! zero {
    ($($tile:literal),+) => {
        asm!($(concat!("tilezero tmm", $tile)),+, options(nostack, nomem, preserves_flags))
    };
}

/// Loads a tile from an address, rows some bytes apart.
macro_rules! load {
    ($tile:literal, $address:expr, $stride:expr) => {
        asm!(
            concat!("tileloadd tmm", $tile, ", [{address} + {stride}*1]"),
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

pub(super) use {store, zero};

/// Up to 32 rows, more than 16, by two panels. Between the instructions, which leave most units of the processor idle,
/// what is read next is asked for, and a part of `meanwhile` is done in every step.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured.
#[inline(always)]
unsafe fn two_by_two(tile: &Tile, meanwhile: &mut impl Meanwhile) {
    let mut x = [0, TILE_LEN].map(|row| tile.x.wrapping_add(row * tile.x_stride));
    let mut weights = [0, 1].map(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut requests = Requests::new(tile);
    // SAFETY: the caller vouches for the memory, and configured the tiles. What the registers hold stays from one
    // instruction to the next, since the compiler knows none of them.
    unsafe {
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            requests.begin_step(step);
            load!(4, x[0], tile.x_stride);
            requests.part::<4>(0, 0, weights[0]);
            load!(5, x[1], tile.x_stride);
            requests.part::<4>(1, 0, weights[0]);
            load!(6, weights[0], ROW_BYTES);
            requests.part::<4>(2, 0, weights[0]);
            multiply!(0, 4, 6);
            requests.part::<4>(3, 0, weights[0]);
            requests.rows::<TILE_LEN>(x[0], 0);
            multiply!(2, 5, 6);
            requests.part::<4>(0, 1, weights[1]);
            load!(7, weights[1], ROW_BYTES);
            requests.part::<4>(1, 1, weights[1]);
            multiply!(1, 4, 7);
            requests.part::<4>(2, 1, weights[1]);
            requests.rows::<TILE_LEN>(x[1], 0);
            multiply!(3, 5, 7);
            requests.part::<4>(3, 1, weights[1]);
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

/// Up to 16 rows by one, two or four panels.
///
/// # Safety
/// As `MicroKernel::tile`; the tiles are configured.
unsafe fn one_by_some<const PANELS: usize>(tile: &Tile) {
    let mut x = tile.x;
    let mut weights: [_; PANELS] =
        std::array::from_fn(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut requests = Requests::new(tile);
    // SAFETY: as in `two_by_two`.
    unsafe {
        macro_rules! panel {
            ($panel:literal, $weights:literal) => {
                if $panel < PANELS {
                    load!($weights, weights[$panel], ROW_BYTES);
                    requests.part::<2>(0, $panel, weights[$panel]);
                    requests.rows::<4>(x, 4 * $panel);
                    multiply!($panel, 4, $weights);
                    requests.part::<2>(1, $panel, weights[$panel]);
                }
            };
        }
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            requests.begin_step(step);
            load!(4, x, tile.x_stride);
            panel!(0, 6);
            panel!(1, 7);
            panel!(2, 6);
            panel!(3, 7);
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

    #[inline(always)]
    unsafe fn tile_while(self, tile: &Tile, meanwhile: &mut impl Meanwhile) {
        debug_assert!(!tile.resumes, "no sums are put aside");
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if lower > 0 && tile.num_panels == 2 {
            self.configure(TILE_LEN, lower);
            if tile.num_blocks > FEW_BLOCKS {
                // SAFETY: passed on.
                unsafe { amx_blocks::two_by_two(tile, meanwhile) };
            } else {
                // SAFETY: passed on.
                unsafe { two_by_two(tile, meanwhile) };
            }
        }
        while meanwhile.next() {}
        if lower == 0 || tile.num_panels != 2 {
            // SAFETY: passed on.
            unsafe { self.tile(tile) };
        }
    }

    unsafe fn tile(self, tile: &Tile) {
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if lower == 0 && tile.num_panels != 3 {
            self.configure(tile.num_rows, 0);
            // SAFETY: passed on.
            unsafe {
                match tile.num_panels {
                    4 => one_by_some::<4>(tile),
                    2 => one_by_some::<2>(tile),
                    _ => one_by_some::<1>(tile),
                }
            }
            return;
        }
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
                    ..*tile
                };
                // SAFETY: a part of what the caller vouches for.
                unsafe { one_by_some::<1>(&part) };
            }
        }
    }
}
