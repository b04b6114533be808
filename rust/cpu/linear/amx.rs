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
use std::cell::Cell;

use super::amx_weights::{Coded, MAX_PANELS, Near, Plain, Weights};
use super::near::CodedPanels;
use super::piece::{Meanwhile, MicroKernel, Tile, chunk_step};
use crate::cpu::amx::{Amx, DEPTH, ROW_BYTES, Shapes, TILE_LEN};
use crate::cpu::isa::LANES;

/// Bytes of the panels that a block of rows passes by before the next block does, a part of the second-level cache, into
/// which those that come next are asked for meanwhile.
const SPAN_BYTES: usize = 256 << 10;
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
    if num_rows > TILE_LEN { 2 } else { MAX_PANELS }
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
/// a part of what the weights need and of `meanwhile` is done.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured; if `W` is `Coded`, the panels are.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vbmi2,avx2,fma,f16c"
)]
unsafe fn two_by_two<W: Weights>(tile: &Tile<'_>, meanwhile: &mut impl Meanwhile) {
    let mut weights = W::new(tile);
    let mut x = [0, TILE_LEN].map(|row| tile.x.wrapping_add(row * tile.x_stride));
    // SAFETY: the caller vouches for the memory, and configured the tiles. What the registers hold stays from one
    // instruction to the next, since the compiler knows none of them.
    unsafe {
        weights.begin::<2>();
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            weights.begin_step(step);
            // Each tile is loaded just before the first product that needs it.
            load_x!(4, x[0], tile.x_stride);
            load_weights!(6, weights.at(0));
            weights.part::<4>(0, 0);
            multiply!(0, 4, 6);
            weights.part::<4>(1, 0);
            load_weights!(7, weights.at(1));
            weights.part::<4>(2, 0);
            multiply!(1, 4, 7);
            weights.part::<4>(3, 0);
            load_x!(5, x[1], tile.x_stride);
            weights.part::<4>(0, 1);
            multiply!(2, 5, 6);
            weights.part::<4>(1, 1);
            weights.part::<4>(2, 1);
            multiply!(3, 5, 7);
            weights.part::<4>(3, 1);
            weights.end_step();
            meanwhile.next();
            x = x.map(|rows| rows.wrapping_add(ROW_BYTES));
        }
        let stride = tile.sums_stride * size_of::<f32>();
        let lower = tile.sums.wrapping_add(TILE_LEN * tile.sums_stride);
        store!(0, tile.sums, stride);
        store!(1, tile.sums.wrapping_add(LANES), stride);
        store!(2, lower, stride);
        store!(3, lower.wrapping_add(LANES), stride);
    }
}

/// Up to 16 rows by one, two or four panels, otherwise as `two_by_two`.
///
/// # Safety
/// As `two_by_two`.
#[target_feature(
    enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx512vbmi,avx512vbmi2,avx2,fma,f16c"
)]
unsafe fn one_by_some<W: Weights, const PANELS: usize>(tile: &Tile<'_>, meanwhile: &mut impl Meanwhile) {
    let mut weights = W::new(tile);
    let mut x = tile.x;
    // SAFETY: as in `two_by_two`.
    unsafe {
        macro_rules! panel {
            ($panel:literal, $tile:literal) => {
                if $panel < PANELS {
                    load_weights!($tile, weights.at($panel));
                    weights.part::<2>(0, $panel);
                    multiply!($panel, 4, $tile);
                    weights.part::<2>(1, $panel);
                }
            };
        }
        weights.begin::<PANELS>();
        zero!(0, 1, 2, 3);
        for step in 0..tile.depth / DEPTH {
            weights.begin_step(step);
            load_x!(4, x, tile.x_stride);
            panel!(0, 6);
            panel!(1, 7);
            panel!(2, 6);
            panel!(3, 7);
            weights.end_step();
            meanwhile.next();
            x = x.wrapping_add(ROW_BYTES);
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

/// A tile, whatever its shape.
///
/// # Safety
/// As `two_by_two`.
#[inline(always)]
unsafe fn multiply<W: Weights>(tile: &Tile<'_>, meanwhile: &mut impl Meanwhile) {
    // SAFETY: passed on.
    unsafe {
        match (tile.num_panels, tile.num_rows > TILE_LEN) {
            (2, true) => two_by_two::<W>(tile, meanwhile),
            (2, false) => one_by_some::<W, 2>(tile, meanwhile),
            (MAX_PANELS, false) => one_by_some::<W, MAX_PANELS>(tile, meanwhile),
            _ => one_by_some::<W, 1>(tile, meanwhile),
        }
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
    unsafe fn tile_while(self, tile: &Tile<'_>, meanwhile: &mut impl Meanwhile) {
        debug_assert!(!tile.resumes, "no sums are put aside");
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if matches!((tile.num_panels, lower), (2, _) | (1 | MAX_PANELS, 0)) {
            self.configure(tile.num_rows - lower, lower);
            // SAFETY: passed on.
            unsafe {
                match (tile.coded.map(CodedPanels::are_kept), tile.reads) {
                    (Some(true), true) => multiply::<Coded<true, true>>(tile, meanwhile),
                    (Some(true), false) => multiply::<Coded<false, true>>(tile, meanwhile),
                    (Some(false), true) => multiply::<Coded<true, false>>(tile, meanwhile),
                    (Some(false), false) => multiply::<Coded<false, false>>(tile, meanwhile),
                    (None, true) => multiply::<Plain>(tile, meanwhile),
                    (None, false) => multiply::<Near>(tile, meanwhile),
                }
            }
        } else {
            // SAFETY: passed on.
            unsafe { self.tile(tile) };
        }
        while meanwhile.next() {}
    }

    unsafe fn tile(self, tile: &Tile<'_>) {
        for first_row in (0..tile.num_rows).step_by(TILE_LEN) {
            for panel in 0..tile.num_panels {
                let part = Tile {
                    num_rows: TILE_LEN.min(tile.num_rows - first_row),
                    num_panels: 1,
                    x: tile.x.wrapping_add(first_row * tile.x_stride),
                    panels: tile.panels.wrapping_add(panel * tile.panel_stride),
                    coded: tile.coded.map(|panels| panels.from(panel)),
                    sums: tile
                        .sums
                        .wrapping_add(first_row * tile.sums_stride + panel * LANES),
                    ahead: tile.ahead.wrapping_add(panel * tile.ahead_stride),
                    ..*tile
                };
                // SAFETY: a part of what the caller vouches for.
                unsafe { self.tile_while(&part, &mut Nothing) };
            }
        }
    }
}
