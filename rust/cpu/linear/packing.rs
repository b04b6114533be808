//! The way of weights into panels, on all threads of the pool.

use super::coded::{self, Code, Coding, Exception};
use super::memory::Memory;
use super::packed::{Part, offset, panel_bytes};
use super::thirds;
use crate::cpu::element::{Dtype, load_row};
use crate::cpu::isa::LANES;
use crate::cpu::pool;

/// Panels that a thread packs at a time.
const PANELS_PER_PIECE: usize = 16;

/// Bytes that a thread packs in a nanosecond, for the estimate of the duration.
const PACKED_BYTES_PER_NS: usize = 1;

/// Writes panels from their parts.
pub(super) struct Packing<'a> {
    pub(super) parts: &'a [Part],
    pub(super) is_gated: bool,
    pub(super) dtype: Dtype,
    pub(super) panel_dtype: Dtype,
    pub(super) in_size: usize,
    pub(super) depth: usize,
    pub(super) pair: usize,
}

/// A few panels to write.
struct Panels {
    first: usize,
    count: usize,
    address: *mut u8,
    /// By panel, if they are coded.
    exceptions: Vec<Vec<Exception>>,
}

// SAFETY: the address is of memory that this piece of work alone writes.
unsafe impl Send for Panels {}

impl Packing<'_> {
    /// The part and the row of it that a column of the panels shows, if there is one.
    fn source(&self, column: usize) -> Option<(&Part, usize)> {
        if self.is_gated {
            let part = &self.parts[column / LANES % 2];
            let row = column / LANES / 2 * LANES + column % LANES;
            return (row < part.num_rows).then_some((part, row));
        }
        let mut row = column;
        for part in self.parts {
            if row < part.num_rows {
                return Some((part, row));
            }
            row -= part.num_rows;
        }
        None
    }

    /// Packs all panels. How they are coded comes with them, if they are.
    ///
    /// # Safety
    /// The parts are readable.
    pub(super) unsafe fn panels(&self, num_panels: usize, code: Option<Code>) -> (Memory, Option<Coding>) {
        // SAFETY: passed on.
        let (memory, exceptions) = unsafe { self.write_panels(num_panels, code.as_ref()) };
        let Some(code) = code else {
            return (memory, None);
        };
        let num_exceptions = exceptions.iter().map(Vec::len).sum();
        if coded::are_too_many(num_exceptions, num_panels * self.depth * LANES) {
            // More than there were where the code was chosen by.
            // SAFETY: passed on.
            return unsafe { self.panels(num_panels, None) };
        }
        (memory, Some(Coding::new(code, exceptions.into_iter())))
    }

    /// The panels, by a code if there is one, and then the exceptions of each.
    ///
    /// # Safety
    /// The parts are readable.
    unsafe fn write_panels(&self, num_panels: usize, code: Option<&Code>) -> (Memory, Vec<Vec<Exception>>) {
        let panel_bytes = panel_bytes(self.depth * LANES, self.panel_dtype, code.is_some());
        let memory = Memory::new(num_panels * panel_bytes);
        let address = memory.address();
        let mut pieces: Vec<Panels> = (0..num_panels)
            .step_by(PANELS_PER_PIECE)
            .map(|first| Panels {
                first,
                count: PANELS_PER_PIECE.min(num_panels - first),
                address: address.wrapping_add(first * panel_bytes),
                exceptions: Vec::new(),
            })
            .collect();
        let estimated_ns = num_panels * panel_bytes / PACKED_BYTES_PER_NS / pool::num_threads();
        // The threads that fill the memory are also the first to touch it: its pages are made in parallel.
        pool::for_each(&mut pieces, estimated_ns as u64, |piece| {
            for panel in 0..piece.count {
                let out = piece.address.wrapping_add(panel * panel_bytes);
                let panel = piece.first + panel;
                // SAFETY: the panel lies within the memory, and this piece alone writes it.
                unsafe {
                    match code {
                        Some(code) => piece.exceptions.push(self.write_codes(panel, out, code)),
                        None => self.write_panel(panel, out),
                    }
                }
            }
        });
        let exceptions = pieces.into_iter().flat_map(|piece| piece.exceptions);
        (memory, exceptions.collect())
    }

    /// Writes a panel by a code, and returns its exceptions.
    ///
    /// # Safety
    /// As `write_panel`.
    unsafe fn write_codes(&self, panel: usize, out: *mut u8, code: &Code) -> Vec<Exception> {
        let mut plain = vec![[0; coded::STEP_ELEMENTS]; self.depth * LANES / coded::STEP_ELEMENTS];
        // SAFETY: passed on; the elements are of bf16.
        unsafe { self.write_panel(panel, plain.as_mut_ptr().cast()) };
        let (codes, mut exceptions) = (code.codes(), Vec::new());
        for (step, elements) in plain.iter().enumerate() {
            let coded = coded::encode(&codes, step, elements, &mut exceptions);
            // SAFETY: the step lies within the panel.
            unsafe { out.cast::<[u8; coded::STEP_BYTES]>().add(step).write(coded) };
        }
        exceptions
    }

    /// Writes a panel that is not coded.
    ///
    /// # Safety
    /// The parts are readable; `out` is writable for the panel, aligned to its elements.
    unsafe fn write_panel(&self, panel: usize, out: *mut u8) {
        // SAFETY: passed on, each type as it is.
        unsafe {
            match (self.dtype, self.panel_dtype) {
                (Dtype::F32, Dtype::Bf16) => self.write_elements(panel, out, thirds::upper_half),
                (Dtype::F32, _) => self.write_elements(panel, out, |word: u32| word),
                (Dtype::Bf16 | Dtype::F16, _) => self.write_elements(panel, out, |half: u16| half),
            }
        }
    }

    /// Writes a panel, each element by way of `narrow`.
    ///
    /// # Safety
    /// The parts are readable, and hold elements like `T`; `out` is writable for a panel of elements like `P`.
    unsafe fn write_elements<T: Copy, P: Default>(&self, panel: usize, out: *mut u8, narrow: fn(T) -> P) {
        let out = out.cast::<P>();
        let rows: [Option<*const T>; LANES] = std::array::from_fn(|lane| {
            let (part, row) = self.source(panel * LANES + lane)?;
            Some(part.weight.cast::<T>().wrapping_add(row * part.row_stride))
        });
        for k in 0..self.depth {
            for (lane, row) in rows.iter().enumerate() {
                let value = match row {
                    // SAFETY: k is within the row.
                    Some(row) if k < self.in_size => narrow(unsafe { *row.add(k) }),
                    _ => P::default(),
                };
                // SAFETY: the offset is within the panel.
                unsafe { *out.add(offset(k, lane, self.pair)) = value };
            }
        }
    }

    /// # Safety
    /// The biases are readable.
    pub(super) unsafe fn bias(&self, num_panels: usize) -> Vec<f32> {
        if self.parts.iter().all(|part| part.bias.is_null()) {
            return Vec::new();
        }
        let mut bias = vec![0.0; num_panels * LANES];
        for (column, value) in bias.iter_mut().enumerate() {
            let Some((part, row)) = self.source(column) else {
                continue;
            };
            if !part.bias.is_null() {
                let address = part.bias.wrapping_add(row * self.dtype.size());
                // SAFETY: the bias has an element for every row of its part.
                unsafe { load_row(self.dtype, address, std::slice::from_mut(value)) };
            }
        }
        bias
    }
}
