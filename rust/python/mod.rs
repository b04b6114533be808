//! Bindings only, no logic: arguments are checked and converted, results are handed over as arrays.

mod core;
mod edge;

use pyo3::prelude::*;

/// The private extension module `pagedkv._core`.
#[pymodule]
mod _core {
    #[pymodule_export]
    use super::core::{Core, StepHeader};
    #[pymodule_export]
    use super::edge::{Edge, InvalidRequest, QueueFull};
}
