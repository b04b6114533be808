//! Products of activations with weights, `x [M, K] @ weight [N, K].T + bias`, the weights packed once at load.
//!
//! | file | owns |
//! |---|---|
//! | `packed` | the weights in panels of sixteen columns, and their way there and back |
//! | `memory` | what the panels lie in |
//! | `arithmetic` | how products are summed, one way for a process and a type |
//! | `thirds` | f32 as sums of three numbers of bf16 |
//! | `fma`, `dot_bf16`, `amx` | the inner loops: one tile of rows and panels |
//! | `amx_blocks` | the same for many rows on AMX |
//! | `piece` | the loops around them: cache blocking |
//! | `write` | what is done to a sum before it is written, and its way to the result |
//!
//! The bits of a result depend on its own row of x, its own row of the weight, and the arithmetic; not on M, on the
//! other rows, nor on the number of threads. Every tile of one arithmetic adds the products of an element in the same
//! order, however many rows it has, and where the sum over K is cut for the caches, the partial sum is kept in f32 and
//! continued: the same additions. The callers are the bindings (`rust/python/linear.rs`),
//! `layer`, `decoder` and the benchmark.

#[cfg(target_arch = "x86_64")]
mod amx;
#[cfg(target_arch = "x86_64")]
mod amx_blocks;
mod arithmetic;
#[cfg(target_arch = "x86_64")]
mod dot_bf16;
mod fma;
mod memory;
mod packed;
mod piece;
mod thirds;
mod write;

use std::cell::RefCell;

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

    /// Cuts the work into chunks of rows, and along N into a share of each thread, so that the panels of a chunk are
    /// read by one thread, from front to back. The pieces of the shares come by turns, as the pool deals them.
    fn pieces<'k>(&'k self, x: &MatrixView, next: Option<&PackedWeight>) -> Vec<piece::Piece<'k>> {
        let parts = self.weight.arithmetic().parts();
        let num_chunks = x.num_rows.div_ceil(piece::rows_per_chunk(x.row_bytes(), parts));
        let rows_per_piece = x
            .num_rows
            .div_ceil(num_chunks)
            .next_multiple_of(piece::chunk_step(parts));
        let group = self.weight.arithmetic().group_panels(rows_per_piece);
        let shares = self.weight.shares(pool::num_threads());
        let smallest = shares.iter().map(ExactSizeIterator::len).min().unwrap_or(0);
        let pieces_per_share = smallest.div_ceil(group).clamp(1, PIECES_PER_THREAD);
        let next = next.map(|weight| (weight, weight.shares(shares.len())));
        let mut pieces = Vec::with_capacity(num_chunks * pieces_per_share * shares.len());
        for first_row in (0..x.num_rows).step_by(rows_per_piece) {
            for turn in 0..pieces_per_share {
                for (idx, share) in shares.iter().enumerate() {
                    let num_groups = share.len().div_ceil(group);
                    let cut = |turn| {
                        share
                            .end
                            .min(share.start + num_groups * turn / pieces_per_share * group)
                    };
                    let panels = cut(turn)..cut(turn + 1);
                    let next_of_share = next.as_ref().and_then(|(weight, shares)| {
                        let share = shares.get(idx)?;
                        Some((weight.panel(share.start), weight.panel_bytes()))
                    });
                    pieces.push(piece::Piece {
                        call: self,
                        x: *x,
                        rows: first_row..x.num_rows.min(first_row + rows_per_piece),
                        // The next piece of the share begins where this one ends.
                        then: if panels.end < share.end {
                            (self.weight.panel(panels.end), self.weight.panel_bytes())
                        } else {
                            next_of_share
                                .unwrap_or((self.weight.panel(share.start), self.weight.panel_bytes()))
                        },
                        panels,
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
