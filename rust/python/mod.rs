//! Bindings only, no logic: arguments are checked and converted, results are handed over as arrays.

mod attention;
mod cache;
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]
mod core;
mod cpu;
mod cuda;
mod decoder;
#[expect(clippy::needless_pass_by_value, reason = "pyo3 hands arguments over by value")]
mod edge;
mod events;
mod explain;
mod linear;
mod norm;
mod sample;

use pyo3::prelude::*;

/// The private extension module `pagedkv._core`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::attention::StepPlan;
    #[pymodule_export]
    use super::cache::{Conflict, NotFound};
    #[pymodule_export]
    use super::core::{Core, StepHeader};
    #[pymodule_export]
    use super::cpu::{
        copy_blocks, cpu_ceilings, cpu_features, cpu_isa, num_threads, rope_cache, set_cpu_isa,
        set_num_threads, swap_blocks,
    };
    #[pymodule_export]
    use super::cuda::cuda_sources;
    #[pymodule_export]
    use super::decoder::Decoder;
    #[pymodule_export]
    use super::edge::{Edge, Heartbeat, InvalidRequest, QueueFull};
    #[pymodule_export]
    use super::events::EventReader;
    #[pymodule_export]
    use super::linear::PackedLinear;
    #[pymodule_export]
    use super::norm::{rms_norm, silu_mul};
    #[pymodule_export]
    use super::sample::{logprobs, sample};
}
