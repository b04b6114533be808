//! Bindings only, no logic: arguments are checked and converted, results are handed over as arrays.

mod cpu;

use pyo3::prelude::*;

/// The private extension module `pagedkv._core`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::cpu::{
        copy_blocks, cpu_features, cpu_isa, num_threads, paged_attention, rope_cache, set_num_threads,
    };
}
