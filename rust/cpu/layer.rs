//! A decoder layer of the Llama family in one call: its phases one after another, on memory that is kept.
//!
//! Every phase is a call of one of the kernels beside this file, so the bits are those of the operations one by one.
//! What a phase hands to the next lies in two buffers of the calling thread, which grow to the largest step that it
//! has met. The caller is the binding (`rust/python/layer.rs`), once a layer and step.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use super::InvalidArgument;
use super::attention::Attention;
use super::isa::AlignedBuffer;
use super::linear::{Linear, PackedWeight};
use super::norm::RmsNorm;
use super::plan::Plan;
use super::rope_cache::{AngleTable, RopeCache};
use super::tensor::{CacheView, MatrixView, RowsView};

thread_local! {
    /// What the layers of the calling thread hand from phase to phase.
    static BUFFERS: RefCell<[AlignedBuffer; 2]> = RefCell::default();
}

/// What a layer is made of. Norm weights are `[1, width]`, all of one type, that of the packed weights.
#[derive(Clone, Copy, Debug)]
pub struct LayerWeights<'a> {
    /// Before attention: `[1, hidden]`.
    pub input_norm: MatrixView,
    /// `[(H + 2 G) D, hidden]`: queries, keys and values side by side.
    pub qkv: &'a PackedWeight,
    /// Norms of each head of the queries and of the keys, `[1, D]`, if the model has them.
    pub head_norms: Option<[MatrixView; 2]>,
    /// `[hidden, H D]`
    pub out: &'a PackedWeight,
    /// Before the feed-forward layer: `[1, hidden]`.
    pub post_norm: MatrixView,
    /// `[intermediate, hidden]` twice, the first one gating the second.
    pub gate_up: &'a PackedWeight,
    /// `[hidden, intermediate]`
    pub down: &'a PackedWeight,
    /// Of all norms.
    pub eps: f32,
    /// H
    pub num_heads: usize,
    /// Factor on the scores of attention.
    pub scale: f32,
}

/// One call. T tokens, H query heads, G key heads, D elements a head.
#[derive(Clone, Copy, Debug)]
pub struct DecoderLayer<'a> {
    /// The layer.
    pub weights: LayerWeights<'a>,
    /// `[T, hidden]`, dense: what was added up so far. The layer adds the update, and what attention contributes.
    pub residual: MatrixView,
    /// `[T, hidden]`, dense: what the layer before contributed, replaced by what the feed-forward layer contributes.
    pub update: MatrixView,
    /// Whether there was a layer before; if not, the update is only written.
    pub adds_update: bool,
    /// Cosines of all positions.
    pub cos: AngleTable<'a>,
    /// Sines of all positions.
    pub sin: AngleTable<'a>,
    /// `[T]`: rows of the tables of angles.
    pub positions: &'a [i32],
    /// `[T]`: where keys and values are written.
    pub slot_mapping: &'a [i32],
    /// The layer's keys.
    pub key_cache: CacheView,
    /// The layer's values.
    pub value_cache: CacheView,
    /// How attention is cut.
    pub plan: &'a Plan,
}

/// What the time of a layer is spent on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The plan of attention, once a step.
    Plan,
    /// All norms.
    Norm,
    /// Queries, keys and values.
    Qkv,
    /// Rotation and cache write.
    Rope,
    /// Attention over the cache.
    Attention,
    /// What attention contributes.
    Out,
    /// The gated half of the feed-forward layer.
    GateUp,
    /// The other one.
    Down,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 8] = [
        Self::Plan,
        Self::Norm,
        Self::Qkv,
        Self::Rope,
        Self::Attention,
        Self::Out,
        Self::GateUp,
        Self::Down,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::Rope => "rope_cache",
            Self::Attention => "attention",
            Self::Out => "out",
            Self::GateUp => "gate_up",
            Self::Down => "down",
        }
    }
}

/// Calls of kernels and the time that they took, by phase.
#[derive(Clone, Copy, Default, Debug)]
pub struct PhaseTimes([(usize, Duration); Phase::ALL.len()]);

