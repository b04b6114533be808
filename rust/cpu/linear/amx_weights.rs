//! The weights of a tile on their way from memory, between the instructions of AMX that multiply them.
//!
//! A core waits for few lines at a time, and for a request that finds no room it either waits, and with it all that
//! comes after, or drops it. So the lines are asked for one by one, as many as are used, and only once: requests of the
//! tiles that are loaded next from the second-level cache cost more than they save.
//!
//! Codes are put together a step before they are multiplied, in the nearest cache, by units which the matrix products
//! leave idle: where memory binds, up to 16 rows take little more than the three quarters of the time that their bytes are.

#![expect(
    clippy::cast_ptr_alignment,
    reason = "vectors are read and written at any address"
)]
#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]

use std::arch::x86_64::{
    __m512i, _MM_HINT_T0, _MM_HINT_T1, _mm_prefetch, _mm512_loadu_si512, _mm512_permutexvar_epi8,
    _mm512_set1_epi16, _mm512_shldi_epi16, _mm512_srli_epi16, _mm512_storeu_si512, _mm512_ternarylogic_epi32,
};

use super::coded::{self, Exception, GROUP_LINES, GROUPS, LOW_BYTES, PLAIN_STEP_BYTES};
use super::piece::Tile;
use crate::cpu::amx::DEPTH;
use crate::memory::CACHE_LINE_BYTES;

/// Panels of the widest tile.
pub(super) const MAX_PANELS: usize = 4;
/// Bytes of each panel between what is multiplied and what is asked for from memory.
const LEAD_BYTES: usize = 9 << 10;

/// What a loop along K does about its weights.
pub(super) trait Weights {
    /// For a tile, whose panels are coded if these are.
    fn new(tile: &Tile<'_>) -> Self;

    /// Before the first step.
    ///
    /// # Safety
    /// The tile that this was made of is valid, here and in `part`.
    #[inline(always)]
    unsafe fn begin<const PANELS: usize>(&mut self) {}

    /// Begins a step.
    fn begin_step(&mut self, step: usize);

    /// Where the weights of the present step lie, of a panel.
    fn at(&self, panel: usize) -> *const u8;

    /// One of `PARTS` parts, one, two or four, of what is to be done in each step for each panel.
    ///
    /// # Safety
    /// See `begin`.
    unsafe fn part<const PARTS: usize>(&mut self, part: usize, panel: usize);

    /// Ends a step.
    fn end_step(&mut self);
}

/// Requests of lines of panels into the second-level cache, each of whose steps has `STEP_BYTES`.
struct Requests<const STEP_BYTES: usize> {
    /// Where the first panel is asked for in this step.
    at: *const u8,
    /// Bytes from a panel that is asked for to the next one.
    stride: usize,
    /// The step from which on the panels end within the lead.
    last_steps: usize,
    /// What is asked for then, and bytes from a panel of it to the next.
    ahead: *const u8,
    ahead_stride: usize,
}

impl<const STEP_BYTES: usize> Requests<STEP_BYTES> {
    const LEAD_STEPS: usize = LEAD_BYTES / STEP_BYTES;

    /// For panels at an address, so many bytes apart.
    #[inline(always)]
    fn new(tile: &Tile<'_>, panels: *const u8, stride: usize) -> Self {
        let num_steps = tile.depth / DEPTH;
        let last_steps = num_steps.saturating_sub(Self::LEAD_STEPS);
        let missing = last_steps + Self::LEAD_STEPS - num_steps;
        Self {
            at: panels.wrapping_add(Self::LEAD_STEPS * STEP_BYTES),
            stride,
            last_steps,
            ahead: tile.ahead.wrapping_add(missing * STEP_BYTES),
            ahead_stride: tile.ahead_stride,
        }
    }

    /// Begins a step. Panels are asked for before they are read, those of the next tile at the end.
    #[inline(always)]
    fn begin_step(&mut self, step: usize) {
        if step == self.last_steps {
            (self.at, self.stride) = (self.ahead, self.ahead_stride);
        }
    }

    /// One of `PARTS` parts of the requests that belong to a panel of the tile.
    #[inline(always)]
    fn part<const PARTS: usize>(&self, part: usize, panel: usize) {
        let lines = STEP_BYTES / CACHE_LINE_BYTES / PARTS;
        let at = self.at.wrapping_add(panel * self.stride);
        for line in lines * part..lines * (part + 1) {
            prefetch::<_MM_HINT_T1>(at.wrapping_add(line * CACHE_LINE_BYTES));
        }
    }

