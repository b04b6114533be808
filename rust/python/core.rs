//! `Core`: the engine thread's side.

use std::hash::{BuildHasher, RandomState};

use numpy::{PyArray1, PyReadonlyArray1, PyReadonlyArray2, PyReadwriteArray1, PyUntypedArrayMethods};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::config::{CoreConfig, HostTier};
use crate::ids::{BlockId, RequestId};
use crate::sched::{BeamResult, BeamRows, HoldRequest, Scheduler, StepHeader as Header};

use super::cache;
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
    const fn num_swaps_out(&self) -> u32 {
        self.0.num_swaps_out
    }
    #[getter]
    const fn num_swaps_in(&self) -> u32 {
        self.0.num_swaps_in
    }
    #[getter]
    const fn num_ended(&self) -> u32 {
        self.0.num_ended
    }
    #[getter]
    const fn num_beam_rows(&self) -> u32 {
        self.0.num_beam_rows
    }
    #[getter]
    const fn num_followers(&self) -> u32 {
        self.0.num_followers
    }
    #[getter]
    const fn num_logprobs(&self) -> i32 {
        self.0.num_logprobs
    }
    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}

/// Token ids and log-probabilities of the rows of beams.
type CandidateArrays<'py> = (PyReadonlyArray2<'py, i32>, PyReadonlyArray2<'py, f32>);

/// Generated tokens, the sum of their log-probabilities, the score, the reason of the end.
type Answer = (Vec<u32>, f32, f32, i32);

fn to_error(error: impl std::fmt::Display) -> PyErr {
    PyRuntimeError::new_err(error.to_string())
}