impl PhaseTimes {
    /// Number of calls, and their duration.
    pub fn of(&self, phase: Phase) -> (usize, Duration) {
        self.0[phase as usize]
    }

    /// Adds a call.
    pub(crate) fn add(&mut self, phase: Phase, duration: Duration) {
        let (calls, sum) = &mut self.0[phase as usize];
        *calls += 1;
        *sum += duration;
    }
}

/// A call of a kernel.
enum Call<'a> {
    Norm(RmsNorm),
    Linear(Linear<'a>),
    Rope(RopeCache<'a>),
    Attention(Attention<'a>),
}

impl Call<'_> {
    fn check(&self) -> Result<(), InvalidArgument> {
        match self {
            Self::Norm(call) => call.check(),
            Self::Linear(call) => call.check(),
            Self::Rope(call) => call.check(),
            Self::Attention(call) => call.check(),
        }
    }

    /// # Safety
    /// As that of the kernel.
    unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Norm(call) => call.run(),
                Self::Linear(call) => call.run(),
                Self::Rope(call) => call.run(),
                Self::Attention(call) => call.run(),
            }
        }
    }
}

/// The calls of a layer in their order, on memory that is there.
struct Calls<'a> {
    layer: &'a DecoderLayer<'a>,
    /// `[T, max(hidden, H D)]`: rows after a norm, or the result of attention.
    rows: *mut u8,
    /// `[T, max((H + 2 G) D, intermediate)]`: queries, keys and values, or the rows between the feed-forward layers.
    wide: *mut u8,
    calls: Vec<(Phase, Call<'a>)>,
}

impl<'a> Calls<'a> {
    /// A matrix of as many rows as the step has tokens.
    fn matrix(&self, address: *mut u8, width: usize) -> MatrixView {
        MatrixView {
            address,
            width,
            row_stride: width,
            ..self.layer.residual
        }
    }

    /// Normalises the residual, after adding the update if `adds`. Returns where the result is.
    fn norm(&mut self, weight: MatrixView, adds: bool) -> MatrixView {
        let DecoderLayer {
            residual,
            update,
            weights,
            ..
        } = *self.layer;
        let out = self.matrix(self.rows, residual.width);
        let call = RmsNorm {
            out,
            x: if adds { update } else { residual },
            residual: adds.then_some(residual),
            weight,
            eps: weights.eps,
        };
        self.calls.push((Phase::Norm, Call::Norm(call)));
        out
    }

    fn linear(&mut self, phase: Phase, x: MatrixView, weight: &'a PackedWeight, out: MatrixView) {
        self.calls
            .push((phase, Call::Linear(Linear { out, x, weight })));
    }

    /// Normalises each head in place.
    fn head_norm(&mut self, heads: RowsView, weight: MatrixView) {
        for head in 0..heads.num_heads {
            let rows = MatrixView {
                address: heads
                    .address
                    .wrapping_add(head * heads.head_stride * heads.dtype.size()),
                dtype: heads.dtype,
                num_rows: heads.num_tokens,
                width: heads.head_dim,
                row_stride: heads.token_stride,
            };
            let call = RmsNorm {
                out: rows,
                x: rows,
                residual: None,
                weight,
                eps: self.layer.weights.eps,
            };
            self.calls.push((Phase::Norm, Call::Norm(call)));
        }
    }

