//! Bindings of a decoder: an object that holds what does not change from step to step, called once a step.

use pyo3::prelude::*;

use super::attention::{Planned, StepPlan};
use super::cpu::{Indices, Tensor, angle_table, cache, dtype, numbers, run};
use super::edge::Heartbeat;
use super::linear::PackedLinear;
use super::norm::matrix;
use crate::cpu::InvalidArgument;
use crate::cpu::decoder::{self as kernel, Embedding};
use crate::cpu::element::Dtype;
use crate::cpu::layer::{Layer, Step};
use crate::cpu::plan::Geometry;
use crate::cpu::rope_cache::AngleTable;
use crate::cpu::tensor::{CacheView, MatrixView};

/// The packed weights of a layer, in the order in which they are used.
type Products = [Py<PackedLinear>; 4];

/// A layer whose packed weights are Python's.
struct HeldLayer {
    products: Products,
    input_norm: MatrixView,
    post_norm: MatrixView,
    head_norms: Option<[MatrixView; 2]>,
    key_cache: CacheView,
    value_cache: CacheView,
}

/// See `_core.pyi`.
#[pyclass(frozen)]
pub(super) struct Decoder {
    layers: Vec<HeldLayer>,
    /// None: the output layer is the embedding.
    embedding: Option<MatrixView>,
    norm: MatrixView,
    head: Py<PackedLinear>,
    eps: f32,
    num_heads: usize,
    scale: f32,
    cos: AngleTable<'static>,
    sin: AngleTable<'static>,
}

/// Products, addresses of norms, caches.
type LayerParts = (Products, Vec<usize>, [Tensor<4>; 2]);

impl HeldLayer {
    fn new(
        (products, norms, [keys, values]): LayerParts,
        row_type: Dtype,
        cache_type: Dtype,
    ) -> Result<Self, InvalidArgument> {
        let (key_cache, value_cache) = (
            cache("key_cache", cache_type, keys)?,
            cache("value_cache", cache_type, values)?,
        );
        let hidden = products[0].get().weight.in_size();
        let vector = |address, width: usize| matrix("norm", row_type, address, [1, width, width]);
        let (input, post, head_norms) = match norms[..] {
            [input, post] => (input, post, None),
            [input, post, query, key] => {
                let head_dim = key_cache.head_dim;
                let head_norms = [vector(query, head_dim)?, vector(key, head_dim)?];
                (input, post, Some(head_norms))
            }
            _ => return Err(InvalidArgument::new("length of norms", norms.len(), "2 or 4")),
        };
        Ok(Self {
            input_norm: vector(input, hidden)?,
            post_norm: vector(post, hidden)?,
            head_norms,
            key_cache,
            value_cache,
            products,
        })
    }
}

#[pymethods]
impl Decoder {
    /// See `_core.pyi`. The caller vouches for the addresses, as long as the object lives.
    #[new]
    #[expect(clippy::too_many_arguments, reason = "the parts of a model, one by one")]
    fn new(
        layers: Vec<LayerParts>,
        cache_type: &str,
        embedding: usize,
        norm: usize,
        head: Py<PackedLinear>,
        eps: f32,
        num_heads: usize,
        scale: f32,
        angles: [Tensor<2>; 2],
    ) -> PyResult<Self> {
        let (row_type, cache_type) = (head.get().weight.dtype(), dtype(cache_type)?);
        let (vocab_size, hidden) = (head.get().weight.out_size(), head.get().weight.in_size());
        let embedding = match embedding {
            0 => None,
            address => Some(matrix(
                "embedding",
                row_type,
                address,
                [vocab_size, hidden, hidden],
            )?),
        };
        let layers = layers
            .into_iter()
            .map(|parts| HeldLayer::new(parts, row_type, cache_type))
            .collect::<Result<Vec<_>, _>>()?;
        if layers.is_empty() {
            return Err(InvalidArgument::new("length of layers", 0, "1 or more").into());
        }
        let [cos, sin] = angles;
        // SAFETY: the caller keeps the tables alive and unchanged as long as this object lives.
        let (cos, sin) = unsafe { (angle_table("cos", cos)?, angle_table("sin", sin)?) };
        Ok(Self {
            layers,
            embedding,
            norm: matrix("norm", row_type, norm, [1, hidden, hidden])?,
            head,
            eps,
            num_heads,
            scale,
            cos,
            sin,
        })
    }

    /// See `_core.pyi`. The caller vouches for the addresses.
    #[expect(clippy::too_many_arguments, reason = "the sections of a step, one by one")]
    fn forward(
        &self,
        py: Python<'_>,
        plan: &mut StepPlan,
        token_ids: Indices,
        positions: Indices,
        slot_mapping: Indices,
        sample_rows: Indices,
        logits: usize,
        heartbeat: Option<&Heartbeat>,
    ) -> PyResult<()> {
        // SAFETY: the caller keeps the arena of the step alive and unchanged during the call.
        let (token_ids, positions, slot_mapping, sample_rows) = unsafe {
            (
                numbers("token_ids", token_ids)?,
                numbers("positions", positions)?,
                numbers("slot_mapping", slot_mapping)?,
                numbers("sample_rows", sample_rows)?,
            )
        };
        let layers: Vec<Layer<'_>> = self.layers.iter().map(|layer| self.layer(layer)).collect();
        let head = &self.head.get().weight;
        let vocab_size = head.out_size();
        let key_cache = layers[0].key_cache;
        let Planned { plan, times } = plan.plan(Geometry {
            num_tokens: token_ids.len(),
            num_heads: self.num_heads,
            num_kv_heads: key_cache.num_kv_heads,
            num_blocks: key_cache.num_blocks,
            block_size: key_cache.block_size,
        })?;
        let call = kernel::Decoder {
            token_ids,
            step: Step {
                cos: self.cos,
                sin: self.sin,
                positions,
                slot_mapping,
                plan,
            },
            sample_rows,
            embedding: self.embedding.map_or(Embedding::Packed(head), Embedding::Rows),
            layers: &layers,
            norm: self.norm,
            head,
            logits: matrix(
                "logits",
                Dtype::F32,
                logits,
                [sample_rows.len(), vocab_size, vocab_size],
            )?,
        };
        let beat = || {
            if let Some(heartbeat) = heartbeat {
                heartbeat.0.beat();
            }
        };
        let mut result = Ok(());
        run(py, call.estimated_ns(), || {
            // SAFETY: the caller vouches for the addresses and for the exclusive access to what is written.
            result = unsafe { call.run(times, beat) };
        });
        Ok(result?)
    }
}

impl Decoder {
    fn layer<'a>(&'a self, held: &'a HeldLayer) -> Layer<'a> {
        let [qkv, out, gate_up, down] = &held.products;
        Layer {
            input_norm: held.input_norm,
            qkv: &qkv.get().weight,
            head_norms: held.head_norms,
            out: &out.get().weight,
            post_norm: held.post_norm,
            gate_up: &gate_up.get().weight,
            down: &down.get().weight,
            eps: self.eps,
            num_heads: self.num_heads,
            scale: self.scale,
            key_cache: held.key_cache,
            value_cache: held.value_cache,
        }
    }
}
