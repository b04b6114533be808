//! `Core`: the engine thread's side.

use std::hash::{BuildHasher, RandomState};

use numpy::{PyArray1, PyReadonlyArray1, PyReadwriteArray1};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::config::CoreConfig;
use crate::ids::{BlockId, RequestId};
use crate::sched::{Scheduler, StepHeader as Header};

use super::edge::Edge;
use super::events::EventReader;
use super::explain;

/// The owner of the cache state. A second caller at the same time gets a `RuntimeError`.
#[pyclass(module = "pagedkv._core")]
pub(super) struct Core {
    scheduler: Scheduler,
    /// Finish states of the last commit; kept to be filled again.
    states: Vec<i32>,
}

/// What a step holds, as counts.
#[pyclass(module = "pagedkv._core", frozen)]
pub(super) struct StepHeader(Header);

#[pymethods]
impl StepHeader {
    #[getter]
    const fn step_id(&self) -> u64 {
        self.0.step_id
    }
    #[getter]
    const fn num_tokens(&self) -> u32 {
        self.0.num_tokens
    }
    #[getter]
    const fn num_sequences(&self) -> u32 {
        self.0.num_sequences
    }
    #[getter]
    const fn num_decodes(&self) -> u32 {
        self.0.num_decodes
    }
    #[getter]
    const fn num_rows(&self) -> u32 {
        self.0.num_rows
    }
    #[getter]
    const fn num_copies(&self) -> u32 {
        self.0.num_copies
    }
    #[getter]
    const fn num_ended(&self) -> u32 {
        self.0.num_ended
    }
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

fn to_error(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (
        *, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, eos_token_ids=Vec::new(),
        enable_prefix_caching=true, partial_matching=true, eviction="turn",
        tenants=Vec::new(), max_queued_requests=4096
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments of a constructor, one per option"
    )]
    fn new(
        num_blocks: u32,
        block_size: u32,
        max_num_seqs: u32,
        max_num_batched_tokens: u32,
        max_model_len: u32,
        eos_token_ids: Vec<u32>,
        enable_prefix_caching: bool,
        partial_matching: bool,
        eviction: &str,
        tenants: Vec<explain::Tenant>,
        max_queued_requests: u32,
    ) -> PyResult<Self> {
        let config = CoreConfig {
            num_blocks,
            block_size,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            eos_token_ids,
            prefix_caching: enable_prefix_caching,
            partial_matching,
            eviction: eviction.parse().map_err(PyValueError::new_err::<String>)?,
            tenants: tenants.into_iter().map(explain::share).collect(),
            max_queued_requests,
        };
        let hash_key = std::array::from_fn(|word| RandomState::new().hash_one(word));
        let scheduler =
            Scheduler::new(config, hash_key).map_err(|error| PyValueError::new_err(error.to_string()))?;
        Ok(Self {
            scheduler,
            states: Vec::new(),
        })
    }

    #[getter]
    fn edge(&self) -> Edge {
        Edge(self.scheduler.edge().clone())
    }

    #[getter]
    fn arena_len(&self) -> usize {
        self.scheduler.arena_len()
    }

    fn schedule(&mut self, mut arena: PyReadwriteArray1<'_, i32>) -> PyResult<Option<StepHeader>> {
        let header = self.scheduler.schedule(arena.as_slice_mut()?).map_err(to_error)?;
        Ok(header.map(StepHeader))
    }

    fn commit<'py>(
        &mut self,
        py: Python<'py>,
        step_id: u64,
        tokens: PyReadonlyArray1<'py, i32>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        self.scheduler
            .commit(step_id, tokens.as_slice()?, &mut self.states)
            .map_err(to_error)?;
        Ok(PyArray1::from_slice(py, &self.states))
    }

    fn open_events(&mut self) -> PyResult<EventReader> {
        let reader = self.scheduler.open_events();
        reader
            .map(EventReader)
            .ok_or_else(|| PyRuntimeError::new_err("the events of this core have a reader"))
    }

    fn has_delivered(&self, step_id: u64) -> bool {
        self.scheduler.has_delivered(step_id)
    }

    fn fail_step(&mut self) -> PyResult<()> {
        self.scheduler.fail_step().map_err(to_error)
    }

    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let pool = self.scheduler.pool();
        let snapshot = PyDict::new(py);
        snapshot.set_item("block_size", pool.block_size())?;
        snapshot.set_item("num_blocks", pool.num_blocks())?;
        snapshot.set_item("free", pool.num_free())?;
        snapshot.set_item("idle", pool.num_idle())?;
        snapshot.set_item("owned", pool.num_owned())?;
        snapshot.set_item("fenced", pool.num_fenced())?;
        let ref_counts: Vec<u32> = (0..=pool.num_blocks())
            .map(|id| pool.ref_count(BlockId(id)))
            .collect();
        snapshot.set_item("ref_counts", PyArray1::from_vec(py, ref_counts))?;
        let sequences = PyList::empty(py);
        for view in self.scheduler.sequences() {
            let sequence = PyDict::new(py);
            sequence.set_item("request_id", view.request.0)?;
            sequence.set_item("sample_index", view.sample_index)?;
            sequence.set_item("status", if view.running { "running" } else { "waiting" })?;
            sequence.set_item("num_tokens", view.num_tokens)?;
            sequence.set_item("num_computed", view.num_computed)?;
            sequence.set_item("num_preemptions", view.num_preemptions)?;
            sequence.set_item(
                "blocks",
                view.blocks.iter().map(|block| block.0).collect::<Vec<u32>>(),
            )?;
            sequences.append(sequence)?;
        }
        snapshot.set_item("sequences", sequences)?;
        Ok(snapshot)
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.scheduler.check_invariants().map_err(to_error)
    }

    fn set_time(&mut self, now_ms: u64) {
        self.scheduler.set_time(now_ms);
    }

    #[pyo3(signature = (request_id, salt=Vec::new()))]
    fn explain<'py>(
        &self,
        py: Python<'py>,
        request_id: u64,
        salt: Vec<u8>,
    ) -> PyResult<Option<Bound<'py, PyDict>>> {
        let explanation = self.scheduler.explain(RequestId(request_id), &salt);
        explanation.map(|found| explain::as_dict(py, found)).transpose()
    }

    fn tenants<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        let views = self.scheduler.tenants();
        views
            .iter()
            .map(|view| explain::tenant_as_dict(py, view))
            .collect()
    }

    fn reset_prefix_cache(&mut self) -> u32 {
        self.scheduler.reset_prefix_cache()
    }
}
