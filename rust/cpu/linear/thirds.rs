//! f32 as sums of three numbers of bf16, so that units which multiply bf16 compute products of f32.
//!
//! An f32 has 24 binary digits and a bf16 eight: the upper half of its bits is a bf16, the upper half of what is left
//! another one, and what is left then a third. So a row of x becomes three rows, and where the weights are numbers of
//! bf16 nothing is lost: every product is exact, and sums are in f32. Only what is below 2^-126 is taken for zero, and
//! where x or a weight is infinite the result may be NaN instead. The splitting is known from emulations of f32 on matrix
//! units (Henry, Tang, Heinecke: Leveraging the bfloat16 artificial intelligence datatype for higher-precision
//! computations, 2019); there both sides are split.

#![expect(clippy::cast_ptr_alignment, reason = "whoever gives f32 gives them aligned")]
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::ops::Range;

use super::packed::Part;
use crate::cpu::element::Dtype;
use crate::cpu::isa::{Isa, Kernel, LANES, Simd, UPPER_HALF};
use crate::cpu::pool;
use crate::cpu::tensor::MatrixView;

/// Rows of bf16 that a row of f32 becomes, the largest numbers first.
pub(super) const PARTS: usize = 3;

/// Rows that a thread splits or looks at, at a time.
const ROWS_PER_PIECE: usize = 8;

/// Elements that a thread splits or looks at in a nanosecond, for the estimate of the duration.
const ELEMENTS_PER_NS: usize = 2;

/// The bf16 that an f32 begins with.
pub(super) fn upper_half(bits: u32) -> u16 {
    (bits >> 16) as u16
}

/// The f32 that is the same number as a bf16.
pub(super) fn widen(bits: u16) -> u32 {
    u32::from(bits) << 16
}

/// Some rows of weights.
struct Weights {
    address: *const u32,
    num_rows: usize,
    row_stride: usize,
    are_bf16: bool,
}

// SAFETY: the address is of memory that is only read.
unsafe impl Send for Weights {}

/// Whether parts in f32 hold nothing but numbers of bf16.
///
/// # Safety
/// The parts are readable, and aligned, f32.
pub(super) unsafe fn are_bf16(in_size: usize, parts: &[Part]) -> bool {
    let mut pieces = Vec::new();
    for part in parts {
        for first in (0..part.num_rows).step_by(ROWS_PER_PIECE) {
            pieces.push(Weights {
                address: part.weight.cast::<u32>().wrapping_add(first * part.row_stride),
                num_rows: ROWS_PER_PIECE.min(part.num_rows - first),
                row_stride: part.row_stride,
                are_bf16: true,
            });
        }
    }
    let num_elements = pieces.len() * ROWS_PER_PIECE * in_size;
    let estimated_ns = num_elements / ELEMENTS_PER_NS / pool::num_threads();
    pool::for_each(&mut pieces, estimated_ns as u64, |piece| {
        piece.are_bf16 = (0..piece.num_rows).all(|row| {
            // SAFETY: the caller vouches for the rows.
            let row = unsafe {
                std::slice::from_raw_parts(piece.address.wrapping_add(row * piece.row_stride), in_size)
            };
            row.iter().fold(0, |bits, word| bits | word) & !UPPER_HALF == 0
        });
    });
    pieces.iter().all(|piece| piece.are_bf16)
}

/// Some rows of x to split, and where to.
struct Splitting {
    x: MatrixView,
    out: MatrixView,
    rows: Range<usize>,
}

