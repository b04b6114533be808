//! Products of activations with weights, `x [M, K] @ weight [N, K].T + bias`, the weights packed once at load.
//!
//! | file | owns |
//! |---|---|
//! | `packed` | the weights in panels of sixteen columns, as they are or as codes |
//! | `packing` | their way there |
//! | `coded` | bf16 in twelve bits |
//! | `memory` | what the panels lie in |
//! | `arithmetic` | how products are summed, one way for a process and a type |
//! | `thirds` | f32 as sums of three numbers of bf16 |
//! | `fma`, `dot_bf16`, `amx` | the inner loops: one tile of rows and panels |
//! | `amx_weights` | how the weights of a tile come from memory meanwhile, and from their codes |
//! | `near` | where elements come to be that were codes |
//! | `ahead` | what is asked for from memory next |
//! | `piece` | the loops around them: cache blocking |
//! | `write` | what is done to a sum before it is written, and its way to the result |
//!
//! The bits of a result depend on its own row of x, its own row of the weight, and the arithmetic; not on M, on the
//! other rows, nor on the number of threads. Every tile of one arithmetic adds the products of an element in the same
//! order, however many rows it has, and where the sum over K is cut for the caches, the partial sum is kept in f32 and
//! continued: the same additions. The callers are the bindings (`rust/python/linear.rs`),
//! `layer`, `decoder` and the benchmark.

mod ahead;
#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_weights;
mod arithmetic;
mod coded;
#[cfg(target_arch = "x86_64")]
mod dot_bf16;
mod fma;
mod memory;
mod near;
mod packed;
mod packing;
mod piece;
mod thirds;
mod write;

use std::cell::RefCell;
use std::ops::Range;

use super::InvalidArgument;
use super::element::{load_row, store_row};
use super::isa::AlignedBuffer;
use super::pool;
use super::tensor::MatrixView;

pub use arithmetic::Arithmetic;
pub(super) use memory::Memory;
pub use packed::{PackedWeight, Part};

/// Bytes of weights that a thread reads in a nanosecond, for the estimate of a call's duration.
const WEIGHT_BYTES_PER_NS: usize = 10;

/// Multiply-adds of a thread in a nanosecond, likewise; a slow processor's.
const PRODUCTS_PER_NS: usize = 50;

/// Rows of a thread from which on it multiplies these by all panels: reading them for no more than that is worth it.
const ROWS_OF_THREAD: usize = 256;

/// Most pieces of work for each thread: enough that one which started late leaves some to the others.
const PIECES_PER_THREAD: usize = 4;

thread_local! {
    /// x as an arithmetic reads it, where that is a copy: kept, since fresh memory costs more than the copy.
    static ROWS: RefCell<AlignedBuffer> = RefCell::default();
}

/// One call.
#[derive(Clone, Copy, Debug)]
pub struct Linear<'a> {
    /// `[M, N]`, written; of any type. A gated weight writes `silu(gate) * up`, `[M, N / 2]`.
    pub out: MatrixView,
    /// Whether the result, rounded, is added to what `out` holds, and the sum rounded: how a layer contributes to the
    /// residual.
    pub adds: bool,
    /// `[M, K]`, of the weight's type.
    pub x: MatrixView,
    /// `[N, K]`
    pub weight: &'a PackedWeight,
}

