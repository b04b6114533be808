//! A decoder layer of the Llama family: its kernels one after another, each of which is timed.
//!
//! Every phase is a call of one of the kernels beside this file, so the bits are those of the operations one by one.
//! The caller is `decoder`.

use std::time::{Duration, Instant};

use super::InvalidArgument;
use super::attention::Attention;
use super::linear::{Linear, PackedWeight};
use super::norm::RmsNorm;
use super::plan::Plan;
use super::rope_cache::{AngleTable, RopeCache};
use super::tensor::{CacheView, MatrixView, RowsView};

/// What a layer is made of, and where its keys and values lie. Norm weights are `[1, width]`, all of one type, that of the
/// packed weights.
#[derive(Clone, Copy, Debug)]
pub struct Layer<'a> {
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
    /// The layer's keys.
    pub key_cache: CacheView,
    /// The layer's values.
    pub value_cache: CacheView,
}

/// What the layers of a step share. P positions in the tables.
#[derive(Clone, Copy, Debug)]
pub struct Step<'a> {
    /// `[P, D]`: cosines.
    pub cos: AngleTable<'a>,
    /// `[P, D]`: sines.
    pub sin: AngleTable<'a>,
    /// `[T]`: rows of the tables.
    pub positions: &'a [i32],
    /// `[T]`: where keys and values are written; no slot occurs twice.
    pub slot_mapping: &'a [i32],
    /// How attention is cut.
    pub plan: &'a Plan,
}

/// The rows of R tokens on their way through a layer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    /// `[R, hidden]`, dense: what was added up so far, to which `out` and `down` of each layer add their results.
    pub(super) residual: MatrixView,
    /// `[R, widths[0]]`: rows after a norm, or the result of attention.
    pub(super) rows: *mut u8,
    /// `[R, widths[1]]`: queries, keys and values, or the rows within the feed-forward layer.
    pub(super) wide: *mut u8,
}

/// One call, in two halves: `attend`, and `feed_forward` of what attention gave, or of some of its rows. T tokens, H query
/// heads, G key heads, D elements a head.
#[derive(Clone, Copy, Debug)]
pub(super) struct LayerCall<'a> {
    pub(super) layer: &'a Layer<'a>,
    pub(super) step: &'a Step<'a>,
    pub(super) stream: Stream,
    /// What is multiplied by after the layer.
    pub(super) next: &'a PackedWeight,
}

/// What the time of a forward pass is spent on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    /// The plan of attention.
    Plan,
    /// Rows of the embedding.
    Embedding,
    /// The norms of the layers.
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
    /// The norm before the output layer.
    FinalNorm,
    /// The output layer.
    Head,
}

impl Phase {
    /// Every phase.
    pub const ALL: [Self; 11] = [
        Self::Plan,
        Self::Embedding,
        Self::Norm,
        Self::Qkv,
        Self::Rope,
        Self::Attention,
        Self::Out,
        Self::GateUp,
        Self::Down,
        Self::FinalNorm,
        Self::Head,
    ];

    /// Its name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plan => "plan",
            Self::Embedding => "embedding",
            Self::Norm => "norm",
            Self::Qkv => "qkv",
            Self::Rope => "rope_cache",
            Self::Attention => "attention",
            Self::Out => "out",
            Self::GateUp => "gate_up",
            Self::Down => "down",
            Self::FinalNorm => "final_norm",
            Self::Head => "head",
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

    /// Runs and times a call.
    pub(crate) fn time<R>(&mut self, phase: Phase, call: impl FnOnce() -> R) -> R {
        let start = Instant::now();
        let result = call();
        self.add(phase, start.elapsed());
        result
    }
}

/// A call of a kernel.
pub(super) enum Call<'a> {
    Norm(RmsNorm),
    /// A product, and the weight of the next one.
    Linear(Linear<'a>, Option<&'a PackedWeight>),
    Rope(RopeCache<'a>),
    Attention(Attention<'a>),
}

impl Call<'_> {
    pub(super) fn check(&self) -> Result<(), InvalidArgument> {
        match self {
            Self::Norm(call) => call.check(),
            Self::Linear(call, _) => call.check(),
            Self::Rope(call) => call.check(),
            Self::Attention(call) => call.check(),
        }
    }

    /// # Safety
    /// As that of the kernel.
    pub(super) unsafe fn run(&self) {
        // SAFETY: passed on.
        unsafe {
            match self {
                Self::Norm(call) => call.run(),
                Self::Linear(call, next) => call.run_before(*next),
                Self::Rope(call) => call.run(),
                Self::Attention(call) => call.run(),
            }
        }
    }
}

/// The calls of a half in their order.
struct Calls<'a> {
    call: &'a LayerCall<'a>,
    calls: Vec<(Phase, Call<'a>)>,
}

impl<'a> Calls<'a> {
    /// A matrix of as many rows as the stream.
    fn matrix(&self, address: *mut u8, width: usize) -> MatrixView {
        MatrixView {
            address,
            width,
            row_stride: width,
            ..self.call.stream.residual
        }
    }

    /// Normalises the residual. Returns where the result is.
    fn norm(&mut self, weight: MatrixView) -> MatrixView {
        let Stream { residual, rows, .. } = self.call.stream;
        let out = self.matrix(rows, residual.width);
        let call = RmsNorm {
            out,
            x: residual,
            weight,
            eps: self.call.layer.eps,
        };
        self.calls.push((Phase::Norm, Call::Norm(call)));
        out
    }

