//! Weights in panels: sixteen columns of the product, all of their elements along K, dense and aligned.
//!
//! Element (k, column) of a panel lies at `[k / pair][column][k % pair]`, so that one step along K reads sixteen
//! columns, or sixteen pairs, from one or two cache lines, and a whole product reads every panel from front to back.
//! Where elements are coded (`coded`), a panel holds their codes instead, step by step in the same order.
//! Columns and steps that the weight does not have are zeros. Several weights on the same x are packed as one: one
//! after the other (q, k and v), or by turns of sixteen columns where the first gates the second.

use std::ops::Range;

use super::coded::{self, Code, Coding};
use super::memory::Memory;
use super::packing::Packing;
use super::{Arithmetic, thirds};
use crate::cpu::InvalidArgument;
use crate::cpu::element::Dtype;
use crate::cpu::isa::LANES;

/// A weight `[num_rows, K]` in memory, with its bias, before it is packed.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// The first element of the weight.
    pub weight: *const u8,
    /// Columns of the product.
    pub num_rows: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
    /// `[num_rows]`, of the weight's type, dense; null if there is none.
    pub bias: *const u8,
}

// SAFETY: a view is an address; the functions that follow it are unsafe and state who may access what.
unsafe impl Send for Part {}
// SAFETY: as above.
unsafe impl Sync for Part {}

/// A weight in panels, and its bias.
pub struct PackedWeight {
    panels: Memory,
    /// If the panels are coded.
    coding: Option<Coding>,
    /// By column of the panels; empty if there is none.
    bias: Vec<f32>,
    arithmetic: Arithmetic,
    /// Of the weight, of rows that are multiplied by it, and of their results.
    dtype: Dtype,
    /// Of the elements in the panels, or of those that coded ones stand for.
    panel_dtype: Dtype,
    in_size: usize,
    out_size: usize,
    num_panels: usize,
    /// K, filled up to whole steps.
    depth: usize,
    is_gated: bool,
}

impl PackedWeight {
    /// Packs parts for the arithmetic that the process uses for such weights: see `pack`.
    ///
    /// # Errors
    /// As `pack`.
    ///
    /// # Safety
    /// As `pack`.
    pub unsafe fn pack_for_process(
        dtype: Dtype,
        in_size: usize,
        parts: &[Part],
        is_gated: bool,
    ) -> Result<Self, InvalidArgument> {
        // SAFETY: f32 parts are asked for, and passed on.
        let arithmetic = Arithmetic::best(dtype, || unsafe { thirds::are_bf16(in_size, parts) });
        // SAFETY: passed on; f32 weights are bf16 numbers where it matters.
        unsafe { Self::pack(arithmetic, dtype, in_size, parts, is_gated) }
    }

    /// Packs parts for an arithmetic, on all threads of the pool. `is_gated`: there are two parts of equal size, and
    /// the product is `silu(first) * second`.
    ///
    /// # Errors
    /// Nothing to pack, or gated parts that are not two of equal size.
    ///
    /// # Safety
    /// The parts are readable, aligned to `dtype`, and unchanged during the call. What is more, though nothing unsafe
    /// comes of it: they hold no other numbers than the panels of the arithmetic can (`Arithmetic::panel_dtype`).
    pub unsafe fn pack(
        arithmetic: Arithmetic,
        dtype: Dtype,
        in_size: usize,
        parts: &[Part],
        is_gated: bool,
    ) -> Result<Self, InvalidArgument> {
        let num_columns: usize = parts.iter().map(|part| part.num_rows).sum();
        if num_columns == 0 || in_size == 0 {
            let shape = format!("[{num_columns}, {in_size}]");
            return Err(InvalidArgument::new(
                "shape of the weight",
                shape,
                "no zero in it",
            ));
        }
        let halves = matches!(parts, [gate, up] if gate.num_rows == up.num_rows);
        if is_gated && !halves {
            let sizes: Vec<usize> = parts.iter().map(|part| part.num_rows).collect();
            return Err(InvalidArgument::new(
                "rows of gated weights",
                format!("{sizes:?}"),
                "two of a size",
            ));
        }
        let num_panels = if is_gated {
            2 * parts[0].num_rows.div_ceil(LANES)
        } else {
            num_columns.div_ceil(LANES)
        };
        let code = if arithmetic.takes_codes() {
            // SAFETY: passed on; what takes codes takes bf16.
            unsafe { Code::choose(dtype, in_size, parts) }
        } else {
            None
        };
        let packing = Packing {
            parts,
            is_gated,
            dtype,
            panel_dtype: arithmetic.panel_dtype(dtype),
            in_size,
            depth: in_size.next_multiple_of(arithmetic.step()),
            pair: arithmetic.pair(),
        };
        // SAFETY: passed on.
        let ((panels, coding), bias) =
            unsafe { (packing.panels(num_panels, code), packing.bias(num_panels)) };
        Ok(Self {
            panels,
            coding,
            bias,
            arithmetic,
            dtype,
            panel_dtype: packing.panel_dtype,
            in_size,
            out_size: if is_gated { num_columns / 2 } else { num_columns },
            num_panels,
            depth: packing.depth,
            is_gated,
        })
    }

