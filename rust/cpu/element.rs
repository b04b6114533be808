//! The element types of tensors, and rows of them converted to and from f32.
//!
//! Everything is computed in f32; a row is widened when it is read and rounded to nearest, ties to even, when it is
//! written. Called by every kernel of the parent module.

#![expect(
    clippy::inline_always,
    reason = "a row is converted with the instruction set of its caller"
)]
#![expect(clippy::cast_ptr_alignment, reason = "the callers vouch for the alignment")]

use half::f16;
use half::slice::HalfFloatSliceExt;

use super::isa::{LANES, Simd};

/// The element type of a tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Dtype {
    /// IEEE single precision.
    F32,
    /// The upper half of a single: eight bits of exponent, seven of fraction.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl Dtype {
    /// Bytes of one element.
    #[inline]
    pub const fn size(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::Bf16 | Self::F16 => 2,
        }
    }

    /// What torch calls the type: `torch.<name>`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::Bf16 => "bfloat16",
            Self::F16 => "float16",
        }
    }

    /// The type that torch calls `torch.<name>`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "float32" => Some(Self::F32),
            "bfloat16" => Some(Self::Bf16),
            "float16" => Some(Self::F16),
            _ => None,
        }
    }
}

/// Rounds to bf16. A NaN stays a NaN: it keeps its sign and becomes quiet.
#[inline(always)]
fn bf16_bits(value: f32) -> u16 {
    let bits = value.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1));
    let quiet = bits | 0x0040_0000;
    ((if value.is_nan() { quiet } else { rounded }) >> 16) as u16
}

/// Rounds numbers to what the type can hold; they stay f32.
#[inline(always)]
pub(crate) fn round_row(dtype: Dtype, row: &mut [f32]) {
    match dtype {
        Dtype::F32 => {}
        Dtype::Bf16 => {
            for value in row {
                *value = f32::from_bits(u32::from(bf16_bits(*value)) << 16);
            }
        }
        Dtype::F16 => {
            let mut narrow = [f16::ZERO; 64];
            for wide in row.chunks_mut(narrow.len()) {
                let narrow = &mut narrow[..wide.len()];
                narrow.convert_from_f32_slice(wide);
                narrow.convert_to_f32_slice(wide);
            }
        }
    }
}

/// Widens `dst.len()` consecutive elements at `src`.
///
/// # Safety
/// `src` is aligned to `dtype` and readable for that many elements.
#[inline(always)]
pub(crate) unsafe fn load_row(dtype: Dtype, src: *const u8, dst: &mut [f32]) {
    match dtype {
        Dtype::F32 => {
            // SAFETY: the caller vouches for the length and the alignment.
            let row = unsafe { std::slice::from_raw_parts(src.cast::<f32>(), dst.len()) };
            dst.copy_from_slice(row);
        }
        Dtype::Bf16 => {
            // SAFETY: the caller vouches for the length and the alignment.
            let row = unsafe { std::slice::from_raw_parts(src.cast::<u16>(), dst.len()) };
            for (wide, &narrow) in dst.iter_mut().zip(row) {
                *wide = f32::from_bits(u32::from(narrow) << 16);
            }
        }
        Dtype::F16 => {
            // SAFETY: the caller vouches for the length and the alignment; f16 is a transparent u16.
            let row = unsafe { std::slice::from_raw_parts(src.cast::<f16>(), dst.len()) };
            row.convert_to_f32_slice(dst);
        }
    }
}

/// Rounds `src` into consecutive elements at `dst`.
///
/// # Safety
/// `dst` is aligned to `dtype`, writable for `src.len()` elements, and nobody else accesses them meanwhile.
#[inline(always)]
pub(crate) unsafe fn store_row(dtype: Dtype, src: &[f32], dst: *mut u8) {
    match dtype {
        Dtype::F32 => {
            // SAFETY: the caller vouches for the length, the alignment and the exclusive access.
            let row = unsafe { std::slice::from_raw_parts_mut(dst.cast::<f32>(), src.len()) };
            row.copy_from_slice(src);
        }
        Dtype::Bf16 => {
            // SAFETY: the caller vouches for the length, the alignment and the exclusive access.
            let row = unsafe { std::slice::from_raw_parts_mut(dst.cast::<u16>(), src.len()) };
            for (narrow, &wide) in row.iter_mut().zip(src) {
                *narrow = bf16_bits(wide);
            }
        }
        Dtype::F16 => {
            // SAFETY: the caller vouches for the length, the alignment and the exclusive access; f16 is a transparent u16.
            let row = unsafe { std::slice::from_raw_parts_mut(dst.cast::<f16>(), src.len()) };
            row.convert_from_f32_slice(src);
        }
    }
}

/// A type of elements, for loops that are compiled for each.
pub(super) trait Element: Copy {
    /// What it is at run time.
    const DTYPE: Dtype;
    /// Reads and widens sixteen elements.
    ///
    /// # Safety
    /// `src` is readable for sixteen elements.
    unsafe fn load<S: Simd>(simd: S, src: *const u8) -> S::V;
}

