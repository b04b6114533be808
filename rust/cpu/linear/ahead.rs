//! What a thread reads after the weights that it multiplies now: asked for from memory meanwhile.

use std::cell::Cell;

use crate::memory::CACHE_LINE_BYTES;

/// Most lines to ask for in a step along K while tiles come from the second-level cache. Both take the few places where a
/// core waits for lines: a step of two by two tiles took 31 ns, 33 with four lines, 50 with eight, and 120 with all 32.
const MAX_LINES_A_STEP: usize = 8;

thread_local! {
    /// Where the panels begin that this thread asked for last: those of the next piece, in most cases.
    static ASKED: Cell<*const u8> = const { Cell::new(std::ptr::null()) };
}

/// Panels that a thread will probably read after those of a piece, if it is known; else some that it has read.
#[derive(Clone, Copy, Debug)]
pub(super) struct Then {
    pub(super) address: *const u8,
    /// Bytes from a panel to the next.
    pub(super) stride: usize,
    /// Bytes of all of them.
    pub(super) num_bytes: usize,
}

/// What a thread reads after a span of panels: asked for by all blocks of rows that read the span again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ahead {
    first: *const u8,
    /// What is asked for next.
    at: *const u8,
    /// Cache lines that are left, and how many of them are asked for in a step along K.
    num_lines: usize,
    lines_a_step: usize,
}

impl Ahead {
    /// So many bytes, asked for in so many steps; nothing if these are none.
    pub(super) fn new(at: *const u8, num_bytes: usize, num_steps: usize) -> Self {
        let num_lines = num_bytes.div_ceil(CACHE_LINE_BYTES);
        let all_a_step = if num_steps > 0 {
            num_lines.div_ceil(num_steps)
        } else {
            0
        };
        // A quarter may be left: to whoever reads them, without asking, one line after the other.
        let lines_a_step = if all_a_step * 3 / 4 > MAX_LINES_A_STEP {
            0
        } else {
            all_a_step.min(MAX_LINES_A_STEP)
        };
        Self {
            first: at,
            at,
            num_lines: num_lines.min(lines_a_step * num_steps),
            lines_a_step,
        }
    }

    /// What to ask for in each of the next steps, as in `Tile`: from where on, with no panels apart, how many lines.
    pub(super) fn take(&mut self, num_steps: usize) -> (*const u8, usize, usize) {
        if self.num_lines == 0 || self.lines_a_step == 0 {
            return (self.at, 0, 0);
        }
        let (at, num_lines) = (self.at, self.lines_a_step * num_steps);
        self.at = at.wrapping_add(num_lines * CACHE_LINE_BYTES);
        self.num_lines = self.num_lines.saturating_sub(num_lines);
        (at, 0, self.lines_a_step)
    }

    /// Remembers whether all of it has been asked for, so that who reads it next need not.
    pub(super) fn remember(&self) {
        let are_asked = self.at != self.first && self.num_lines == 0;
        ASKED.set(if are_asked { self.first } else { std::ptr::null() });
    }
}

/// Whether this thread asked for the panels at an address last.
pub(super) fn are_asked(panels: *const u8) -> bool {
    ASKED.get() == panels
}