impl Linear<'_> {
    /// Refuses arguments that do not fit together. `run` relies on it.
    ///
    /// # Errors
    /// The first argument that does not fit.
    pub fn check(&self) -> Result<(), InvalidArgument> {
        let (x, out, weight) = (&self.x, &self.out, self.weight);
        if x.width != weight.in_size() {
            return Err(InvalidArgument::new(
                "width of x",
                x.width,
                weight.in_size().to_string(),
            ));
        }
        if x.dtype != weight.dtype() {
            let allowed = format!("that of the weight, {}", weight.dtype().name());
            return Err(InvalidArgument::new("dtype of x", x.dtype.name(), allowed));
        }
        if (out.num_rows, out.width) != (x.num_rows, weight.out_size()) {
            return Err(InvalidArgument::new(
                "shape of out",
                format!("[{}, {}]", out.num_rows, out.width),
                format!("[{}, {}]", x.num_rows, weight.out_size()),
            ));
        }
        Ok(())
    }

    /// A guess at the duration on the present number of threads.
    pub fn estimated_ns(&self) -> u64 {
        let products = self.x.num_rows * self.weight.num_elements();
        let streamed = self.weight.num_bytes() / WEIGHT_BYTES_PER_NS;
        ((streamed.max(products / PRODUCTS_PER_NS)) / pool::num_threads()) as u64
    }

    /// Computes the call.
    ///
    /// # Safety
    /// The call passed `check`; the views are valid, aligned to their types, and for the length of the call nobody
    /// writes what they cover nor reads what is written; `x` and `out` do not overlap.
    pub unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe { self.run_before(None) };
    }

    /// As `run`, where the product after this one is known: each thread fetches the beginning of what it will read of
    /// that weight while it ends.
    ///
    /// # Safety
    /// As `run`.
    pub(super) unsafe fn run_before(&self, next: Option<&PackedWeight>) {
        if self.x.num_rows == 0 {
            return;
        }
        ROWS.with_borrow_mut(|buffer| {
            // SAFETY: passed on.
            let rows = unsafe { self.prepare_rows(buffer) };
            let mut pieces = self.pieces(&rows, next);
            pool::for_each(&mut pieces, self.estimated_ns(), |piece| {
                self.weight.arithmetic().isa().run(&mut *piece);
            });
        });
    }

    /// What each thread multiplies: of many rows a part, by all panels, so that what the kernels before and after this
    /// one do with these rows finds them in the same cache; of fewer rows all, by a part of the panels, each of which
    /// is then read by one thread.
    fn shares(&self) -> Vec<Share> {
        let (num_threads, parts) = (pool::num_threads(), self.weight.arithmetic().parts());
        let num_rows = parts * self.x.num_rows;
        if self.x.num_rows / num_threads < ROWS_OF_THREAD {
            let shares = self.weight.shares(num_threads).into_iter();
            return shares
                .map(|panels| Share {
                    rows: 0..num_rows,
                    panels,
                })
                .collect();
        }
        let step = piece::chunk_step(parts);
        let cut = |idx| cut_rows(&(0..num_rows), step, idx, num_threads);
        (0..num_threads)
            .map(|idx| Share {
                rows: cut(idx)..cut(idx + 1),
                panels: 0..self.weight.num_panels(),
            })
            .collect()
    }

    /// Cuts each share into chunks of rows, and these along N, so that a thread that started late leaves some to the
    /// others. The pieces of the shares come by turns, as the pool deals them.
    fn pieces<'k>(&'k self, x: &MatrixView, next: Option<&PackedWeight>) -> Vec<piece::Piece<'k>> {
        let shares = self.shares();
        let most_rows = shares.iter().map(|share| share.rows.len()).max().unwrap_or(0);
        let arithmetic = self.weight.arithmetic();
        let (parts, step) = (arithmetic.parts(), piece::chunk_step(arithmetic.parts()));
        let num_chunks = most_rows.div_ceil(piece::rows_per_chunk(x.row_bytes(), parts));
        let group = arithmetic.group_panels(most_rows.div_ceil(num_chunks));
        let fewest_panels = shares.iter().map(|share| share.panels.len()).min().unwrap_or(0);
        let num_turns = fewest_panels.div_ceil(group).clamp(1, PIECES_PER_THREAD);
        let next = next.map(|weight| (weight, Linear { weight, ..*self }.shares()));
        let mut pieces = Vec::with_capacity(num_chunks * num_turns * shares.len());
        for chunk in 0..num_chunks {
            for turn in 0..num_turns {
                for (idx, Share { rows, panels }) in shares.iter().enumerate() {
                    let num_groups = panels.len().div_ceil(group);
                    let cut = |turn| {
                        panels
                            .end
                            .min(panels.start + num_groups * turn / num_turns * group)
                    };
                    let own = cut(turn)..cut(turn + 1);
                    let next_of_share = next.as_ref().filter(|_| chunk + 1 == num_chunks);
                    let next_of_share = next_of_share
                        .and_then(|(weight, shares)| Some((*weight, shares.get(idx)?.panels.clone())));
                    let (weight, then) = if own.end < panels.end {
                        (self.weight, own.end..panels.end)
                    } else {
                        next_of_share.unwrap_or((self.weight, panels.clone()))
                    };
                    pieces.push(piece::Piece {
                        call: self,
                        x: *x,
                        rows: cut_rows(rows, step, chunk, num_chunks)
                            ..cut_rows(rows, step, chunk + 1, num_chunks),
                        panels: own,
                        then: ahead::Then {
                            address: weight.panel(then.start),
                            stride: weight.panel_bytes(),
                            num_bytes: then.len() * weight.panel_bytes(),
                        },
                    });
                }
            }
        }
        pieces
    }

    /// x as the arithmetic reads it: x itself, or a copy that is widened to f32 or split into parts, its rows filled up
    /// with zeros to whole steps along K.
    ///
    /// # Safety
    /// As `run`.
    unsafe fn prepare_rows(&self, buffer: &mut AlignedBuffer) -> MatrixView {
        let arithmetic = self.weight.arithmetic();
        let (dtype, depth) = (arithmetic.row_dtype(), self.weight.depth());
        if dtype == self.x.dtype && depth == self.x.width {
            return self.x;
        }
        let num_rows = arithmetic.parts() * self.x.num_rows;
        let len = (num_rows * depth * dtype.size()).div_ceil(size_of::<f32>());
        buffer.reserve(len);
        let copy = MatrixView {
            address: buffer.slice(0..len).as_mut_ptr().cast(),
            dtype,
            num_rows,
            width: depth,
            row_stride: depth,
        };
        if num_rows > self.x.num_rows {
            // SAFETY: parts are those of f32, steps along K are whole vectors, and the buffer is ours.
            unsafe { thirds::split(arithmetic.isa(), self.x, copy) };
            return copy;
        }
        let mut wide = vec![0.0; depth];
        for row in 0..self.x.num_rows {
            // SAFETY: the rows of x are valid; those of the copy are at least as long. Half types are only copied by
            // way of f32, which is exact.
            unsafe {
                load_row(self.x.dtype, self.x.at(row, 0), &mut wide[..self.x.width]);
                store_row(dtype, &wide, copy.at(row, 0));
            }
        }
        copy
    }
}

/// Rows and panels that one thread multiplies.
struct Share {
    /// Of x as the arithmetic reads it.
    rows: Range<usize>,
    panels: Range<usize>,
}

/// The first row of a part of some rows, cut into so many parts of whole steps; their end, behind the last one.
fn cut_rows(rows: &Range<usize>, step: usize, part: usize, num_parts: usize) -> usize {
    let num_steps = rows.len().div_ceil(step);
    rows.end.min(rows.start + num_steps * part / num_parts * step)
}
