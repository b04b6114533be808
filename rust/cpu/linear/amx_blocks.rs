//! Many rows on tiles of AMX: blocks of 32 rows pass by two panels that stay in the nearest cache.
//!
//! Four tiles of sums, two of x and two of weights are the eight that there are, so every product needs a tile to be
//! loaded, and its operands bound it. Measured with all of them in the nearest cache 85% of the products on registers;
//! with x from the second-level cache 70% to 80% if it is loaded so that it does not displace the panels
//! (`tileloaddt1`), and 50% to 55% if it does. Each tile is loaded just before the first product that needs it, a tenth
//! faster than all loads before the products, and the units that are idle meanwhile have room for few instructions in
//! each step: what the processor looks ahead must reach the loads of the next one.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::asm;
use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};

use super::amx::{store, zero};
use super::piece::{Meanwhile, Tile};
use crate::cpu::amx::{DEPTH, ROW_BYTES, TILE_LEN};
use crate::cpu::isa::LANES;

/// 17 to 32 rows by two panels that stay. What is read next is fetched from afar meanwhile, and `meanwhile` is done as
/// far as there are steps.
///
/// # Safety
/// As `MicroKernel::tile_while`; the tiles are configured: 0 and 1 hold sums of the upper rows, 2 and 3 of the lower
/// ones, 4 and 5 rows of x, 6 and 7 weights.
#[inline(always)]
pub(super) unsafe fn two_by_two(tile: &Tile, meanwhile: &mut impl Meanwhile) {
    let mut x = [0, TILE_LEN].map(|row| tile.x.wrapping_add(row * tile.x_stride));
    let mut weights = [0, 1].map(|panel| tile.panels.wrapping_add(panel * tile.panel_stride));
    let mut ahead = tile.ahead;
    let sums = [0, TILE_LEN].map(|row| tile.sums.wrapping_add(row * tile.sums_stride));
    let sums_stride = tile.sums_stride * size_of::<f32>();
    // SAFETY: the caller vouches for the memory, and configured the tiles; a prefetch may ask for any address. What the
    // registers hold stays from one instruction to the next, since the compiler knows none of them.
    unsafe {
        zero!(0, 1, 2, 3);
        asm!(
            "tileloaddt1 tmm4, [{x0} + {xs}*1]", "tileloadd tmm6, [{w0} + {row}*1]",
            "tileloadd tmm7, [{w1} + {row}*1]", "tileloaddt1 tmm5, [{x1} + {xs}*1]",
            x0 = in(reg) x[0],
            x1 = in(reg) x[1],
            w0 = in(reg) weights[0],
            w1 = in(reg) weights[1],
            xs = in(reg) tile.x_stride,
            row = in(reg) ROW_BYTES,
            options(nostack, readonly),
        );
        for _ in 1..tile.depth / DEPTH {
            x = x.map(|rows| rows.wrapping_add(ROW_BYTES));
            weights = weights.map(|panel| panel.wrapping_add(TILE_LEN * ROW_BYTES));
            asm!(
                "tdpbf16ps tmm0, tmm4, tmm6",
                "tdpbf16ps tmm1, tmm4, tmm7",
                "tileloaddt1 tmm4, [{x0} + {xs}*1]",
                "tdpbf16ps tmm2, tmm5, tmm6",
                "tileloadd tmm6, [{w0} + {row}*1]",
                "tdpbf16ps tmm3, tmm5, tmm7",
                "tileloaddt1 tmm5, [{x1} + {xs}*1]",
                "tileloadd tmm7, [{w1} + {row}*1]",
                x0 = in(reg) x[0],
                x1 = in(reg) x[1],
                w0 = in(reg) weights[0],
                w1 = in(reg) weights[1],
                xs = in(reg) tile.x_stride,
                row = in(reg) ROW_BYTES,
                options(nostack, readonly),
            );
            for _ in 0..tile.ahead_lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(ROW_BYTES);
            }
            meanwhile.next();
        }
        asm!(
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            options(nostack, nomem),
        );
        store!(0, sums[0], sums_stride);
        store!(1, sums[0].wrapping_add(LANES), sums_stride);
        store!(2, sums[1], sums_stride);
        store!(3, sums[1].wrapping_add(LANES), sums_stride);
    }
}