    #[inline(always)]
    fn end_step(&mut self) {
        self.at = self.at.wrapping_add(STEP_BYTES);
    }
}

/// Asks for a line, which may be any, into the nearest or the second-level cache.
#[inline(always)]
fn prefetch<const HINT: i32>(address: *const u8) {
    // SAFETY: a prefetch accesses nothing.
    unsafe { _mm_prefetch::<HINT>(address.cast()) };
}

/// Places of a step of two panels.
const PLACES: usize = 8;

/// Requests of lines that are read later, a few in each step of two panels and two blocks of rows.
struct Later {
    at: *const u8,
    /// By place of a step, a bit: whether a line is asked for there.
    places: usize,
}

impl Later {
    /// Those of a tile.
    #[inline(always)]
    fn new(tile: &Tile<'_>) -> Self {
        let lines_before = |place: usize| place * tile.ahead_lines / PLACES;
        let asks = |place: &usize| lines_before(*place) != lines_before(place + 1);
        Self {
            at: tile.ahead,
            places: (0..PLACES).filter(asks).map(|place| 1 << place).sum(),
        }
    }

    /// One of `PARTS` parts of the requests that belong to a panel of the tile.
    #[inline(always)]
    fn part<const PARTS: usize>(&mut self, part: usize, panel: usize) {
        if self.places >> (PARTS * panel + part) & 1 != 0 {
            prefetch::<_MM_HINT_T1>(self.at);
            self.at = self.at.wrapping_add(CACHE_LINE_BYTES);
        }
    }
}

/// Weights as they are multiplied, which have come from memory before.
pub(super) struct Near {
    at: *const u8,
    stride: usize,
    later: Later,
}

impl Weights for Near {
    #[inline(always)]
    fn new(tile: &Tile<'_>) -> Self {
        Self {
            at: tile.panels,
            stride: tile.panel_stride,
            later: Later::new(tile),
        }
    }

    #[inline(always)]
    fn begin_step(&mut self, _step: usize) {}

    #[inline(always)]
    fn at(&self, panel: usize) -> *const u8 {
        self.at.wrapping_add(panel * self.stride)
    }

    #[inline(always)]
    unsafe fn part<const PARTS: usize>(&mut self, part: usize, panel: usize) {
        self.later.part::<PARTS>(part, panel);
    }

    #[inline(always)]
    fn end_step(&mut self) {
        self.at = self.at.wrapping_add(PLAIN_STEP_BYTES);
    }
}

/// Weights as they are multiplied, from memory.
pub(super) struct Plain {
    near: Near,
    requests: Requests<PLAIN_STEP_BYTES>,
}

impl Weights for Plain {
    #[inline(always)]
    fn new(tile: &Tile<'_>) -> Self {
        Self {
            near: Near::new(tile),
            requests: Requests::new(tile, tile.panels, tile.panel_stride),
        }
    }

    #[inline(always)]
    fn begin_step(&mut self, step: usize) {
        self.requests.begin_step(step);
    }

    #[inline(always)]
    fn at(&self, panel: usize) -> *const u8 {
        self.near.at(panel)
    }

    #[inline(always)]
    unsafe fn part<const PARTS: usize>(&mut self, part: usize, panel: usize) {
        self.requests.part::<PARTS>(part, panel);
    }

    #[inline(always)]
    fn end_step(&mut self) {
        self.near.end_step();
        self.requests.end_step();
    }
}

/// Codes, from memory if `ASKS`, put together a step ahead of the products; the elements are kept for other rows if
/// `KEEPS`, and go to the second-level cache.
pub(super) struct Coded<const ASKS: bool, const KEEPS: bool> {
    requests: Requests<{ coded::STEP_BYTES }>,
    /// By code, the high byte.
    high_bytes: __m512i,
    /// The step of the first panel that is put together now, and bytes from each panel to the next.
    from: *const u8,
    from_stride: usize,
    /// Its number, and that of steps.
    step: usize,
    num_steps: usize,
    /// By panel, the next exception.
    exceptions: [*const Exception; MAX_PANELS],
    /// Where the elements of the first panel come to be, bytes from each panel to the next, and steps of a panel, less
    /// one, before the first place is taken again.
    near: *mut u8,
    near_stride: usize,
    near_mask: usize,
    /// What else is asked for, unless the codes are.
    later: Later,
    /// There, the step that is multiplied, and the one that is put together.
    now: *const u8,
    next: *mut u8,
}

impl<const ASKS: bool, const KEEPS: bool> Coded<ASKS, KEEPS> {
    /// Turns to the next step.
    #[inline(always)]
    fn advance(&mut self) {
        self.step += 1;
        self.from = self.from.wrapping_add(coded::STEP_BYTES);
        self.now = self.next;
        self.next = self
            .near
            .wrapping_add((self.step & self.near_mask) * PLAIN_STEP_BYTES);
    }