    /// K.
    pub fn in_size(&self) -> usize {
        self.in_size
    }

    /// Columns of the result.
    pub fn out_size(&self) -> usize {
        self.out_size
    }

    /// Type of the weight, of the rows that it multiplies, and of the rows that `copy_rows` copies.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Type of the elements in the panels: narrower, where that holds the same numbers.
    pub fn panel_dtype(&self) -> Dtype {
        self.panel_dtype
    }

    /// How it is multiplied.
    pub fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    /// Bytes of the panels, and of what is needed to read them.
    pub fn num_bytes(&self) -> usize {
        self.panels.num_bytes() + self.coding.as_ref().map_or(0, Coding::num_bytes)
    }

    /// Whether elements lie as codes of twelve bits.
    pub fn is_coded(&self) -> bool {
        self.coding.is_some()
    }

    /// Elements of the panels, padding included.
    pub fn num_elements(&self) -> usize {
        self.num_panels * LANES * self.depth
    }

    /// Panels, those that are filled up included.
    pub(super) fn num_panels(&self) -> usize {
        self.num_panels
    }

    /// K, filled up to whole steps.
    pub(super) fn depth(&self) -> usize {
        self.depth
    }

    pub(super) fn is_gated(&self) -> bool {
        self.is_gated
    }

    /// The bias by column of the panels; empty if there is none.
    pub(super) fn bias(&self) -> &[f32] {
        &self.bias
    }

    /// The panels cut into a part for each of so many threads, none empty. Panels of a gate stay with what they gate.
    pub(super) fn shares(&self, num_threads: usize) -> Vec<Range<usize>> {
        let num_pairs = self.num_panels.div_ceil(2);
        let num_shares = num_threads.min(num_pairs);
        let cut = |idx| self.num_panels.min(2 * (num_pairs * idx / num_shares));
        (0..num_shares).map(|idx| cut(idx)..cut(idx + 1)).collect()
    }

    /// How the panels are coded, if they are.
    pub(super) fn coding(&self) -> Option<&Coding> {
        self.coding.as_ref()
    }

    /// Bytes of a panel.
    pub(super) fn panel_bytes(&self) -> usize {
        panel_bytes(self.num_panel_elements(), self.panel_dtype, self.is_coded())
    }

    /// Bytes of a panel that is not coded, or no longer.
    pub(super) fn plain_panel_bytes(&self) -> usize {
        panel_bytes(self.num_panel_elements(), self.panel_dtype, false)
    }

    fn num_panel_elements(&self) -> usize {
        self.depth * LANES
    }

