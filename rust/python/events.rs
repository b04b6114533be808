//! `EventReader`: the side of the core that hears what steps brought about.

use pyo3::prelude::*;

use crate::sched::{Event, EventReader as CoreReader};

/// For one thread at a time. A second caller at the same moment gets a `RuntimeError`.
#[pyclass(module = "pagedkv._core")]
pub(super) struct EventReader(pub(super) CoreReader);

/// Request id, row, sample index, token, state, cached tokens; see `_core.pyi`.
type Words = (u64, i32, u32, i32, i32, i32);

#[pymethods]
impl EventReader {
    fn take(&mut self, step_id: u64) -> Vec<Words> {
        let mut events = Vec::new();
        self.0.take(step_id, &mut events);
        let words = |event: Event| {
            (
                event.request.0,
                event.row,
                event.sample_index,
                event.token,
                event.state,
                event.num_cached_tokens,
            )
        };
        events.into_iter().map(words).collect()
    }
}