impl Kernel for &mut Splitting {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let element_bytes = Dtype::F32.size();
        for row in self.rows.clone() {
            for first in (0..self.out.width).step_by(LANES) {
                // SAFETY: whoever called `split` vouches for x as far as it reaches, and for the rows of the result,
                // which are whole vectors long.
                unsafe {
                    let whole = if first + LANES <= self.x.width {
                        simd.load_f32(self.x.at(row, first))
                    } else {
                        let mut lanes = [0.0; LANES];
                        let len = self.x.width.saturating_sub(first);
                        let from = self.x.row(row).wrapping_add(first * element_bytes);
                        std::ptr::copy_nonoverlapping(from, lanes.as_mut_ptr().cast(), len * element_bytes);
                        simd.load(&lanes)
                    };
                    let upper = simd.upper_half(whole);
                    let rest = simd.sub(whole, upper);
                    let middle = simd.upper_half(rest);
                    for (part, number) in [upper, middle, simd.sub(rest, middle)].into_iter().enumerate() {
                        simd.store_bf16(number, self.out.at(PARTS * row + part, first));
                    }
                }
            }
        }
    }
}

/// Writes `PARTS` rows of bf16, filled up with zeros, for each row of x. An infinity becomes a NaN.
///
/// # Safety
/// x is of f32, and readable; `out` is writable, `PARTS` times as many rows of bf16, as wide as x or wider, and whole
/// vectors; nobody else accesses it.
pub(super) unsafe fn split(isa: Isa, x: MatrixView, out: MatrixView) {
    let mut pieces: Vec<Splitting> = (0..x.num_rows)
        .step_by(ROWS_PER_PIECE)
        .map(|first| Splitting {
            x,
            out,
            rows: first..x.num_rows.min(first + ROWS_PER_PIECE),
        })
        .collect();
    let estimated_ns = x.num_rows * x.width / ELEMENTS_PER_NS / pool::num_threads();
    pool::for_each(&mut pieces, estimated_ns as u64, |piece| isa.run(&mut *piece));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn split_row(isa: Isa, x: &[f32]) -> Vec<[f32; PARTS]> {
        let width = x.len().next_multiple_of(LANES);
        let mut parts = vec![u16::MAX; PARTS * width];
        let view = |address: *const u8, dtype, num_rows, width| MatrixView {
            address: address.cast_mut(),
            dtype,
            num_rows,
            width,
            row_stride: width,
        };
        let row = view(x.as_ptr().cast(), Dtype::F32, 1, x.len());
        let out = view(parts.as_mut_ptr().cast_const().cast(), Dtype::Bf16, PARTS, width);
        // SAFETY: both are whole, and `out` is ours.
        unsafe { split(isa, row, out) };
        let number = |part: usize, idx: usize| f32::from_bits(widen(parts[part * width + idx]));
        for part in 0..PARTS {
            assert!(
                (x.len()..width).all(|idx| number(part, idx) == 0.0),
                "not filled up with zeros"
            );
        }
        (0..x.len())
            .map(|idx| [0, 1, 2].map(|part| number(part, idx)))
            .collect()
    }

    proptest! {
        #[test]
        fn parts_add_up_to_the_number(x in proptest::collection::vec(any::<f32>(), 1..50)) {
            for isa in Isa::available() {
                for (whole, parts) in x.iter().zip(split_row(isa, &x)) {
                    let sum = parts[2] + parts[1] + parts[0];
                    let lost = if whole.abs() < 1e-30 { f32::MIN_POSITIVE } else { 0.0 };
                    prop_assert!((sum - whole).abs() <= lost, "{}: {whole} is not {parts:?}", isa.name());
                }
            }
        }
    }

    #[test]
    fn numbers_of_bf16_are_told_from_others() {
        let mut numbers = [0x3f80_0000_u32, 0, 0xc2f1_0000, 0x7fc0_0000];
        for in_size in [1, 2, 4] {
            for spoilt in [None, Some(0), Some(3)] {
                if let Some(idx) = spoilt {
                    numbers[idx] |= 1;
                }
                let part = Part {
                    weight: numbers.as_ptr().cast(),
                    num_rows: 4 / in_size,
                    row_stride: in_size,
                    bias: std::ptr::null(),
                };
                // SAFETY: the part is whole.
                assert_eq!(unsafe { are_bf16(in_size, &[part]) }, spoilt.is_none());
                numbers = numbers.map(|bits| bits & UPPER_HALF);
            }
        }
    }
}
