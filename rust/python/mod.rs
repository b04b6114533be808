//! Bindings only, no logic: arguments are checked and converted, results are handed over as arrays.

mod cache;
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]
mod core;
mod cpu;
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]
mod edge;
mod events;
mod explain;

use pyo3::prelude::*;

/// The private extension module `pagedkv._core`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::cache::{Conflict, NotFound};
    #[pymodule_export]
    use super::core::{Core, StepHeader};
    #[pymodule_export]
    use super::cpu::{
        copy_blocks, cpu_features, cpu_isa, num_threads, paged_attention, rope_cache, set_num_threads,
    };
    #[pymodule_export]
    use super::edge::{Edge, InvalidRequest, QueueFull};
    #[pymodule_export]
    use super::events::EventReader;
}
