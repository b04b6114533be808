//! `Edge`: the side of the core that any Python thread may hold.

use std::time::Duration;

use numpy::PyReadonlyArray1;
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::error::SubmitError;
use crate::ids::RequestId;
use crate::sched::{BeamParams, CachePriority, EarlyStopping, Edge as CoreEdge, SamplingParams};
use crate::sync::Stats;

use super::cache::token_ids;

pyo3::create_exception!(
    pagedkv._core,
    InvalidRequest,
    PyValueError,
    "The request can never be served as it is."
);
pyo3::create_exception!(
    pagedkv._core,
    QueueFull,
    PyRuntimeError,
    "As many requests as the engine accepts are in flight."
);

/// Requests, aborts and early ends go in; counters come out. No call blocks, but for `wait`.
#[pyclass(module = "pagedkv._core", frozen)]
pub(super) struct Edge(pub(super) CoreEdge);

fn to_error(error: &SubmitError) -> PyErr {
    match error {
        SubmitError::Invalid(message) => InvalidRequest::new_err(message.clone()),
        SubmitError::QueueFull { .. } => QueueFull::new_err(error.to_string()),
    }
}

#[pymethods]
impl Edge {
    #[pyo3(signature = (
        prompt, *, max_tokens, n=1, temperature=0.0, top_p=1.0, top_k=0, min_p=0.0, seed=0, stop_token_ids=Vec::new(),
        ignore_eos=false, num_logprobs=-1, salt=Vec::new(), priority=0, beam=None, promise=None,
        evict_first=false
    ))]
    #[expect(
        clippy::too_many_arguments,
        reason = "keyword arguments, one per request field"
    )]
    fn submit(
        &self,
        prompt: PyReadonlyArray1<'_, i32>,
        max_tokens: u32,
        n: u32,
        temperature: f32,
        top_p: f32,
        top_k: u32,
        min_p: f32,
        seed: u64,
        stop_token_ids: Vec<u32>,
        ignore_eos: bool,
        num_logprobs: i32,
        salt: Vec<u8>,
        priority: i32,
        beam: Option<(u32, f64, Option<bool>)>,
        promise: Option<u64>,
        evict_first: bool,
    ) -> PyResult<u64> {
        let prompt = token_ids(&prompt)?;
        let params = SamplingParams {
            max_tokens,
            n,
            temperature,
            top_p,
            min_p,
            top_k,
            seed,
            stop_token_ids,
            ignore_eos,
            beam: beam.map(|(width, length_penalty, stops_early)| BeamParams {
                width,
                length_penalty,
                early_stopping: match stops_early {
                    Some(true) => EarlyStopping::Always,
                    Some(false) => EarlyStopping::Heuristic,
                    None => EarlyStopping::Never,
                },
            }),
            priority,
            num_logprobs,
            promise,
            cache_priority: if evict_first {
                CachePriority::Low
            } else {
                CachePriority::Normal
            },
        };
        self.0
            .submit(prompt, params, salt)
            .map(|id| id.0)
            .map_err(|error| to_error(&error))
    }

    fn abort(&self, request_id: u64) -> bool {
        self.0.abort(RequestId(request_id))
    }

    fn finish(&self, request_id: u64, sample_index: u32, num_tokens: u32) {
        self.0.finish(RequestId(request_id), sample_index, num_tokens);
    }

    /// Releases the GIL while it is parked: this is the one call that takes long by design.
    fn wait(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|_| PyValueError::new_err(format!("timeout_s is {timeout_s}, allowed: 0 and above")))?;
        Ok(py.detach(|| self.0.wait(timeout)))
    }

    fn wake(&self) {
        self.0.wake();
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = PyDict::new(py);
        for (name, value) in Stats::FIELDS.iter().zip(self.0.stats().as_array()) {
            stats.set_item(name, value)?;
        }
        Ok(stats)
    }
}

/// See `_core.pyi`.
#[pyclass(frozen)]
pub(super) struct Heartbeat(pub(super) crate::sync::Heartbeat);

#[pymethods]
impl Heartbeat {
    #[new]
    fn new() -> Self {
        Self(crate::sync::Heartbeat::new())
    }

    fn beat(&self) {
        self.0.beat();
    }

    #[getter]
    fn age(&self) -> f64 {
        self.0.age().as_secs_f64()
    }

    #[getter]
    fn num_beats(&self) -> u64 {
        self.0.num_beats()
    }
}
