//! What `Core` is asked between steps: pins, sessions, lookups. `core` has the methods, here is what they convert.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyLookupError, PyRuntimeError};
use pyo3::prelude::*;

use crate::error::HoldError;
use crate::sched::{HoldKey, HoldKind, HoldRequest, HoldView, Lookup, Scheduler};

use super::edge::InvalidRequest;

pyo3::create_exception!(
    pagedkv._core,
    NotFound,
    PyLookupError,
    "There is no pin or session of this name, or it has expired."
);
pyo3::create_exception!(
    pagedkv._core,
    Conflict,
    PyRuntimeError,
    "The session is being continued by another request, or the name is taken."
);

/// (name, tokens, blocks, when it expires in told milliseconds)
pub(super) type Held = (String, u32, u32, u64);
/// (a promise, the whole prompt)
pub(super) type Promised<'py> = (u64, Bound<'py, PyArray1<i32>>);
/// (cached tokens, blocks needed, blocks available, what is in the way)
pub(super) type Looked = (u32, u32, u32, Option<&'static str>);

pub(super) fn to_error(error: &HoldError) -> PyErr {
    let message = error.to_string();
    match error {
        HoldError::NotFound { .. } => NotFound::new_err(message),
        HoldError::Busy { .. } | HoldError::Exists { .. } => Conflict::new_err(message),
        HoldError::OverBudget { .. }
        | HoldError::TooMany { .. }
        | HoldError::TooManyTokens { .. }
        | HoldError::Invalid(_) => InvalidRequest::new_err(message),
    }
}

pub(super) fn key(kind: &str, salt: Vec<u8>, name: String) -> PyResult<HoldKey> {
    Ok(HoldKey {
        salt,
        kind: kind_of(kind)?,
        name,
    })
}

pub(super) fn kind_of(kind: &str) -> PyResult<HoldKind> {
    match kind {
        "pin" => Ok(HoldKind::Pin),
        "session" => Ok(HoldKind::Session),
        _ => Err(InvalidRequest::new_err(format!(
            "kind is {kind:?}, allowed: \"pin\", \"session\""
        ))),
    }
}

pub(super) fn held(view: HoldView) -> Held {
    (view.name, view.num_tokens, view.num_blocks, view.expires_at_ms)
}

/// Token ids from Python, none of them negative.
pub(super) fn token_ids(tokens: &PyReadonlyArray1<'_, i32>) -> PyResult<Vec<u32>> {
    let convert = |&token: &i32| {
        u32::try_from(token).map_err(|_| {
            InvalidRequest::new_err(format!("prompt holds token id {token}, allowed: 0 and above"))
        })
    };
    tokens.as_slice()?.iter().map(convert).collect()
}

pub(super) fn to_array<'py>(py: Python<'py>, tokens: &[u32]) -> Bound<'py, PyArray1<i32>> {
    PyArray1::from_iter(py, tokens.iter().map(|token| token.cast_signed()))
}

pub(super) fn promise_hold<'py>(
    py: Python<'py>,
    scheduler: &mut Scheduler,
    request: HoldRequest<'_>,
) -> PyResult<Promised<'py>> {
    let (promise, prompt) = scheduler
        .promise_hold(request)
        .map_err(|error| to_error(&error))?;
    Ok((promise, to_array(py, &prompt)))
}

pub(super) fn lookup(scheduler: &mut Scheduler, salt: &[u8], prompt: &[u32]) -> PyResult<Looked> {
    if prompt.is_empty() {
        return Err(InvalidRequest::new_err(
            "prompt is empty, allowed: at least one token",
        ));
    }
    let Lookup {
        num_cached_tokens,
        blocks_needed,
        blocks_available,
        obstacle,
    } = scheduler.lookup(salt, prompt);
    let obstacle = obstacle.map(crate::sched::Obstacle::name);
    Ok((num_cached_tokens, blocks_needed, blocks_available, obstacle))
}