    /// Where a panel begins.
    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        debug_assert!(panel < self.num_panels);
        self.panels
            .address()
            .cast_const()
            .wrapping_add(panel * self.panel_bytes())
    }

    /// Refuses rows that the weight does not have, and weights whose rows are no longer apart.
    ///
    /// # Errors
    /// The first row that is not there.
    pub fn check_rows(&self, row_ids: &[i32]) -> Result<(), InvalidArgument> {
        if self.is_gated {
            return Err(InvalidArgument::new("weight", "gated", "one that is not"));
        }
        let outside = |&id: &i32| !usize::try_from(id).is_ok_and(|id| id < self.out_size);
        match row_ids.iter().position(outside) {
            Some(idx) => Err(InvalidArgument::new(
                format!("row_ids[{idx}]"),
                row_ids[idx],
                format!("0 to {}", self.out_size - 1),
            )),
            None => Ok(()),
        }
    }

    /// Copies rows of the weight, `[K]` each of its type, to `out`, one after the other: what an embedding reads that
    /// shares its weight with the output layer, so that the weight is held once.
    ///
    /// # Safety
    /// The rows passed `check_rows`; `out` is writable for `in_size` elements each, and nobody else accesses it.
    pub unsafe fn copy_rows(&self, row_ids: &[i32], out: *mut u8) {
        let row_bytes = self.in_size * self.dtype.size();
        for (idx, &row) in row_ids.iter().enumerate() {
            let row = row.unsigned_abs() as usize; // Checked: not negative.
            let (panel, lane) = (row / LANES, row % LANES);
            let out = out.wrapping_add(idx * row_bytes);
            // SAFETY: the panel is `depth` elements deep; the caller vouches for `out`.
            unsafe {
                match (self.dtype, self.panel_dtype) {
                    (Dtype::F32, Dtype::Bf16) => self.copy_lane(panel, lane, out, thirds::widen),
                    (Dtype::F32, _) => self.copy_lane(panel, lane, out, |word: u32| word),
                    (Dtype::Bf16 | Dtype::F16, _) => self.copy_lane(panel, lane, out, |half: u16| half),
                }
            }
        }
    }

    /// Copies a column of a panel, each element by way of `widen`.
    ///
    /// # Safety
    /// The panel holds elements like `P`; `out` is writable for `in_size` like `T`, and nobody else accesses it.
    unsafe fn copy_lane<P: Copy + From<u16>, T>(
        &self,
        panel: usize,
        lane: usize,
        out: *mut u8,
        widen: fn(P) -> T,
    ) {
        let (address, out) = (self.panel(panel), out.cast::<T>());
        let pair = self.arithmetic.pair();
        for k in 0..self.in_size {
            let element = offset(k, lane, pair);
            // SAFETY: k is within the panel and within `out`.
            unsafe {
                let element = match &self.coding {
                    Some(coding) => coding.code.element(address, element).into(),
                    None => *address.cast::<P>().add(element),
                };
                *out.add(k) = widen(element);
            }
        }
        let exceptions = self.coding.iter().flat_map(|coding| coding.exceptions(panel));
        for exception in exceptions {
            let (k, of_lane) = place(exception.element(), pair);
            if of_lane == lane {
                // SAFETY: what fills the panel up has a code, so k is within `out`.
                unsafe { *out.add(k) = widen(exception.bits.into()) };
            }
        }
    }
}

impl std::fmt::Debug for PackedWeight {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PackedWeight")
            .field("arithmetic", &self.arithmetic.name())
            .field("in_size", &self.in_size)
            .field("out_size", &self.out_size)
            .finish_non_exhaustive()
    }
}

/// Bytes of a panel of so many elements.
pub(super) fn panel_bytes(num_elements: usize, dtype: Dtype, is_coded: bool) -> usize {
    if is_coded {
        num_elements / coded::STEP_ELEMENTS * coded::STEP_BYTES
    } else {
        num_elements * dtype.size()
    }
}

/// Elements from the beginning of a panel to one of its own.
#[inline]
pub(super) fn offset(k: usize, lane: usize, pair: usize) -> usize {
    (k / pair * LANES + lane) * pair + k % pair
}

/// The inverse of `offset`: k and lane.
fn place(element: usize, pair: usize) -> (usize, usize) {
    (
        element / (pair * LANES) * pair + element % pair,
        element / pair % LANES,
    )
}