    /// Rotates the queries and keys of `qkv`, writes the cache, attends. Returns where the result is.
    fn attend(&mut self, qkv: MatrixView) -> MatrixView {
        let DecoderLayer {
            weights,
            key_cache,
            value_cache,
            ..
        } = *self.layer;
        let heads = |first: usize, num_heads: usize| RowsView {
            address: qkv
                .address
                .wrapping_add(first * key_cache.head_dim * qkv.dtype.size()),
            dtype: qkv.dtype,
            num_tokens: qkv.num_rows,
            num_heads,
            head_dim: key_cache.head_dim,
            token_stride: qkv.row_stride,
            head_stride: key_cache.head_dim,
        };
        let (num_heads, num_kv_heads) = (weights.num_heads, key_cache.num_kv_heads);
        let (query, key) = (heads(0, num_heads), heads(num_heads, num_kv_heads));
        if let Some([query_norm, key_norm]) = weights.head_norms {
            self.head_norm(query, query_norm);
            self.head_norm(key, key_norm);
        }
        let rope = RopeCache {
            out: query,
            query,
            key,
            value: heads(num_heads + num_kv_heads, num_kv_heads),
            cos: self.layer.cos,
            sin: self.layer.sin,
            positions: self.layer.positions,
            key_cache,
            value_cache,
            slot_mapping: self.layer.slot_mapping,
        };
        self.calls.push((Phase::Rope, Call::Rope(rope)));
        let out = self.matrix(self.rows, num_heads * key_cache.head_dim);
        let attention = Attention {
            out: RowsView {
                address: out.address,
                token_stride: out.row_stride,
                ..query
            },
            query,
            key_cache,
            value_cache,
            plan: self.layer.plan,
            scale: weights.scale,
        };
        self.calls.push((Phase::Attention, Call::Attention(attention)));
        out
    }
}

impl DecoderLayer<'_> {
    /// A guess at the duration on the present number of threads: that of the products.
    pub fn estimated_ns(&self) -> u64 {
        let LayerWeights {
            qkv,
            out,
            gate_up,
            down,
            ..
        } = self.weights;
        let estimate = |weight| {
            Linear {
                out: self.residual,
                x: self.residual,
                weight,
            }
            .estimated_ns()
        };
        [qkv, out, gate_up, down].map(estimate).iter().sum()
    }

    /// Computes the call, and adds the times of its phases to `times`.
    ///
    /// # Errors
    /// The first argument that does not fit; nothing has been written then.
    ///
    /// # Safety
    /// The views are valid, aligned to their types, and for the length of the call nobody writes what they cover nor
    /// reads what is written; the slots differ.
    pub unsafe fn run(&self, times: &mut PhaseTimes) -> Result<(), InvalidArgument> {
        BUFFERS.with_borrow_mut(|buffers| {
            let calls = self.calls(buffers);
            calls.iter().try_for_each(|(_, call)| call.check())?;
            let mut start = Instant::now();
            for (phase, call) in &calls {
                // SAFETY: checked; the buffers are ours, and no call reads what it writes, but where it may.
                unsafe { call.run() };
                let end = Instant::now();
                times.add(*phase, end - start);
                start = end;
            }
            Ok(())
        })
    }

    /// The calls of the layer, which use the buffers.
    fn calls(&self, buffers: &mut [AlignedBuffer; 2]) -> Vec<(Phase, Call<'_>)> {
        let LayerWeights {
            qkv, out, gate_up, ..
        } = self.weights;
        let cache = &self.key_cache;
        let heads_width = (self.weights.num_heads + 2 * cache.num_kv_heads) * cache.head_dim;
        let widths = [
            self.residual.width.max(out.in_size()),
            heads_width.max(gate_up.out_size()),
        ];
        let mut reserve = |idx: usize| {
            let num_bytes = self.residual.num_rows * widths[idx] * self.residual.dtype.size();
            let len = num_bytes.div_ceil(size_of::<f32>());
            buffers[idx].reserve(len);
            buffers[idx].slice(0..len).as_mut_ptr().cast::<u8>()
        };
        let mut calls = Calls {
            layer: self,
            rows: reserve(0),
            wide: reserve(1),
            calls: Vec::with_capacity(2 * Phase::ALL.len()),
        };
        let heads = calls.matrix(calls.wide, heads_width);
        let rows = calls.norm(self.weights.input_norm, self.adds_update);
        calls.linear(Phase::Qkv, rows, qkv, heads);
        let mixed = calls.attend(heads);
        calls.linear(Phase::Out, mixed, out, self.update);
        let rows = calls.norm(self.weights.post_norm, true);
        let gated = calls.matrix(calls.wide, gate_up.out_size());
        calls.linear(Phase::GateUp, rows, gate_up, gated);
        calls.linear(Phase::Down, gated, self.weights.down, self.update);
        calls.calls
    }
}
