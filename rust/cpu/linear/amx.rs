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
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
use std::cell::Cell;

use super::amx_blocks;
use super::piece::{Meanwhile, MicroKernel, Tile};
use crate::cpu::amx::{Amx, DEPTH, ROW_BYTES, Shapes, TILE_LEN};
use crate::cpu::isa::LANES;

/// Rows of the upper and of the lower tiles, as configured; none at first.
pub(super) type Shape = Cell<(usize, usize)>;

/// The tiles of this thread, which gives them up afterwards (`Amx::release`).
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    amx: Amx,
    shape: &'a Shape,
}

/// Panels of the widest tile of so many rows.
pub(super) fn group_panels(num_rows: usize) -> usize {
    if num_rows > TILE_LEN { 2 } else { 4 }
}

impl<'a> Tiles<'a> {
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

/// Asks for the next kilobyte at `{ahead}`: into the second-level cache, since it is more than the nearest one holds.
macro_rules! fetch {
    () => {
        concat!(
            "prefetcht1 [{ahead} + 0]\n",
            "prefetcht1 [{ahead} + 64]\n",
            "prefetcht1 [{ahead} + 128]\n",
            "prefetcht1 [{ahead} + 192]\n",
            "prefetcht1 [{ahead} + 256]\n",
            "prefetcht1 [{ahead} + 320]\n",
            "prefetcht1 [{ahead} + 384]\n",
            "prefetcht1 [{ahead} + 448]\n",
            "prefetcht1 [{ahead} + 512]\n",
            "prefetcht1 [{ahead} + 576]\n",
            "prefetcht1 [{ahead} + 640]\n",
            "prefetcht1 [{ahead} + 704]\n",
            "prefetcht1 [{ahead} + 768]\n",
            "prefetcht1 [{ahead} + 832]\n",
            "prefetcht1 [{ahead} + 896]\n",
            "prefetcht1 [{ahead} + 960]\n",
            "add {ahead}, 1024",
        )
    };
}

/// A step of two by two tiles, whose rows of x and weights are loaded by the given instructions. All loads come before
/// the products, and products of the same weights follow each other: both take less power, by which these instructions
/// are bound when many cores use them.
macro_rules! two_by_two {
    ($x:expr, $weights:expr, $x_stride:expr, $load_x:literal, $load_w:literal) => {
        asm!(
            concat!($load_x, " tmm4, [{x0} + {xs}*1]"), concat!($load_x, " tmm5, [{x1} + {xs}*1]"),
            concat!($load_w, " tmm6, [{w0} + {row}*1]"), concat!($load_w, " tmm7, [{w1} + {row}*1]"),
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            x0 = in(reg) $x[0],
            x1 = in(reg) $x[1],
            w0 = in(reg) $weights[0],
            w1 = in(reg) $weights[1],
            xs = in(reg) $x_stride,
            row = in(reg) ROW_BYTES,
            options(nostack, readonly),
        )
    };
}

/// Up to 32 rows, more than 16, by two panels. What passes by once is loaded so that it does not displace what stays in
/// the nearest cache (`tileloaddt1`). Between the steps, which leave most units of the processor idle, what is read next
/// is fetched from afar, and a part of `meanwhile` is done.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured.
#[inline(always)]
unsafe fn two_by_two(tile: &Tile, meanwhile: &mut impl Meanwhile) {
    let mut x = [0, TILE_LEN].map(|row| tile.x.wrapping_add(row * tile.x_stride));
    let mut weights = [0, 1].map(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut ahead = tile.ahead;
    // SAFETY: the caller vouches for the memory, and configured the tiles; a prefetch may ask for any address. What the
    // registers hold stays from one instruction to the next, since the compiler knows none of them.
    unsafe {
        asm!(
            "tilezero tmm0",
            "tilezero tmm1",
            "tilezero tmm2",
            "tilezero tmm3",
            options(nostack)
        );
        for _ in 0..tile.depth / DEPTH {
            two_by_two!(x, weights, tile.x_stride, "tileloadd", "tileloaddt1");
            for _ in 0..tile.ahead_lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(ROW_BYTES);
            }
            meanwhile.next();
            x = x.map(|rows| rows.wrapping_add(ROW_BYTES));
            weights = weights.map(|panel| panel.wrapping_add(TILE_LEN * ROW_BYTES));
        }
        asm!(
            "tilestored [{upper} + {stride}*1], tmm0", "tilestored [{upper} + {stride}*1 + 64], tmm1",
            "tilestored [{lower} + {stride}*1], tmm2", "tilestored [{lower} + {stride}*1 + 64], tmm3",
            upper = in(reg) tile.sums,
            lower = in(reg) tile.sums.wrapping_add(TILE_LEN * tile.sums_stride),
            stride = in(reg) tile.sums_stride * size_of::<f32>(),
            options(nostack),
        );
    }
}

/// Up to 16 rows by some panels: for each of them its tile of sums, its register and that of its weights.
macro_rules! one_by_some {
    ($tile:expr, $(($sums:literal, $weights:literal, $panel:ident, $idx:literal)),+) => {{
        let tile: &Tile = $tile;
        asm!(
            $(concat!("tilezero ", $sums),)+
            "2:",
            "tileloadd tmm4, [{x} + {xs}*1]",
            $(
                concat!("tileloadd ", $weights, ", [{", stringify!($panel), "} + {row}*1]"),
                concat!("tdpbf16ps ", $sums, ", tmm4, ", $weights),
                fetch!(),
                concat!("add {", stringify!($panel), "}, 1024"),
            )+
            "add {x}, 64",
            "dec {steps}", "jnz 2b",
            $(concat!("tilestored [{s} + {ss}*1 + 64*", $idx, "], ", $sums),)+
            x = inout(reg) tile.x => _,
            xs = in(reg) tile.x_stride,
            $($panel = inout(reg) tile.panels.wrapping_add($idx * tile.panel_stride) => _,)+
            ahead = inout(reg) tile.ahead => _,
            row = in(reg) ROW_BYTES,
            steps = inout(reg) tile.depth / DEPTH => _,
            s = in(reg) tile.sums,
            ss = in(reg) tile.sums_stride * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
}

/// Up to 16 rows by one, two or four panels. What is read next is fetched from afar meanwhile.
unsafe fn one_by_some(tile: &Tile) {
    // SAFETY: the caller vouches for the memory, and configured the tiles; a prefetch may ask for any address.
    unsafe {
        match tile.num_panels {
            4 => one_by_some!(
                tile,
                ("tmm0", "tmm6", w0, 0),
                ("tmm1", "tmm7", w1, 1),
                ("tmm2", "tmm6", w2, 2),
                ("tmm3", "tmm7", w3, 3)
            ),
            2 => one_by_some!(tile, ("tmm0", "tmm6", w0, 0), ("tmm1", "tmm7", w1, 1)),
            _ => one_by_some!(tile, ("tmm0", "tmm6", w0, 0)),
        }
    }
}

impl MicroKernel for Tiles<'_> {
    const MAX_ROWS: usize = 2 * TILE_LEN;
    const MAX_DEPTH: usize = amx_blocks::MAX_DEPTH;

    fn max_panels(self, num_rows: usize) -> usize {
        group_panels(num_rows)
    }

    fn max_depth(self, num_rows: usize, num_panels: usize) -> usize {
        if num_rows > TILE_LEN && num_panels.is_multiple_of(2) {
            Self::MAX_DEPTH
        } else {
            usize::MAX
        }
    }

    #[inline(always)]
    unsafe fn tile_while(self, tile: &Tile, meanwhile: &mut impl Meanwhile) {
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if lower > 0 && tile.num_panels == 2 {
            self.configure(TILE_LEN, lower);
            if tile.stays {
                // SAFETY: passed on.
                unsafe { amx_blocks::two_by_two(tile, meanwhile) };
            } else {
                // SAFETY: passed on.
                unsafe { two_by_two(tile, meanwhile) };
            }
        }
        while meanwhile.next() {}
        if lower == 0 || tile.num_panels != 2 {
            debug_assert!(!tile.resumes, "no such sums are put aside");
            // SAFETY: passed on.
            unsafe { self.tile(tile) };
        }
    }

    unsafe fn tile(self, tile: &Tile) {
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if lower == 0 && tile.num_panels != 3 {
            self.configure(tile.num_rows, 0);
            // SAFETY: passed on.
            unsafe { one_by_some(tile) };
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
                unsafe { one_by_some(&part) };
            }
        }
    }
}