macro_rules! widened {
    ($($name:ident: $dtype:ident, $load:ident;)*) => {
        $(
            /// The type that `Dtype` calls so.
            #[derive(Clone, Copy, Debug)]
            pub(super) struct $name;

            impl Element for $name {
                const DTYPE: Dtype = Dtype::$dtype;
                #[inline(always)]
                unsafe fn load<S: Simd>(simd: S, src: *const u8) -> S::V {
                    // SAFETY: passed on.
                    unsafe { simd.$load(src) }
                }
            }
        )*
    };
}

widened! {
    F32: F32, load_f32;
    Bf16: Bf16, load_bf16;
    F16: F16, load_f16;
}

/// Reads and widens a vector.
///
/// # Safety
/// `src` is readable for sixteen elements of the type.
#[inline(always)]
pub(crate) unsafe fn load_vector<S: Simd>(simd: S, dtype: Dtype, src: *const u8) -> S::V {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            Dtype::F32 => simd.load_f32(src),
            Dtype::Bf16 => simd.load_bf16(src),
            Dtype::F16 => simd.load_f16(src),
        }
    }
}

/// Rounds a vector to what the type can hold; it stays f32.
#[inline(always)]
pub(crate) fn round_vector<S: Simd>(simd: S, dtype: Dtype, vector: S::V) -> S::V {
    match dtype {
        Dtype::F32 => vector,
        Dtype::Bf16 => simd.round_bf16(vector),
        Dtype::F16 => {
            let mut lanes = [0.0; LANES];
            simd.store(vector, &mut lanes);
            round_row(dtype, &mut lanes);
            simd.load(&lanes)
        }
    }
}

/// Rounds and writes a vector.
///
/// # Safety
/// `dst` is aligned to the type, writable for sixteen elements, and nobody else accesses them meanwhile.
#[inline(always)]
pub(crate) unsafe fn store_vector<S: Simd>(simd: S, dtype: Dtype, vector: S::V, dst: *mut u8) {
    // SAFETY: passed on.
    unsafe {
        match dtype {
            Dtype::F32 => simd.store(vector, &mut *dst.cast::<[f32; LANES]>()),
            Dtype::Bf16 => simd.store_bf16(vector, dst),
            Dtype::F16 => {
                let mut lanes = [0.0; LANES];
                simd.store(vector, &mut lanes);
                store_row(dtype, &lanes, dst);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::isa::{Isa, Kernel};
    use super::*;
    use half::bf16;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn bf16_rounds_as_the_half_crate_does(bits: u32) {
            let value = f32::from_bits(bits);
            prop_assert_eq!(bf16_bits(value), bf16::from_f32(value).to_bits());
        }

        #[test]
        fn every_type_returns_what_it_can_hold(bits in proptest::collection::vec(any::<u16>(), 0..70)) {
            for dtype in [Dtype::Bf16, Dtype::F16] {
                let mut wide = vec![0.0; bits.len()];
                let mut back = vec![0_u16; bits.len()];
                // SAFETY: both vectors hold as many elements as `wide`.
                unsafe {
                    load_row(dtype, bits.as_ptr().cast(), &mut wide);
                    store_row(dtype, &wide, back.as_mut_ptr().cast());
                }
                for ((&before, &after), &value) in bits.iter().zip(&back).zip(&wide) {
                    prop_assert!(before == after || value.is_nan());
                }
            }
        }
    }

    /// Writes sixteen numbers of a type.
    struct StoreVector<'a> {
        dtype: Dtype,
        lanes: [f32; LANES],
        out: &'a mut [u32; LANES],
    }

    impl Kernel for StoreVector<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            // SAFETY: `out` has room for sixteen elements of every type.
            unsafe {
                store_vector(
                    simd,
                    self.dtype,
                    simd.load(&self.lanes),
                    self.out.as_mut_ptr().cast(),
                );
            };
        }
    }

    proptest! {
        #[test]
        fn vectors_are_rounded_as_rows(bits in proptest::array::uniform16(any::<u32>())) {
            let special = [0x7f80_0001, 0xff80_0000, 0x7f7f_ffff, 1, 0x3f80_8000, 0x3f81_8000];
            let lanes = std::array::from_fn(|idx| {
                f32::from_bits(if bits[idx] % 3 == 0 { special[idx % 6] } else { bits[idx] })
            });
            for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
                let mut expected = [0; LANES];
                // SAFETY: it has room for sixteen elements of every type.
                unsafe { store_row(dtype, &lanes, expected.as_mut_ptr().cast()) };
                for isa in Isa::available() {
                    let mut out = [0; LANES];
                    isa.run(StoreVector { dtype, lanes, out: &mut out });
                    prop_assert_eq!(out, expected, "{:?} on {}", dtype, isa.name());
                }
            }
        }
    }

    #[test]
    fn names_are_those_of_torch() {
        assert_eq!(Dtype::from_name("bfloat16"), Some(Dtype::Bf16));
        assert_eq!(Dtype::from_name("float64"), None);
        assert_eq!(Dtype::F32.size(), 4);
    }
}
