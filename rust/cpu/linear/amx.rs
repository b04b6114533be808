//! Tiles of AMX: `tdpbf16ps` multiplies 16 rows of 32 elements by 16 columns.
//!
//! Rust has no stable intrinsics for it, so the loops are assembly. A block of 32 rows by two panels keeps four tiles
//! of sums, two of x and two of weights: the eight that there are. Up to 16 rows are multiplied by four panels at a
//! time.

use std::arch::asm;
use std::cell::Cell;

use super::piece::{MicroKernel, Pass, Tile};
use crate::cpu::amx::{Amx, ROW_BYTES, Shapes, TILE_LEN};
use crate::cpu::isa::LANES;

/// Elements along K that one instruction multiplies.
const STEP: usize = 32;

/// The tiles of this thread, within `with_tiles`.
#[derive(Clone, Copy)]
pub(super) struct Tiles<'a> {
    amx: Amx,
    /// Rows of the upper and of the lower tiles, as configured.
    shape: &'a Cell<(usize, usize)>,
}

/// Panels of the widest tile of so many rows.
pub(super) fn group_panels(num_rows: usize) -> usize {
    if num_rows > TILE_LEN { 2 } else { 4 }
}

/// Calls `work` on this thread, and gives the tiles up afterwards.
pub(super) fn with_tiles(amx: Amx, work: impl FnOnce(Tiles<'_>)) {
    let shape = Cell::new((0, 0));
    work(Tiles { amx, shape: &shape });
    amx.release();
}

impl Tiles<'_> {
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

/// Two by two tiles, whose weights and rows of x are loaded by the given instructions; `$fetch` asks for what is wanted
/// later. All loads come before the products, and products of the same weights follow each other: both take less power,
/// by which these instructions are bound when many cores use them.
macro_rules! two_by_two {
    ($tile:expr, $load_x:literal, $load_w:literal, [$($fetch:expr,)*]) => {{
        let tile: &Tile = $tile;
        let lower = tile.x.wrapping_add(TILE_LEN * tile.x_stride);
        asm!(
            "tilezero tmm0", "tilezero tmm1", "tilezero tmm2", "tilezero tmm3",
            "2:",
            concat!($load_x, " tmm4, [{x0} + {xs}*1]"), concat!($load_x, " tmm5, [{x1} + {xs}*1]"),
            concat!($load_w, " tmm6, [{w0} + {row}*1]"), concat!($load_w, " tmm7, [{w1} + {row}*1]"),
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm3, tmm5, tmm7",
            $($fetch,)*
            "add {x0}, 64", "add {x1}, 64", "add {w0}, 1024", "add {w1}, 1024",
            "dec {steps}", "jnz 2b",
            "tilestored [{s0} + {ss}*1], tmm0", "tilestored [{s0} + {ss}*1 + 64], tmm1",
            "tilestored [{s1} + {ss}*1], tmm2", "tilestored [{s1} + {ss}*1 + 64], tmm3",
            "/* {ahead} */",
            x0 = inout(reg) tile.x => _,
            x1 = inout(reg) lower => _,
            xs = in(reg) tile.x_stride,
            w0 = inout(reg) tile.panels => _,
            w1 = inout(reg) tile.panels.wrapping_add(tile.panel_stride) => _,
            ahead = inout(reg) tile.ahead => _,
            row = in(reg) ROW_BYTES,
            steps = inout(reg) tile.depth / STEP => _,
            s0 = in(reg) tile.sums,
            s1 = in(reg) tile.sums.wrapping_add(TILE_LEN * tile.sums_stride),
            ss = in(reg) tile.sums_stride * size_of::<f32>(),
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }};
    ($tile:expr, $load_x:literal, $load_w:literal, ahead) => {
        two_by_two!($tile, $load_x, $load_w, [fetch!(), fetch!(),])
    };
}

/// Up to 32 rows, more than 16, by two panels. What passes by once is loaded so that it does not displace what stays in
/// the nearest cache (`tileloaddt1`); the next two panels are fetched from afar while these are multiplied.
unsafe fn two_by_two(tile: &Tile) {
    // SAFETY: the caller vouches for the memory, and configured the tiles; a prefetch may ask for any address.
    unsafe {
        match tile.pass {
            Pass::Only => two_by_two!(tile, "tileloadd", "tileloaddt1", ahead),
            Pass::First => two_by_two!(tile, "tileloaddt1", "tileloadd", ahead),
            Pass::Later => two_by_two!(tile, "tileloaddt1", "tileloadd", []),
        }
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
            steps = inout(reg) tile.depth / STEP => _,
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
    /// Never cut: putting sums aside costs more than reading panels again that are too long for the nearest cache.
    const MAX_DEPTH: usize = usize::MAX;

    fn max_panels(self, num_rows: usize) -> usize {
        group_panels(num_rows)
    }

    unsafe fn tile(self, tile: &Tile) {
        debug_assert!(!tile.resumes, "no sum is put aside");
        let lower = tile.num_rows.saturating_sub(TILE_LEN);
        if lower > 0 && tile.num_panels == 2 {
            self.configure(TILE_LEN, lower);
            // SAFETY: passed on.
            unsafe { two_by_two(tile) };
            return;
        }
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
