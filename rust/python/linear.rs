//! Bindings of packed weights: an object that owns its panels, and is multiplied with rows given by their address.

use pyo3::prelude::*;

use super::cpu::{dtype, numbers, pointer, run};
use crate::cpu::InvalidArgument;
use crate::cpu::linear::{Linear, PackedWeight, Part};
use crate::cpu::tensor::MatrixView;

/// See `_core.pyi`.
#[pyclass(frozen)]
pub(super) struct PackedLinear {
    pub(super) weight: PackedWeight,
}

#[pymethods]
impl PackedLinear {
    /// See `_core.pyi`. The caller vouches for the addresses.
    #[new]
    #[pyo3(signature = (parts, in_size, dtype, *, gated = false))]
    fn new(
        py: Python<'_>,
        parts: Vec<(usize, usize, usize, usize)>,
        in_size: usize,
        dtype: &str,
        gated: bool,
    ) -> PyResult<Self> {
        let dtype = super::cpu::dtype(dtype)?;
        let part = |(weight, num_rows, row_stride, bias)| -> Result<Part, InvalidArgument> {
            let has_bias = bias != 0;
            Ok(Part {
                weight: pointer("weight", weight, dtype.size(), num_rows * in_size == 0)?,
                num_rows,
                row_stride,
                bias: if has_bias {
                    pointer("bias", bias, dtype.size(), false)?
                } else {
                    std::ptr::null()
                },
            })
        };
        let parts = parts.into_iter().map(part).collect::<Result<Vec<_>, _>>()?;
        // SAFETY: the caller vouches for the addresses and keeps the tensors unchanged.
        let weight =
            py.detach(|| unsafe { PackedWeight::pack_for_process(dtype, in_size, &parts, gated) })?;
        Ok(Self { weight })
    }

    #[getter]
    fn in_size(&self) -> usize {
        self.weight.in_size()
    }

    #[getter]
    fn out_size(&self) -> usize {
        self.weight.out_size()
    }

    #[getter]
    fn dtype(&self) -> &'static str {
        self.weight.dtype().name()
    }

    #[getter]
    fn num_bytes(&self) -> usize {
        self.weight.num_bytes()
    }

    #[getter]
    fn num_elements(&self) -> usize {
        self.weight.num_elements()
    }

    #[getter]
    fn arithmetic(&self) -> &'static str {
        self.weight.arithmetic().name()
    }

    /// See `_core.pyi`. The caller vouches for the addresses.
    fn multiply(
        &self,
        py: Python<'_>,
        x: (usize, usize, usize, usize),
        x_type: &str,
        out: usize,
        out_type: &str,
    ) -> PyResult<()> {
        let (x_type, out_type) = (dtype(x_type)?, dtype(out_type)?);
        let (address, num_rows, width, row_stride) = x;
        let out_size = self.weight.out_size();
        let call = Linear {
            out: MatrixView {
                address: pointer("out", out, out_type.size(), num_rows == 0)?,
                dtype: out_type,
                num_rows,
                width: out_size,
                row_stride: out_size,
            },
            adds: false,
            x: MatrixView {
                address: pointer("x", address, x_type.size(), num_rows == 0)?,
                dtype: x_type,
                num_rows,
                width,
                row_stride,
            },
            weight: &self.weight,
        };
        call.check()?;
        // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to `out`.
        run(py, call.estimated_ns(), || unsafe { call.run() });
        Ok(())
    }

    /// See `_core.pyi`. The caller vouches for the addresses.
    fn rows(&self, row_ids: (usize, usize), out: usize) -> PyResult<()> {
        // SAFETY: the caller keeps the ids unchanged during the call.
        let row_ids: &[i32] = unsafe { numbers("row_ids", row_ids)? };
        let out = pointer("out", out, self.weight.dtype().size(), row_ids.is_empty())?;
        self.weight.check_rows(row_ids)?;
        // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to `out`.
        unsafe { self.weight.copy_rows(row_ids, out) };
        Ok(())
    }
}
