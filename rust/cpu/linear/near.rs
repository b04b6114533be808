//! Where the elements of coded panels come to be, near the unit that multiplies them.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::cell::Cell;
use std::ops::Range;

use super::PackedWeight;
use super::coded::{self, Coding};
use crate::cpu::isa::AlignedBuffer;

/// Steps of a panel whose elements have a place in the nearest cache at a time, where they are put together for one tile:
/// that which is multiplied, and the next one.
const NEAR_STEPS: usize = 2;

thread_local! {
    /// The places: kept, as fresh memory costs more.
    pub(super) static NEAR: Cell<AlignedBuffer> = Cell::default();
}

/// Panels whose elements are to be put together.
#[derive(Clone, Copy, Debug)]
pub(super) struct CodedPanels<'k> {
    pub(super) coding: &'k Coding,
    /// Number of the first panel.
    pub(super) first: usize,
    pub(super) address: *const u8,
    /// Bytes from a panel to the next.
    pub(super) stride: usize,
    /// The elements of a step along K come to be at the place of this step of their panel, of which only the bits are
    /// counted that are set here: so few steps are enough for a tile that is the only one to need them.
    pub(super) near_mask: usize,
}

impl CodedPanels<'_> {
    /// Whether the elements are kept for other tiles.
    pub(super) fn are_kept(self) -> bool {
        self.near_mask == usize::MAX
    }

    /// Those from one of the panels on.
    pub(super) fn from(self, panel: usize) -> Self {
        Self {
            first: self.first + panel,
            address: self.address.wrapping_add(panel * self.stride),
            ..self
        }
    }
}

/// Panels of a weight as tiles read them.
pub(super) struct TilePanels<'k> {
    /// The panel whose elements lie at the address, or come to be there.
    first_panel: usize,
    address: *const u8,
    /// Bytes from a panel to the next.
    pub(super) stride: usize,
    /// If the elements are to be put together.
    coding: Option<&'k Coding>,
    /// See `CodedPanels`.
    near_mask: usize,
}

impl<'k> TilePanels<'k> {
    /// Panels of a weight, with places for their elements if they are coded: for all of them where they are kept for other
    /// rows than the first ones, else for one tile.
    #[inline(always)]
    pub(super) fn new(
        weight: &'k PackedWeight,
        panels: &Range<usize>,
        [are_kept, is_first]: [bool; 2],
        near: &mut AlignedBuffer,
    ) -> Self {
        let Some(coding) = weight.coding() else {
            return Self {
                first_panel: 0,
                address: weight.panel(0),
                stride: weight.panel_bytes(),
                coding: None,
                near_mask: usize::MAX,
            };
        };
        let (stride, near_mask) = if are_kept {
            (weight.plain_panel_bytes(), usize::MAX)
        } else {
            (NEAR_STEPS * coded::PLAIN_STEP_BYTES, NEAR_STEPS - 1)
        };
        let len = panels.len() * stride / size_of::<f32>();
        near.reserve(len);
        Self {
            first_panel: panels.start,
            address: near.slice(0..len).as_mut_ptr().cast_const().cast(),
            stride,
            coding: (is_first || !are_kept).then_some(coding),
            near_mask,
        }
    }

    /// Where the elements of a panel are.
    #[inline(always)]
    pub(super) fn panel(&self, panel: usize) -> *const u8 {
        self.address
            .wrapping_add((panel - self.first_panel) * self.stride)
    }

    /// What they are to be put together from.
    #[inline(always)]
    pub(super) fn coded(&self, weight: &PackedWeight, panel: usize) -> Option<CodedPanels<'k>> {
        self.coding.map(|coding| CodedPanels {
            coding,
            first: panel,
            address: weight.panel(panel),
            stride: weight.panel_bytes(),
            near_mask: self.near_mask,
        })
    }
}
