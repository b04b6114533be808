//! Bindings of the row-wise kernels: addresses and sizes, as plain numbers.
//!
//! A number is converted in ten nanoseconds, a tuple of shape and strides in several hundred.

use pyo3::prelude::*;

use super::cpu::{dtype, pointer, run};
use crate::cpu::InvalidArgument;
use crate::cpu::activation::SiluMul;
use crate::cpu::element::Dtype;
use crate::cpu::norm::RmsNorm;
use crate::cpu::tensor::MatrixView;

/// Turns an address into a view.
pub(super) fn matrix(
    name: &str,
    dtype: Dtype,
    address: usize,
    [num_rows, width, row_stride]: [usize; 3],
) -> Result<MatrixView, InvalidArgument> {
    Ok(MatrixView {
        address: pointer(name, address, dtype.size(), num_rows * width == 0)?,
        dtype,
        num_rows,
        width,
        row_stride,
    })
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the operation, one by one"
)]
pub(super) fn rms_norm(
    py: Python<'_>,
    out: usize,
    x: usize,
    weight: usize,
    num_rows: usize,
    width: usize,
    x_stride: usize,
    row_type: &str,
    eps: f32,
) -> PyResult<()> {
    let row_type = dtype(row_type)?;
    let call = RmsNorm {
        out: matrix("out", row_type, out, [num_rows, width, width])?,
        x: matrix("x", row_type, x, [num_rows, width, x_stride])?,
        weight: matrix("weight", row_type, weight, [1, width, width])?,
        eps,
    };
    call.check()?;
    // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to what is written.
    run(py, call.estimated_ns(), || unsafe { call.run() });
    Ok(())
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the operation, one by one"
)]
pub(super) fn silu_mul(
    py: Python<'_>,
    out: usize,
    gate: usize,
    up: usize,
    num_rows: usize,
    width: usize,
    gate_stride: usize,
    up_stride: usize,
    row_type: &str,
) -> PyResult<()> {
    let row_type = dtype(row_type)?;
    let call = SiluMul {
        out: matrix("out", row_type, out, [num_rows, width, width])?,
        gate: matrix("gate", row_type, gate, [num_rows, width, gate_stride])?,
        up: matrix("up", row_type, up, [num_rows, width, up_stride])?,
    };
    call.check()?;
    // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to `out`.
    run(py, call.estimated_ns(), || unsafe { call.run() });
    Ok(())
}