    /// Multiplies by the first weight, into `wide`. The second one's turn is next. Returns where the result is.
    fn linear(&mut self, phase: Phase, x: MatrixView, [weight, next]: [&'a PackedWeight; 2]) -> MatrixView {
        let out = self.matrix(self.call.stream.wide, weight.out_size());
        let call = Linear {
            out,
            adds: false,
            x,
            weight,
        };
        self.calls.push((phase, Call::Linear(call, Some(next))));
        out
    }

    /// Likewise, and adds the result to the residual.
    fn contribute(&mut self, phase: Phase, x: MatrixView, [weight, next]: [&'a PackedWeight; 2]) {
        let call = Linear {
            out: self.call.stream.residual,
            adds: true,
            x,
            weight,
        };
        self.calls.push((phase, Call::Linear(call, Some(next))));
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
                weight,
                eps: self.call.layer.eps,
            };
            self.calls.push((Phase::Norm, Call::Norm(call)));
        }
    }

    /// Rotates the queries and keys of `qkv`, writes the cache, attends. Returns where the result is.
    fn attend(&mut self, qkv: MatrixView) -> MatrixView {
        let (step, layer) = (self.call.step, self.call.layer);
        let Layer {
            key_cache,
            value_cache,
            num_heads,
            ..
        } = *layer;
        let (num_kv_heads, head_dim) = (key_cache.num_kv_heads, key_cache.head_dim);
        let heads = |first: usize, num_heads: usize| RowsView {
            address: qkv.address.wrapping_add(first * head_dim * qkv.dtype.size()),
            dtype: qkv.dtype,
            num_tokens: qkv.num_rows,
            num_heads,
            head_dim,
            token_stride: qkv.row_stride,
            head_stride: head_dim,
        };
        let (query, key) = (heads(0, num_heads), heads(num_heads, num_kv_heads));
        if let Some([query_norm, key_norm]) = layer.head_norms {
            self.head_norm(query, query_norm);
            self.head_norm(key, key_norm);
        }
        let rope = RopeCache {
            out: query,
            query,
            key,
            value: heads(num_heads + num_kv_heads, num_kv_heads),
            cos: step.cos,
            sin: step.sin,
            positions: step.positions,
            key_cache,
            value_cache,
            slot_mapping: step.slot_mapping,
        };
        self.calls.push((Phase::Rope, Call::Rope(rope)));
        let out = self.matrix(self.call.stream.rows, num_heads * head_dim);
        let attention = Attention {
            out: RowsView {
                address: out.address,
                token_stride: out.row_stride,
                ..query
            },
            query,
            key_cache,
            value_cache,
            plan: step.plan,
            scale: layer.scale,
        };
        self.calls.push((Phase::Attention, Call::Attention(attention)));
        out
    }
}

impl Calls<'_> {
    /// Checks all of them, and runs them.
    ///
    /// # Safety
    /// As `LayerCall::attend`.
    unsafe fn run(self, times: &mut PhaseTimes) -> Result<(), InvalidArgument> {
        self.calls.iter().try_for_each(|(_, call)| call.check())?;
        for (phase, call) in &self.calls {
            // SAFETY: checked, and passed on; no call reads what it writes, but where it may.
            times.time(*phase, || unsafe { call.run() });
        }
        Ok(())
    }
}

impl Layer<'_> {
    /// Width of queries, keys and values side by side.
    fn heads_width(&self) -> usize {
        (self.num_heads + 2 * self.key_cache.num_kv_heads) * self.key_cache.head_dim
    }

    /// Elements that a token needs in `rows` and in `wide`.
    pub(super) fn widths(&self) -> [usize; 2] {
        let mixed_width = self.num_heads * self.key_cache.head_dim;
        [
            self.qkv.in_size().max(mixed_width),
            self.heads_width().max(self.gate_up.out_size()),
        ]
    }
}

impl LayerCall<'_> {
    /// Computes the half up to attention, whose result it returns, `[T, H D]`, and adds the times of its phases to `times`.
    ///
    /// # Errors
    /// The first argument that does not fit; nothing has been written then.
    ///
    /// # Safety
    /// The views are valid, aligned to their types, and for the length of the call nobody writes what they cover nor
    /// reads what is written; the slots differ. The stream has all tokens.
    pub(super) unsafe fn attend(&self, times: &mut PhaseTimes) -> Result<MatrixView, InvalidArgument> {
        let layer = self.layer;
        let mut calls = self.no_calls();
        let rows = calls.norm(layer.input_norm);
        let heads = calls.linear(Phase::Qkv, rows, [layer.qkv, layer.out]);
        let mixed = calls.attend(heads);
        // SAFETY: passed on.
        unsafe { calls.run(times)? };
        Ok(mixed)
    }

    /// Computes the half behind attention, which gave `mixed`, `[R, H D]`, in `rows` or `wide` of the stream.
    ///
    /// # Errors
    /// As `attend`.
    ///
    /// # Safety
    /// As `attend`, but the stream may have any rows.
    pub(super) unsafe fn feed_forward(
        &self,
        mixed: MatrixView,
        times: &mut PhaseTimes,
    ) -> Result<(), InvalidArgument> {
        let layer = self.layer;
        let mut calls = self.no_calls();
        calls.contribute(Phase::Out, mixed, [layer.out, layer.gate_up]);
        let rows = calls.norm(layer.post_norm);
        let gated = calls.linear(Phase::GateUp, rows, [layer.gate_up, layer.down]);
        calls.contribute(Phase::Down, gated, [layer.down, self.next]);
        // SAFETY: passed on.
        unsafe { calls.run(times) }
    }

    fn no_calls(&self) -> Calls<'_> {
        Calls {
            call: self,
            calls: Vec::with_capacity(Phase::ALL.len()),
        }
    }
}
