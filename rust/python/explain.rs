//! Explanations and tenants as Python sees them; methods of `Core` hand them over.

use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::block::{Removal, Share};
use crate::sched::{Explanation, TenantView};

/// A tenant in the configuration: salt, whether all salts that begin with it are meant, floor, weight.
pub(super) type Tenant = (Vec<u8>, bool, u32, u32);

pub(super) fn share((salt, is_prefix, floor, weight): Tenant) -> Share {
    Share {
        salt,
        is_prefix,
        floor,
        weight,
    }
}

pub(super) fn as_dict<'py>(py: Python<'py>, explanation: &Explanation) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("prompt_tokens", explanation.prompt_len)?;
    dict.set_item("cached_tokens", explanation.num_cached)?;
    dict.set_item("verdict", explanation.verdict.name())?;
    dict.set_item("token_index", explanation.token_index)?;
    dict.set_item("before", explanation.before.clone())?;
    dict.set_item("held", explanation.held.clone())?;
    dict.set_item("came", explanation.came.clone())?;
    let evicted = explanation.evicted.map(|(age_ms, reason)| {
        let reason = match reason {
            Removal::Capacity => "capacity",
            Removal::Reset => "reset",
        };
        (age_ms, reason)
    });
    dict.set_item("evicted", evicted)?;
    Ok(dict)
}

pub(super) fn tenant_as_dict<'py>(py: Python<'py>, view: &TenantView) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    dict.set_item("requests", view.requests)?;
    dict.set_item("prefix_queries", view.prefix_queries)?;
    dict.set_item("prefix_hits", view.prefix_hits)?;
    dict.set_item("generation_tokens", view.generation_tokens)?;
    dict.set_item("blocks_cached", view.blocks_cached)?;
    dict.set_item("evictions", view.evictions)?;
    Ok(dict)
}
