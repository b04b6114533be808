//! Binding of attention: the step's plan, made once and used by every layer.

use std::collections::HashMap;

use pyo3::prelude::*;

use super::cpu::{Indices, Tensor, cache, dtype, numbers, rows, run};
use crate::cpu::attention::Attention;
use crate::cpu::batch::Batch;
use crate::cpu::layer::{Phase, PhaseTimes};
use crate::cpu::plan::{Geometry, Plan};
use crate::cpu::pool;

/// See `_core.pyi`.
#[pyclass]
pub(super) struct StepPlan {
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    table_start: Vec<i32>,
    block_ids: Vec<i32>,
    /// The plan, for a geometry and a number of threads.
    plan: Option<(Geometry, usize, Plan)>,
    /// Of the forward pass.
    times: PhaseTimes,
}

/// A step whose plan is made.
pub(super) struct Planned<'a> {
    pub(super) plan: &'a Plan,
    /// Where the forward pass adds up its times.
    pub(super) times: &'a mut PhaseTimes,
}

impl StepPlan {
    /// Makes the plan for a geometry; again only where a layer has another one than the layer before.
    fn make(&mut self, geometry: Geometry) -> PyResult<()> {
        let num_threads = pool::num_threads();
        let is_made = self
            .plan
            .as_ref()
            .is_some_and(|(made_for, threads, _)| (*made_for, *threads) == (geometry, num_threads));
        if !is_made {
            let batch = Batch {
                query_start: &self.query_start,
                seq_lens: &self.seq_lens,
                table_start: &self.table_start,
                block_ids: &self.block_ids,
            };
            let plan = self.times.time(Phase::Plan, || Plan::new(&batch, geometry))?;
            self.plan = Some((geometry, num_threads, plan));
        }
        Ok(())
    }

    /// The plan for a geometry.
    pub(super) fn plan(&mut self, geometry: Geometry) -> PyResult<Planned<'_>> {
        self.make(geometry)?;
        let (_, _, plan) = self.plan.as_ref().expect("made above");
        Ok(Planned {
            plan,
            times: &mut self.times,
        })
    }
}

#[pymethods]
impl StepPlan {
    #[new]
    fn new(
        query_start: Indices,
        seq_lens: Indices,
        table_start: Indices,
        block_ids: Indices,
    ) -> PyResult<Self> {
        let copy = |name, indices| -> PyResult<Vec<i32>> {
            // SAFETY: the caller vouches for the addresses; the numbers are copied before anything else happens.
            Ok(unsafe { numbers::<i32>(name, indices)? }.to_vec())
        };
        Ok(Self {
            query_start: copy("query_start", query_start)?,
            seq_lens: copy("seq_lens", seq_lens)?,
            table_start: copy("table_start", table_start)?,
            block_ids: copy("block_ids", block_ids)?,
            plan: None,
            times: PhaseTimes::default(),
        })
    }

    /// See `_core.pyi`.
    fn phases(&self) -> HashMap<&'static str, (usize, f64)> {
        let entry = |phase: Phase| {
            let (calls, duration) = self.times.of(phase);
            (phase.name(), (calls, duration.as_secs_f64()))
        };
        Phase::ALL.into_iter().map(entry).collect()
    }

    /// See `_core.pyi`. The caller vouches for the addresses.
    #[expect(
        clippy::too_many_arguments,
        reason = "the arguments of the operation, one by one"
    )]
    fn paged_attention(
        &mut self,
        py: Python<'_>,
        out: usize,
        query: Tensor<3>,
        key_cache: Tensor<4>,
        value_cache: Tensor<4>,
        row_type: &str,
        cache_type: &str,
        scale: f32,
    ) -> PyResult<()> {
        let (row_type, cache_type) = (dtype(row_type)?, dtype(cache_type)?);
        let [num_tokens, num_heads, head_dim] = query.1;
        let (key_cache, value_cache) = (
            cache("key_cache", cache_type, key_cache)?,
            cache("value_cache", cache_type, value_cache)?,
        );
        let dense = [num_heads * head_dim, head_dim, 1];
        let Planned { plan, .. } = self.plan(Geometry {
            num_tokens,
            num_heads,
            num_kv_heads: key_cache.num_kv_heads,
            num_blocks: key_cache.num_blocks,
            block_size: key_cache.block_size,
        })?;
        let call = Attention {
            out: rows("out", row_type, (out, query.1, dense))?,
            query: rows("query", row_type, query)?,
            key_cache,
            value_cache,
            plan,
            scale,
        };
        call.check()?;
        // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to `out`.
        run(py, call.estimated_ns(), || unsafe { call.run() });
        Ok(())
    }
}
