//! Tiles of f32 multiply-adds, for weights of every type and every instruction set of `isa`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]
#![expect(
    clippy::cast_ptr_alignment,
    reason = "rows are f32, and a vector may be read from any address"
)]

use std::marker::PhantomData;

use super::piece::{MicroKernel, Tile};
use crate::cpu::element::Element;
use crate::cpu::isa::{Isa, LANES, Simd};
use crate::memory::CACHE_LINE_BYTES;

/// Rows of a tile. With four panels their 24 accumulators, four vectors of weights and one of x fill the 32 registers
/// of AVX-512; with one panel the 12 halves do the same for the 16 of AVX2.
const ROWS: usize = 6;
/// Panels of a tile where there are 32 registers.
const WIDE: usize = 4;

/// Steps along K between two calculations of addresses, which compete with multiply-adds for the processor's ports.
const UNROLLED: usize = 4;

/// Panels that work is cut at.
pub(super) fn group_panels(isa: Isa) -> usize {
    match isa {
        Isa::Portable(_) => 2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2(_) => 2,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512(_) => WIDE,
    }
}

/// Multiply-adds on an instruction set.
#[derive(Clone, Copy, Debug)]
pub(super) struct Fma<S, E> {
    simd: S,
    element: PhantomData<E>,
}

impl<S: Simd, E: Element> Fma<S, E> {
    #[inline(always)]
    pub(super) fn new(simd: S) -> Self {
        Self {
            simd,
            element: PhantomData,
        }
    }

    #[inline(always)]
    unsafe fn rows<const P: usize>(self, tile: &Tile<'_>) {
        // SAFETY: passed on.
        unsafe {
            match tile.num_rows {
                1 => self.multiply::<1, P>(tile),
                2 => self.multiply::<2, P>(tile),
                3 => self.multiply::<3, P>(tile),
                4 => self.multiply::<4, P>(tile),
                5 => self.multiply::<5, P>(tile),
                _ => self.multiply::<ROWS, P>(tile),
            }
        }
    }

    /// Adds the products of one step along K.
    #[inline(always)]
    unsafe fn add_products<const R: usize, const P: usize>(
        self,
        tile: &Tile<'_>,
        x: *const u8,
        weights: *const u8,
        sums: &mut [[S::V; P]; R],
    ) {
        let simd = self.simd;
        // SAFETY: the caller vouches for an element of every row and a step of every panel.
        unsafe {
            // Not in a closure, which would be compiled without the instructions of `simd`.
            let mut columns = [simd.splat(0.0); P];
            for (panel, column) in columns.iter_mut().enumerate() {
                *column = E::load(simd, weights.wrapping_add(panel * tile.panel_stride));
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let element = simd.splat(*x.wrapping_add(row * tile.x_stride).cast::<f32>());
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = simd.mul_add(element, column, *sum);
                }
            }
        }
    }

    /// R rows by P panels.
    #[inline(always)]
    unsafe fn multiply<const R: usize, const P: usize>(self, tile: &Tile<'_>) {
        let simd = self.simd;
        let mut sums = [[simd.splat(0.0); P]; R];
        let at = |row: usize, panel: usize| tile.sums.wrapping_add(row * tile.sums_stride + panel * LANES);
        if tile.resumes {
            for (row, sums) in sums.iter_mut().enumerate() {
                for (panel, sum) in sums.iter_mut().enumerate() {
                    // SAFETY: the caller vouches for the sums.
                    *sum = unsafe { simd.load_f32(at(row, panel).cast()) };
                }
            }
        }
        let (mut x, mut weights) = (tile.x, tile.panels);
        let mut ahead = tile.ahead;
        for _ in 0..tile.depth / UNROLLED {
            for _ in 0..UNROLLED * tile.ahead_lines {
                simd.prefetch(ahead);
                ahead = ahead.wrapping_add(CACHE_LINE_BYTES);
            }
            for _ in 0..UNROLLED {
                // SAFETY: the caller vouches for as many elements of rows and panels.
                unsafe { self.add_products(tile, x, weights, &mut sums) };
                x = x.wrapping_add(size_of::<f32>());
                weights = weights.wrapping_add(step_bytes::<E>());
            }
        }
        for _ in 0..tile.depth % UNROLLED {
            // SAFETY: as above.
            unsafe { self.add_products(tile, x, weights, &mut sums) };
            x = x.wrapping_add(size_of::<f32>());
            weights = weights.wrapping_add(step_bytes::<E>());
        }
        for (row, sums) in sums.iter().enumerate() {
            for (panel, sum) in sums.iter().enumerate() {
                // SAFETY: the caller vouches for the sums.
                simd.store(*sum, unsafe { &mut *at(row, panel).cast() });
            }
        }
    }
}

/// Bytes of one step along K in a panel.
#[inline(always)]
const fn step_bytes<E: Element>() -> usize {
    LANES * E::DTYPE.size()
}

impl<S: Simd, E: Element> MicroKernel for Fma<S, E> {
    const MAX_ROWS: usize = ROWS;
    /// Four panels of 128 f32 along K are 32 KB.
    const MAX_DEPTH: usize = 512 / E::DTYPE.size();

    #[inline(always)]
    fn max_panels(self, _num_rows: usize) -> usize {
        if S::TILE_VECTORS < WIDE { 1 } else { WIDE }
    }

    #[inline(always)]
    unsafe fn tile(self, tile: &Tile<'_>) {
        if S::TILE_VECTORS >= WIDE && tile.num_panels == WIDE {
            // SAFETY: passed on.
            unsafe { self.rows::<WIDE>(tile) };
            return;
        }
        for panel in 0..tile.num_panels {
            let one = Tile {
                num_panels: 1,
                panels: tile.panels.wrapping_add(panel * tile.panel_stride),
                sums: tile.sums.wrapping_add(panel * LANES),
                ahead_lines: if panel == 0 { tile.ahead_lines } else { 0 },
                ..*tile
            };
            // SAFETY: a part of what the caller vouches for.
            unsafe { self.rows::<1>(&one) };
        }
    }
}