#[pymethods]
impl Core {
    #[new]
    #[pyo3(signature = (
        *, num_blocks, block_size, max_num_seqs, max_num_batched_tokens, max_model_len, eos_token_ids=Vec::new(),
        enable_prefix_caching=true, partial_matching=true, eviction="turn",
        tenants=Vec::new(), max_pinned_blocks=None, max_pinned_blocks_per_tenant=None,
        max_queued_requests=4096, num_host_blocks=0
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
        max_pinned_blocks: Option<u32>,
        max_pinned_blocks_per_tenant: Option<u32>,
        max_queued_requests: u32,
        num_host_blocks: u32,
    ) -> PyResult<Self> {
        let host = HostTier {
            num_blocks: num_host_blocks,
            ..HostTier::default()
        };
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
            max_pinned_blocks: max_pinned_blocks.unwrap_or(0),
            max_pinned_blocks_per_tenant,
            max_queued_requests,
            host,
        };
        let config = match max_pinned_blocks {
            None => config.with_default_pin_budget(),
            Some(_) => config,
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

    #[pyo3(signature = (step_id, tokens, candidates=None))]
    fn commit<'py>(
        &mut self,
        py: Python<'py>,
        step_id: u64,
        tokens: PyReadonlyArray1<'py, i32>,
        candidates: Option<CandidateArrays<'py>>,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let rows = match &candidates {
            None => BeamRows::default(),
            Some((ids, logprobs)) => BeamRows {
                tokens: ids.as_slice()?,
                logprobs: logprobs.as_slice()?,
                per_row: ids.shape()[1],
            },
        };
        self.scheduler
            .commit(step_id, tokens.as_slice()?, &rows, &mut self.states)
            .map_err(to_error)?;
        Ok(PyArray1::from_slice(py, &self.states))
    }

    fn take_beams(&mut self) -> Vec<(u64, Vec<Answer>)> {
        let results = self.scheduler.take_beams().into_iter();
        let answers = |result: BeamResult| {
            let hypotheses = result.hypotheses.into_iter();
            hypotheses
                .map(|one| (one.tokens, one.cum_logprob, one.score, one.reason as i32))
                .collect()
        };
        results
            .map(|result| (result.request.0, answers(result)))
            .collect()
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

    #[getter]
    fn num_in_flight(&self) -> usize {
        self.scheduler.num_in_flight()
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
        snapshot.set_item("owned", self.scheduler.num_owned_blocks())?;
        snapshot.set_item("fenced", self.scheduler.num_fenced_blocks())?;
        snapshot.set_item("pinned", self.scheduler.num_pinned_blocks())?;
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
            sequence.set_item(
                "host_blocks",
                view.host_blocks.iter().map(|block| block.0).collect::<Vec<u32>>(),
            )?;
            sequences.append(sequence)?;
        }
        snapshot.set_item("sequences", sequences)?;
        Ok(snapshot)
    }

    fn check_invariants(&self) -> PyResult<()> {
        self.scheduler.check_invariants().map_err(to_error)
    }

    fn set_swap_costs(&mut self, compute_token_ns: u32, move_block_ns: u32) {
        self.scheduler.set_swap_costs(compute_token_ns, move_block_ns);
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

    fn set_model_epoch(&mut self, model_epoch: u64) {
        self.scheduler.set_model_epoch(model_epoch);
    }

    fn reset_prefix_cache(&mut self) -> (u32, u32, u32) {
        let counts = self.scheduler.reset_prefix_cache();
        (counts.blocks, counts.pins, counts.sessions)
    }

    fn lookup(&mut self, salt: &[u8], prompt: PyReadonlyArray1<'_, i32>) -> PyResult<cache::Looked> {
        cache::lookup(&mut self.scheduler, salt, &cache::token_ids(&prompt)?)
    }

    #[expect(clippy::too_many_arguments, reason = "keyword arguments, one per field")]
    #[pyo3(signature = (kind, salt, name, *, ttl_ms, tokens, max_tokens, append=false))]
    fn promise_hold<'py>(
        &mut self,
        py: Python<'py>,
        kind: &str,
        salt: Vec<u8>,
        name: String,
        ttl_ms: u64,
        tokens: PyReadonlyArray1<'_, i32>,
        max_tokens: u32,
        append: bool,
    ) -> PyResult<cache::Promised<'py>> {
        let request = HoldRequest {
            key: cache::key(kind, salt, name)?,
            ttl_ms,
            tokens: &cache::token_ids(&tokens)?,
            max_tokens,
            append,
        };
        cache::promise_hold(py, &mut self.scheduler, request)
    }

    fn break_promise(&mut self, promise: u64) {
        self.scheduler.break_promise(promise);
    }

    fn holds(&mut self, kind: &str, salt: &[u8]) -> PyResult<Vec<cache::Held>> {
        let views = self.scheduler.holds(salt, cache::kind_of(kind)?);
        Ok(views.into_iter().map(cache::held).collect())
    }

    fn hold(&mut self, kind: &str, salt: Vec<u8>, name: String) -> PyResult<cache::Held> {
        let view = self.scheduler.hold(&cache::key(kind, salt, name)?);
        view.map(cache::held).map_err(|error| cache::to_error(&error))
    }

    fn hold_tokens<'py>(
        &mut self,
        py: Python<'py>,
        kind: &str,
        salt: Vec<u8>,
        name: String,
    ) -> PyResult<Bound<'py, PyArray1<i32>>> {
        let tokens = self.scheduler.hold_tokens(&cache::key(kind, salt, name)?);
        Ok(cache::to_array(
            py,
            &tokens.map_err(|error| cache::to_error(&error))?,
        ))
    }

    fn delete_hold(&mut self, kind: &str, salt: Vec<u8>, name: String) -> PyResult<()> {
        let key = cache::key(kind, salt, name)?;
        self.scheduler
            .delete_hold(&key)
            .map_err(|error| cache::to_error(&error))
    }

    #[pyo3(signature = (salt, name, new_name, ttl_ms=None))]
    fn fork_session(
        &mut self,
        salt: Vec<u8>,
        name: String,
        new_name: &str,
        ttl_ms: Option<u64>,
    ) -> PyResult<cache::Held> {
        let key = cache::key("session", salt, name)?;
        let fork = self.scheduler.fork_session(&key, new_name, ttl_ms);
        fork.map(cache::held).map_err(|error| cache::to_error(&error))
    }
}
