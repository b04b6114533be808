//! Tiles of dot products of pairs of bf16, summed in f32: `vdpbf16ps`, which flushes denormal numbers to zero and adds
//! the odd element's product first.

use std::arch::is_x86_feature_detected as has;
use std::arch::x86_64::{
    __m512bh, __m512i, _MM_HINT_T1, _mm_prefetch, _mm512_dpbf16_ps, _mm512_loadu_ps, _mm512_loadu_si512,
    _mm512_set1_epi32, _mm512_setzero_ps, _mm512_storeu_ps,
};
use std::mem::transmute;

use super::piece::{MicroKernel, Tile};
use crate::cpu::isa::LANES;
use crate::memory::CACHE_LINE_BYTES;

/// Panels of a tile.
const WIDE: usize = 3;
/// Rows of a tile: with three panels 24 accumulators, three vectors of weights and one of x.
const ROWS: usize = 8;

/// Bytes of a step along K in a panel: a cache line of pairs.
const STEP_BYTES: usize = LANES * size_of::<i32>();
/// Steps whose successors are fetched at a time.
const FETCHED_STEPS: usize = 4;

/// Proof that the processor has AVX512-BF16.
#[derive(Clone, Copy, Debug)]
pub struct DotBf16(());

impl DotBf16 {
    /// Asks the processor.
    pub(super) fn detect() -> Option<Self> {
        (has!("avx512f") && has!("avx512bf16")).then_some(Self(()))
    }
}

/// R rows by P panels.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn multiply<const R: usize, const P: usize>(tile: &Tile<'_>) {
    let mut sums = [[_mm512_setzero_ps(); P]; R];
    let at = |row: usize, panel: usize| tile.sums.wrapping_add(row * tile.sums_stride + panel * LANES);
    if tile.resumes {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (panel, sum) in sums.iter_mut().enumerate() {
                // SAFETY: the caller vouches for the sums.
                *sum = unsafe { _mm512_loadu_ps(at(row, panel)) };
            }
        }
    }
    let (mut x, mut weights) = (tile.x, tile.panels);
    let mut ahead = tile.ahead;
    for step in 0..tile.depth / 2 {
        if step % FETCHED_STEPS == 0 {
            for _ in 0..FETCHED_STEPS * tile.ahead_lines {
                _mm_prefetch::<_MM_HINT_T1>(ahead.cast());
                ahead = ahead.wrapping_add(CACHE_LINE_BYTES);
            }
        }
        // SAFETY: the caller vouches for as many pairs of rows and panels; the transmuted types are all 64 bytes.
        unsafe {
            let mut columns = [_mm512_set1_epi32(0); P];
            for (panel, column) in columns.iter_mut().enumerate() {
                *column = _mm512_loadu_si512(weights.wrapping_add(panel * tile.panel_stride).cast());
            }
            for (row, sums) in sums.iter_mut().enumerate() {
                let pair = x.wrapping_add(row * tile.x_stride).cast::<i32>().read_unaligned();
                let pairs = transmute::<__m512i, __m512bh>(_mm512_set1_epi32(pair));
                for (sum, column) in sums.iter_mut().zip(columns) {
                    *sum = _mm512_dpbf16_ps(*sum, pairs, transmute::<__m512i, __m512bh>(column));
                }
            }
        }
        x = x.wrapping_add(size_of::<i32>());
        weights = weights.wrapping_add(STEP_BYTES);
    }
    for (row, sums) in sums.iter().enumerate() {
        for (panel, sum) in sums.iter().enumerate() {
            // SAFETY: the caller vouches for the sums.
            unsafe { _mm512_storeu_ps(at(row, panel), *sum) };
        }
    }
}

/// Any number of rows by P panels.
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn rows<const P: usize>(tile: &Tile<'_>) {
    // SAFETY: passed on.
    unsafe {
        match tile.num_rows {
            1 => multiply::<1, P>(tile),
            2 => multiply::<2, P>(tile),
            3 => multiply::<3, P>(tile),
            4 => multiply::<4, P>(tile),
            5 => multiply::<5, P>(tile),
            6 => multiply::<6, P>(tile),
            7 => multiply::<7, P>(tile),
            _ => multiply::<ROWS, P>(tile),
        }
    }
}

impl MicroKernel for DotBf16 {
    const MAX_ROWS: usize = ROWS;
    /// Three panels of 1024 along K are 96 KB, a part of the second-level cache. Cuts for the nearest one cost more than
    /// they save.
    const MAX_DEPTH: usize = 1024;

    fn max_panels(self, _num_rows: usize) -> usize {
        WIDE
    }

    unsafe fn tile(self, tile: &Tile<'_>) {
        // SAFETY: `self` proves the instructions; the rest is passed on, whole or in parts.
        unsafe {
            match tile.num_panels {
                1 => rows::<1>(tile),
                2 => rows::<2>(tile),
                _ => rows::<WIDE>(tile),
            }
        }
    }
}
