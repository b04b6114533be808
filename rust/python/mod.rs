//! Bindings only, no logic: arguments are checked and converted, results are handed over as arrays.

use pyo3::prelude::*;

/// The private extension module `pagedkv._core`.
#[pymodule]
mod _core {}
