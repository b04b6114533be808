//! The sources of the CUDA kernels. They travel inside the extension, so that they are the ones it was built with, and
//! nothing lands beside the package where it is installed.

use std::collections::BTreeMap;

use pyo3::prelude::*;

macro_rules! sources {
    ($($name:literal),+ $(,)?) => {
        [$(($name, include_str!(concat!("../../cuda/", $name)))),+]
    };
}

/// Text by file name; the kernels and the headers they include.
const SOURCES: [(&str, &str); 14] = sources![
    "add_rms_norm.cu",
    "attention.cu",
    "attention.cuh",
    "attention_bulk.cu",
    "attention_fp8.cu",
    "common.cuh",
    "copy_blocks.cu",
    "fp8.cuh",
    "merge_parts.cu",
    "noise.cuh",
    "ptx.cuh",
    "rope_cache.cu",
    "sample.cu",
    "silu_mul.cu",
];

/// The sources of the CUDA kernels by file name.
#[pyfunction]
pub(super) fn cuda_sources() -> BTreeMap<&'static str, &'static str> {
    BTreeMap::from(SOURCES)
}
