//! The forward pass of a decoder in one call: embedding, layers, output layer, on memory that is kept.
//!
//! What one part hands to the next lies in buffers of the calling thread, which grow to the largest step that it has
//! met. The caller is the binding (`rust/python/decoder.rs`), once a step.

use std::cell::RefCell;

use super::InvalidArgument;
use super::element::Dtype;
use super::isa::AlignedBuffer;
use super::layer::{Call, Layer, LayerCall, Phase, PhaseTimes, Step, Stream};
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
    /// Residual, `rows` and `wide` of a `Stream`, and the residual of the sampled rows.
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
        let call = Linear {
            out: x,
            adds: false,
            x,
            weight,
        };
        call.estimated_ns()
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
            let (stream, sampled) = self.reserve(buffers);
            // SAFETY: the ids are checked, and the buffer is ours.
            times.time(Phase::Embedding, || unsafe {
                self.embed(stream.residual.address);
            });
            for (idx, layer) in self.layers.iter().enumerate() {
                before_layer();
                let call = LayerCall {
                    layer,
                    step: &self.step,
                    stream,
                    next: self.layers.get(idx + 1).map_or(self.head, |layer| layer.qkv),
                };
                // SAFETY: passed on; the buffers are ours.
                unsafe {
                    let mixed = call.attend(times)?;
                    if idx + 1 < self.layers.len() {
                        call.feed_forward(mixed, times)?;
                    } else if !self.sample_rows.is_empty() {
                        // Nothing behind the last attention needs the other rows.
                        let mixed = self.sample(mixed, &stream, &sampled);
                        let call = LayerCall {
                            stream: sampled,
                            ..call
                        };
                        call.feed_forward(mixed, times)?;
                        self.project(times, &sampled)?;
                    }
                }
            }
            Ok(())
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

    /// The stream of all tokens, and that of the sampled rows, which have only a residual of their own.
    fn reserve(&self, buffers: &mut [AlignedBuffer; 4]) -> (Stream, Stream) {
        let hidden = self.norm.width;
        let num_rows = self.token_ids.len().max(self.sample_rows.len());
        let widest = |idx: usize| {
            let width = self.layers.iter().map(|layer| layer.widths()[idx]).max();
            width.unwrap_or(0).max(hidden)
        };
        let row_bytes = self.norm.dtype.size();
        let shapes = [
            (num_rows, hidden),
            (num_rows, widest(0)),
            (num_rows, widest(1)),
            (self.sample_rows.len(), hidden),
        ];
        let mut parts = buffers.iter_mut().zip(shapes).map(|(buffer, (num_rows, width))| {
            let len = (num_rows * width * row_bytes).div_ceil(size_of::<f32>());
            buffer.reserve(len);
            buffer.slice(0..len).as_mut_ptr().cast::<u8>()
        });
        let [residual, rows, wide, sampled] = std::array::from_fn(|_| parts.next().expect("four"));
        let stream = |num_rows, residual| {
            let residual = MatrixView {
                address: residual,
                num_rows,
                row_stride: hidden,
                ..self.norm
            };
            Stream { residual, rows, wide }
        };
        (
            stream(self.token_ids.len(), residual),
            stream(self.sample_rows.len(), sampled),
        )
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

    /// Copies the sampled rows: of the residual, and of what attention gave into `wide`, which it returns.
    ///
    /// # Safety
    /// The rows are checked; the streams are those of `reserve`, and `mixed` lies in `rows`.
    unsafe fn sample(&self, mixed: MatrixView, all: &Stream, sampled: &Stream) -> MatrixView {
        // SAFETY: the buffers are ours, and each has as many rows.
        unsafe {
            gather(&all.residual, self.sample_rows, sampled.residual.address);
            gather(&mixed, self.sample_rows, sampled.wide);
        }
        MatrixView {
            address: sampled.wide,
            num_rows: self.sample_rows.len(),
            ..mixed
        }
    }

    /// The logits of the sampled rows.
    ///
    /// # Safety
    /// As `run`; the stream has gone through the layers.
    unsafe fn project(&self, times: &mut PhaseTimes, stream: &Stream) -> Result<(), InvalidArgument> {
        let x = MatrixView {
            address: stream.rows,
            ..stream.residual
        };
        let norm = Call::Norm(RmsNorm {
            out: x,
            x: stream.residual,
            weight: self.norm,
            eps: self.layers[0].eps,
        });
        let product = Linear {
            out: self.logits,
            adds: false,
            x,
            weight: self.head,
        };
        // The next step begins with the first layer.
        let head = Call::Linear(product, Some(self.layers[0].qkv));
        for (phase, call) in [(Phase::FinalNorm, norm), (Phase::Head, head)] {
            call.check()?;
            // SAFETY: checked, and passed on.
            times.time(phase, || unsafe { call.run() });
        }
        Ok(())
    }
}