    /// Puts four lines of a panel together, and asks for those of the step after this one, if they are kept: a store that
    /// finds its line no nearer than in the second-level cache holds up the stores after it.
    ///
    /// # Safety
    /// See `Weights::begin`; there is such a step.
    #[inline(always)]
    unsafe fn expand_group(&self, group: usize, panel: usize) {
        let from = self.from.wrapping_add(panel * self.from_stride);
        let line = |offset: usize| from.wrapping_add(offset).cast::<__m512i>();
        let out = self.next.wrapping_add(panel * self.near_stride);
        let out = out
            .wrapping_add(group * PLAIN_STEP_BYTES / GROUPS)
            .cast::<__m512i>();
        // SAFETY: the group lies within the step, and the elements come to a place of ours; as to the instructions, see
        // `new`.
        unsafe {
            let codes = _mm512_loadu_si512(line(LOW_BYTES + group * CACHE_LINE_BYTES));
            for (pair, codes) in [codes, _mm512_srli_epi16::<4>(codes)].into_iter().enumerate() {
                let low = _mm512_loadu_si512(line((2 * group + pair) * CACHE_LINE_BYTES));
                let high = _mm512_permutexvar_epi8(codes, self.high_bytes);
                let first = _mm512_shldi_epi16::<8>(high, low);
                // Bits of `low` where the mask has ones, else of `high`.
                let second = _mm512_ternarylogic_epi32::<0xd8>(high, low, _mm512_set1_epi16(0xff));
                _mm512_storeu_si512(out.add(2 * pair), first);
                _mm512_storeu_si512(out.add(2 * pair + 1), second);
            }
        }
        if KEEPS {
            let next = out.cast::<u8>().wrapping_add(PLAIN_STEP_BYTES);
            for line in 0..GROUP_LINES {
                prefetch::<_MM_HINT_T0>(next.wrapping_add(line * CACHE_LINE_BYTES));
            }
        }
    }

    /// Corrects the exceptions of a step that has been put together.
    ///
    /// # Safety
    /// As `expand_group`.
    #[inline(always)]
    unsafe fn correct(&mut self, panel: usize) {
        let mut exception = self.exceptions[panel];
        // SAFETY: exceptions lie within their steps; behind the last one stands one of a step that does not come.
        unsafe {
            while (*exception).step as usize == self.step {
                let out = self.next.wrapping_add(panel * self.near_stride).cast::<u16>();
                *out.add(usize::from((*exception).place)) = (*exception).bits;
                exception = exception.add(1);
                self.exceptions[panel] = exception;
            }
        }
    }
}

impl<const ASKS: bool, const KEEPS: bool> Weights for Coded<ASKS, KEEPS> {
    #[inline(always)]
    fn new(tile: &Tile<'_>) -> Self {
        let panels = tile.coded.expect("the panels are coded");
        let last = panels.first + tile.num_panels - 1;
        let exceptions =
            std::array::from_fn(|panel| panels.coding.first_exception(last.min(panels.first + panel)));
        let near = tile.panels.cast_mut();
        Self {
            requests: Requests::new(tile, panels.address, panels.stride),
            // SAFETY: the table is a vector long; whoever multiplies tiles has AVX-512 (`Amx::detect`).
            high_bytes: unsafe { _mm512_loadu_si512(panels.coding.code.high_bytes.as_ptr().cast()) },
            from: panels.address,
            from_stride: panels.stride,
            step: 0,
            num_steps: tile.depth / DEPTH,
            exceptions,
            near,
            near_stride: tile.panel_stride,
            near_mask: panels.near_mask,
            later: Later::new(tile),
            now: near,
            next: near,
        }
    }

    #[inline(always)]
    unsafe fn begin<const PANELS: usize>(&mut self) {
        for panel in 0..PANELS {
            for group in 0..GROUPS {
                // SAFETY: passed on; there is at least one step.
                unsafe { self.expand_group(group, panel) };
            }
            // SAFETY: as above.
            unsafe { self.correct(panel) };
        }
        self.advance();
    }

    #[inline(always)]
    fn begin_step(&mut self, step: usize) {
        if ASKS {
            self.requests.begin_step(step);
        }
    }

    #[inline(always)]
    fn at(&self, panel: usize) -> *const u8 {
        self.now.wrapping_add(panel * self.near_stride)
    }

    #[inline(always)]
    unsafe fn part<const PARTS: usize>(&mut self, part: usize, panel: usize) {
        if ASKS {
            self.requests.part::<PARTS>(part, panel);
        } else if KEEPS {
            self.later.part::<PARTS>(part, panel);
        }
        if self.step < self.num_steps {
            // SAFETY: passed on, and there is such a step.
            unsafe {
                for group in GROUPS / PARTS * part..GROUPS / PARTS * (part + 1) {
                    self.expand_group(group, panel);
                }
                if part + 1 == PARTS {
                    self.correct(panel);
                }
            }
        }
    }

    #[inline(always)]
    fn end_step(&mut self) {
        self.advance();
        self.requests.end_step();
    }
}
