//! Bindings of a decoder layer: an object that holds what does not change from step to step, called once a step.

use pyo3::prelude::*;

use super::attention::{Planned, StepPlan};
use super::cpu::{Tensor, angle_table, cache, dtype, run};
use super::linear::PackedLinear;
use super::norm::matrix;
use crate::cpu::InvalidArgument;
use crate::cpu::layer::{self as kernel, LayerWeights};
use crate::cpu::plan::Geometry;
use crate::cpu::rope_cache::AngleTable;
use crate::cpu::tensor::{CacheView, MatrixView};

/// The four packed weights, in the order in which they are used.
type Products = (Py<PackedLinear>, Py<PackedLinear>, Py<PackedLinear>, Py<PackedLinear>);

/// See `_core.pyi`.
#[pyclass(frozen)]
pub(super) struct DecoderLayer {
    products: Products,
    input_norm: MatrixView,
    post_norm: MatrixView,
    head_norms: Option<[MatrixView; 2]>,
    eps: f32,
    num_heads: usize,
    scale: f32,
    key_cache: CacheView,
    value_cache: CacheView,
    cos: AngleTable<'static>,
    sin: AngleTable<'static>,
}

#[pymethods]
impl DecoderLayer {
    /// See `_core.pyi`. The caller vouches for the addresses, as long as the object lives.
    #[new]
    #[expect(
        clippy::too_many_arguments,
        reason = "the parts of a layer, one by one"
    )]
    fn new(
        products: Products,
        norms: Vec<usize>,
        eps: f32,
        num_heads: usize,
        scale: f32,
        angles: [Tensor<2>; 2],
        key_cache: Tensor<4>,
        value_cache: Tensor<4>,
        cache_type: &str,
    ) -> PyResult<Self> {
        let qkv = &products.0.get().weight;
        let row_type = qkv.dtype();
        let vector = |address, width: usize| matrix("norm", row_type, address, [1, width, width]);
        let cache_type = dtype(cache_type)?;
        let key_cache = cache("key_cache", cache_type, key_cache)?;
        let [cos, sin] = angles;
        // SAFETY: the caller keeps the tables alive and unchanged as long as this object lives.
        let (cos, sin) = unsafe { (angle_table("cos", cos)?, angle_table("sin", sin)?) };
        let (input_norm, post_norm, head_norms) = match norms[..] {
            [input, post] => (input, post, None),
            [input, post, query, key] => {
                let head_dim = key_cache.head_dim;
                let head_norms = [vector(query, head_dim)?, vector(key, head_dim)?];
                (input, post, Some(head_norms))
            }
            _ => return Err(InvalidArgument::new("length of norms", norms.len(), "2 or 4").into()),
        };
        Ok(Self {
            input_norm: vector(input_norm, qkv.in_size())?,
            post_norm: vector(post_norm, qkv.in_size())?,
            head_norms,
            eps,
            num_heads,
            scale,
            key_cache,
            value_cache: cache("value_cache", cache_type, value_cache)?,
            cos,
            sin,
            products,
        })
    }

    /// See `_core.pyi`. The caller vouches for the addresses.
    fn forward(
        &self,
        py: Python<'_>,
        step: &mut StepPlan,
        residual: usize,
        update: usize,
        adds_update: bool,
    ) -> PyResult<()> {
        let weights = self.weights();
        let num_tokens = step.num_tokens();
        let (row_type, width) = (weights.qkv.dtype(), weights.qkv.in_size());
        let residual = matrix("residual", row_type, residual, [num_tokens, width, width])?;
        let update = matrix("update", row_type, update, [num_tokens, width, width])?;
        let Planned {
            plan,
            positions,
            slot_mapping,
            times,
        } = step.plan(Geometry {
            num_tokens,
            num_heads: self.num_heads,
            num_kv_heads: self.key_cache.num_kv_heads,
            num_blocks: self.key_cache.num_blocks,
            block_size: self.key_cache.block_size,
        })?;
        let call = kernel::DecoderLayer {
            weights,
            residual,
            update,
            adds_update,
            cos: self.cos,
            sin: self.sin,
            positions,
            slot_mapping,
            key_cache: self.key_cache,
            value_cache: self.value_cache,
            plan,
        };
        let mut result = Ok(());
        // SAFETY: the caller vouches for the addresses and for the exclusive access to what is written.
        run(py, call.estimated_ns(), || result = unsafe { call.run(times) });
        Ok(result?)
    }
}

impl DecoderLayer {
    fn weights(&self) -> LayerWeights<'_> {
        let (qkv, out, gate_up, down) = &self.products;
        LayerWeights {
            input_norm: self.input_norm,
            qkv: &qkv.get().weight,
            head_norms: self.head_norms,
            out: &out.get().weight,
            post_norm: self.post_norm,
            gate_up: &gate_up.get().weight,
            down: &down.get().weight,
            eps: self.eps,
            num_heads: self.num_heads,
            scale: self.scale,
        }
    }
}
