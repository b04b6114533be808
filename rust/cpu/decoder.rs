//! The forward pass of a decoder in one call: embedding, layers, output layer, on memory that is kept.
//!
//! What one part hands to the next lies in buffers of the calling thread, which grow to the largest step that it has
//! met. The caller is the binding (`rust/python/decoder.rs`), once a step.

use std::cell::RefCell;

use super::InvalidArgument;
use super::element::Dtype;
use super::isa::AlignedBuffer;
use super::layer::{Call, Layer, LayerCall, Phase, PhaseTimes, Step};
use super::linear::{Linear, PackedWeight};
use super::norm::RmsNorm;
use super::pool;
use super::rope_cache::check_indices;
use super::tensor::MatrixView;

/// Tokens whose embeddings a thread copies at a time.
const TOKENS_PER_PIECE: usize = 16;

/// Elements that a thread copies in a nanosecond, for the estimate of the duration.
const COPIED_PER_NS: usize = 1;

thread_local! {
    /// Residual, update, and the `rows` and `wide` of `LayerCall`.
    static BUFFERS: RefCell<[AlignedBuffer; 4]> = RefCell::default();
}

/// Where the embedding of a token is.
#[derive(Clone, Copy, Debug)]
pub enum Embedding<'a> {
    /// In the output layer, whose weight is the embedding as well.
    Packed(&'a PackedWeight),
    /// `[V, hidden]`
    Rows(MatrixView),
}

/// One call. T tokens, R rows of logits, V tokens in the vocabulary.
#[derive(Clone, Copy, Debug)]
pub struct Decoder<'a> {
    /// `[T]`
    pub token_ids: &'a [i32],
    /// What the layers share.
    pub step: Step<'a>,
    /// `[R]`: tokens whose logits are wanted.
    pub sample_rows: &'a [i32],
    /// `[V, hidden]`
    pub embedding: Embedding<'a>,
    /// At least one.
    pub layers: &'a [Layer<'a>],
    /// Before the output layer: `[1, hidden]`.
    pub norm: MatrixView,
    /// The output layer, `[V, hidden]`.
    pub head: &'a PackedWeight,
    /// `[R, V]`, written.
    pub logits: MatrixView,
}

/// Copies the embeddings of some tokens, one after the other.
struct CopyRows<'a> {
    token_ids: &'a [i32],
    out: *mut u8,
}

// SAFETY: an address; no two pieces write the same rows.
unsafe impl Send for CopyRows<'_> {}

impl Embedding<'_> {
    /// Rows, width, type.
    fn shape(&self) -> (usize, usize, Dtype) {
        match self {
            Self::Packed(weight) => (weight.out_size(), weight.in_size(), weight.dtype()),
            Self::Rows(rows) => (rows.num_rows, rows.width, rows.dtype),
        }
    }

    /// # Safety
    /// The ids are rows; `out` is writable for as many dense rows, and nobody else accesses it.
    unsafe fn copy(&self, token_ids: &[i32], out: *mut u8) {
        match self {
            // SAFETY: passed on.
            Self::Packed(weight) => unsafe { weight.copy_rows(token_ids, out) },
            // SAFETY: passed on.
            Self::Rows(rows) => unsafe { gather(rows, token_ids, out) },
        }
    }
}

/// Copies rows of a matrix, one after the other.
///
/// # Safety
/// The ids are rows of the matrix, which is readable; `out` is writable for as many, and does not overlap it.
unsafe fn gather(rows: &MatrixView, ids: &[i32], out: *mut u8) {
    let row_bytes = rows.width * rows.dtype.size();
    for (idx, &id) in ids.iter().enumerate() {
        let (from, to) = (
            rows.row(id.unsigned_abs() as usize),
            out.wrapping_add(idx * row_bytes),
        );
        // SAFETY: the caller vouches for both rows.
        unsafe { std::ptr::copy_nonoverlapping(from, to, row_bytes) };
    }
}

