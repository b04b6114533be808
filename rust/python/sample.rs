//! Bindings of sampling: logits come as address and sizes, results are written to addresses.

use pyo3::prelude::*;

use super::cpu::{numbers, run};
use crate::cpu::InvalidArgument;
use crate::cpu::logprobs::{RowLogprobs, logprobs as log_probabilities};
use crate::cpu::sample::{self as kernel, Logits, NUM_PARAMETERS};

/// # Safety
/// The memory is readable and unchanged for as long as the result is used.
unsafe fn logits<'a>(
    address: usize,
    num_rows: usize,
    [vocab_size, row_stride]: [usize; 2],
) -> Result<Logits<'a>, InvalidArgument> {
    if num_rows > 0 && vocab_size == 0 {
        return Err(InvalidArgument::new("vocab_size", vocab_size, "1 or more"));
    }
    let len = num_rows.saturating_sub(1) * row_stride + vocab_size;
    Ok(Logits {
        // SAFETY: passed on.
        values: unsafe { numbers("logits", (address, if num_rows == 0 { 0 } else { len }))? },
        vocab_size,
        row_stride,
    })
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the operation, one by one"
)]
pub(super) fn sample(
    py: Python<'_>,
    tokens: usize,
    logits_address: usize,
    parameters: usize,
    num_rows: usize,
    vocab_size: usize,
    row_stride: usize,
) -> PyResult<()> {
    // SAFETY: the caller keeps logits and arena alive and unchanged during the call.
    let (logits, words) = unsafe {
        (
            logits(logits_address, num_rows, [vocab_size, row_stride])?,
            numbers::<i32>("parameters", (parameters, num_rows * NUM_PARAMETERS))?,
        )
    };
    let parameters = words.as_chunks::<NUM_PARAMETERS>().0;
    // SAFETY: the caller vouches for the exclusive access to the result.
    let tokens = unsafe { super::cpu::numbers_mut("tokens", (tokens, num_rows))? };
    run(py, kernel::estimated_ns(&logits, parameters), || {
        kernel::sample(&logits, parameters, tokens);
    });
    Ok(())
}

/// Chosen log probabilities, top ids and top log probabilities.
type Logprobs = (Vec<f32>, Vec<Vec<usize>>, Vec<Vec<f32>>);

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
pub(super) fn logprobs(
    logits_address: usize,
    chosen: usize,
    num_rows: usize,
    vocab_size: usize,
    row_stride: usize,
    k: usize,
) -> PyResult<Logprobs> {
    // SAFETY: the caller keeps logits and tokens alive and unchanged during the call.
    let (logits, chosen) = unsafe {
        (
            logits(logits_address, num_rows, [vocab_size, row_stride])?,
            numbers::<i64>("chosen", (chosen, num_rows))?,
        )
    };
    let rows = log_probabilities(&logits, chosen, k)?;
    let ids = |row: &RowLogprobs| row.top.iter().map(|&(id, _)| id).collect();
    let values = |row: &RowLogprobs| row.top.iter().map(|&(_, value)| value).collect();
    Ok((
        rows.iter().map(|row| row.chosen).collect(),
        rows.iter().map(ids).collect(),
        rows.iter().map(values).collect(),
    ))
}