impl Decoder<'_> {
    /// A guess at the duration on the present number of threads: that of the products.
    pub fn estimated_ns(&self) -> u64 {
        let num_tokens = self.token_ids.len();
        let layers = self.layers.iter().flat_map(|layer| {
            [layer.qkv, layer.out, layer.gate_up, layer.down]
                .map(|weight| self.estimated_product_ns(weight, num_tokens))
        });
        layers.sum::<u64>() + self.estimated_product_ns(self.head, self.sample_rows.len())
    }

    fn estimated_product_ns(&self, weight: &PackedWeight, num_rows: usize) -> u64 {
        let x = MatrixView {
            num_rows,
            ..self.norm
        };
        Linear { out: x, x, weight }.estimated_ns()
    }

    /// Computes the call, and adds the times of its phases to `times`. `before_layer` is called before each layer.
    ///
    /// # Errors
    /// The first argument that does not fit. If that is one of a layer, the layers before it have been computed.
    ///
    /// # Safety
    /// The views are valid, aligned to their types, and for the length of the call nobody writes what they cover nor
    /// reads what is written; the slots differ.
    pub unsafe fn run(&self, times: &mut PhaseTimes, before_layer: impl Fn()) -> Result<(), InvalidArgument> {
        self.check()?;
        BUFFERS.with_borrow_mut(|buffers| {
            let [residual, update, rows, wide] = self.reserve(buffers);
            // SAFETY: the ids are checked, and the buffer is ours.
            times.time(Phase::Embedding, || unsafe {
                self.embed(residual.address);
            });
            for (idx, layer) in self.layers.iter().enumerate() {
                before_layer();
                let call = LayerCall {
                    layer,
                    step: &self.step,
                    residual,
                    update,
                    adds_update: idx > 0,
                    rows: rows.address,
                    wide: wide.address,
                    next: self.layers.get(idx + 1).map_or(self.head, |layer| layer.qkv),
                };
                // SAFETY: passed on; the buffers are ours.
                unsafe { call.run(times)? };
            }
            // SAFETY: passed on; the buffers are ours, and the rows are checked.
            unsafe { self.project(times, [residual, update, rows, wide]) }
        })
    }

    fn check(&self) -> Result<(), InvalidArgument> {
        let num_tokens = self.token_ids.len();
        let (num_rows, width, dtype) = self.embedding.shape();
        if (width, dtype) != (self.norm.width, self.norm.dtype) || self.layers.is_empty() {
            let given = format!("[{num_rows}, {width}] of {}", dtype.name());
            let allowed = format!("rows of {} of {}", self.norm.width, self.norm.dtype.name());
            return Err(InvalidArgument::new("shape of the embedding", given, allowed));
        }
        check_indices("token_ids", self.token_ids, self.step.positions.len(), num_rows)?;
        check_indices("sample_rows", self.sample_rows, self.logits.num_rows, num_tokens)
    }

    /// Residual, update, `rows` and `wide`: the first two as matrices, the others as long as anything asks for.
    fn reserve(&self, buffers: &mut [AlignedBuffer; 4]) -> [MatrixView; 4] {
        let hidden = self.norm.width;
        let num_rows = self.token_ids.len().max(self.sample_rows.len());
        let widest = |idx: usize| {
            let width = self.layers.iter().map(|layer| layer.widths()[idx]).max();
            width.unwrap_or(0).max(hidden)
        };
        let widths = [hidden, hidden, widest(0), widest(1)];
        std::array::from_fn(|idx| {
            let len = (num_rows * widths[idx] * self.norm.dtype.size()).div_ceil(size_of::<f32>());
            buffers[idx].reserve(len);
            MatrixView {
                address: buffers[idx].slice(0..len).as_mut_ptr().cast(),
                num_rows: self.token_ids.len(),
                width: widths[idx],
                row_stride: widths[idx],
                ..self.norm
            }
        })
    }

    /// # Safety
    /// The ids are checked; `out` is writable for the rows of all tokens, and nobody else accesses it.
    unsafe fn embed(&self, out: *mut u8) {
        let row_bytes = self.norm.width * self.norm.dtype.size();
        let piece = |(idx, token_ids)| CopyRows {
            token_ids,
            out: out.wrapping_add(idx * TOKENS_PER_PIECE * row_bytes),
        };
        let mut pieces: Vec<CopyRows<'_>> = self
            .token_ids
            .chunks(TOKENS_PER_PIECE)
            .enumerate()
            .map(piece)
            .collect();
        let num_elements = self.token_ids.len() * self.norm.width;
        let estimated_ns = num_elements / COPIED_PER_NS / pool::num_threads();
        pool::for_each(&mut pieces, estimated_ns as u64, |piece| {
            // SAFETY: passed on; each piece has rows of its own.
            unsafe { self.embedding.copy(piece.token_ids, piece.out) };
        });
    }

    /// The logits of the sampled rows. The norm works row by row, so the others need not go through it.
    ///
    /// # Safety
    /// As `run`; the matrices are those of `reserve`, residual and update filled.
    unsafe fn project(
        &self,
        times: &mut PhaseTimes,
        [residual, update, rows, wide]: [MatrixView; 4],
    ) -> Result<(), InvalidArgument> {
        if self.sample_rows.is_empty() {
            return Ok(());
        }
        let sampled = |buffer: MatrixView| MatrixView {
            num_rows: self.sample_rows.len(),
            width: self.norm.width,
            row_stride: self.norm.width,
            ..buffer
        };
        let (x, sums) = (sampled(rows), sampled(wide));
        let norm = Call::Norm(RmsNorm {
            out: x,
            x,
            residual: Some(sums),
            weight: self.norm,
            eps: self.layers[0].eps,
        });
        let product = Linear {
            out: self.logits,
            x,
            weight: self.head,
        };
        // The next step begins with the first layer.
        let head = Call::Linear(product, Some(self.layers[0].qkv));
        norm.check()?;
        head.check()?;
        // SAFETY: checked; the buffers are ours and as long as that.
        times.time(Phase::FinalNorm, || unsafe {
            gather(&update, self.sample_rows, x.address);
            gather(&residual, self.sample_rows, sums.address);
            norm.run();
        });
        // SAFETY: checked, and passed on.
        times.time(Phase::Head, || unsafe { head.run() });
        Ok(())
    }
}
