//! Bindings of the CPU kernels: tensors come as address, shape and strides, and are checked before they are followed.
//!
//! A call that is expected to last under `KEEP_GIL_NS` keeps the GIL. Giving it up is cheap, getting it back is not:
//! beside a busy Python thread every return waits for a switch interval, so that a hundred short calls would take
//! longer for their waits than for their work.

use std::collections::HashMap;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::cpu::InvalidArgument;
use crate::cpu::copy_blocks::BlocksView;
use crate::cpu::element::Dtype;
use crate::cpu::level::Level;
use crate::cpu::rope_cache::{AngleTable, RopeCache};
use crate::cpu::tensor::{CacheView, RowsView};
use crate::cpu::{copy_blocks as copy, isa, peak, pool};

/// Expected duration from which a call releases the GIL.
const KEEP_GIL_NS: u64 = 1_000_000;

/// Address of the first element, shape, strides in elements.
pub(super) type Tensor<const N: usize> = (usize, [usize; N], [usize; N]);
/// Address of the first element and number of elements, which are int32 and dense.
pub(super) type Indices = (usize, usize);

impl From<InvalidArgument> for PyErr {
    fn from(error: InvalidArgument) -> Self {
        PyValueError::new_err(error.to_string())
    }
}

pub(super) fn dtype(name: &str) -> Result<Dtype, InvalidArgument> {
    let allowed = "float32, bfloat16 or float16";
    Dtype::from_name(name).ok_or_else(|| InvalidArgument::new("dtype", name, allowed))
}

/// Turns an address into a pointer, if it can be one to elements of `size` bytes.
pub(super) fn pointer(
    name: &str,
    address: usize,
    size: usize,
    is_empty: bool,
) -> Result<*mut u8, InvalidArgument> {
    if is_empty {
        return Ok(std::ptr::dangling_mut::<u64>().cast());
    }
    if address == 0 || !address.is_multiple_of(size) {
        let allowed = format!("an address divisible by {size}");
        return Err(InvalidArgument::new(
            format!("address of {name}"),
            address,
            allowed,
        ));
    }
    Ok(std::ptr::with_exposed_provenance_mut(address))
}

fn check_dense(name: &str, size: usize, stride: usize) -> Result<(), InvalidArgument> {
    if stride == 1 || size <= 1 {
        return Ok(());
    }
    Err(InvalidArgument::new(
        format!("stride of the last dimension of {name}"),
        stride,
        "1",
    ))
}

pub(super) fn rows(name: &str, dtype: Dtype, tensor: Tensor<3>) -> Result<RowsView, InvalidArgument> {
    let (address, [num_tokens, num_heads, head_dim], [token_stride, head_stride, stride]) = tensor;
    check_dense(name, head_dim, stride)?;
    let address = pointer(
        name,
        address,
        dtype.size(),
        num_tokens * num_heads * head_dim == 0,
    )?;
    Ok(RowsView {
        address,
        dtype,
        num_tokens,
        num_heads,
        head_dim,
        token_stride,
        head_stride,
    })
}

pub(super) fn cache(name: &str, dtype: Dtype, tensor: Tensor<4>) -> Result<CacheView, InvalidArgument> {
    let (address, shape, strides) = tensor;
    let [num_blocks, num_kv_heads, block_size, head_dim] = shape;
    let [block_stride, head_stride, slot_stride, stride] = strides;
    check_dense(name, head_dim, stride)?;
    let address = pointer(name, address, dtype.size(), shape.contains(&0))?;
    Ok(CacheView {
        address,
        dtype,
        num_blocks,
        num_kv_heads,
        block_size,
        head_dim,
        block_stride,
        head_stride,
        slot_stride,
    })
}

/// # Safety
/// The memory is readable and unchanged for as long as the result is used.
pub(super) unsafe fn numbers<'a, T>(name: &str, (address, len): Indices) -> Result<&'a [T], InvalidArgument> {
    let start = pointer(name, address, size_of::<T>(), len == 0)?;
    // SAFETY: the caller vouches for the memory; the pointer is aligned, also where there is nothing to read.
    Ok(unsafe { std::slice::from_raw_parts(start.cast::<T>(), len) })
}

/// # Safety
/// As `numbers`, and nobody else accesses the memory.
pub(super) unsafe fn numbers_mut<'a, T>(
    name: &str,
    (address, len): Indices,
) -> Result<&'a mut [T], InvalidArgument> {
    let start = pointer(name, address, size_of::<T>(), len == 0)?;
    // SAFETY: the caller vouches for the memory; the pointer is aligned, also where there is nothing.
    Ok(unsafe { std::slice::from_raw_parts_mut(start.cast::<T>(), len) })
}

/// Runs a kernel with or without the GIL.
pub(super) fn run(py: Python<'_>, estimated_ns: u64, kernel: impl FnOnce() + Send) {
    if estimated_ns < KEEP_GIL_NS {
        kernel();
    } else {
        py.detach(kernel);
    }
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
#[expect(
    clippy::too_many_arguments,
    reason = "the arguments of the operation, one by one"
)]
pub(super) fn rope_cache(
    py: Python<'_>,
    out: Tensor<3>,
    query: Tensor<3>,
    key: Tensor<3>,
    value: Tensor<3>,
    angles: [Tensor<2>; 2],
    positions: Indices,
    key_cache: Tensor<4>,
    value_cache: Tensor<4>,
    slot_mapping: Indices,
    row_type: &str,
    cache_type: &str,
) -> PyResult<()> {
    let (row_type, cache_type) = (dtype(row_type)?, dtype(cache_type)?);
    // SAFETY: the caller keeps the tables and the arena of the step alive and unchanged during the call.
    let (cos, sin, positions, slot_mapping) = unsafe {
        let [cos, sin] = angles;
        let (cos, sin) = (angle_table("cos", cos)?, angle_table("sin", sin)?);
        (
            cos,
            sin,
            numbers("positions", positions)?,
            numbers("slot_mapping", slot_mapping)?,
        )
    };
    let call = RopeCache {
        out: rows("out", row_type, out)?,
        query: rows("query", row_type, query)?,
        key: rows("key", row_type, key)?,
        value: rows("value", row_type, value)?,
        cos,
        sin,
        positions,
        key_cache: cache("key_cache", cache_type, key_cache)?,
        value_cache: cache("value_cache", cache_type, value_cache)?,
        slot_mapping,
    };
    call.check()?;
    // SAFETY: checked; the caller vouches for the addresses, and slots of a step differ.
    run(py, call.estimated_ns(), || unsafe { call.run() });
    Ok(())
}

/// # Safety
/// The table is readable and unchanged for as long as the result is used.
pub(super) unsafe fn angle_table<'a>(
    name: &str,
    tensor: Tensor<2>,
) -> Result<AngleTable<'a>, InvalidArgument> {
    let (address, [num_positions, rot], [row_stride, stride]) = tensor;
    check_dense(name, rot, stride)?;
    if num_positions > 1 && row_stride != rot {
        return Err(InvalidArgument::new(
            format!("row stride of {name}"),
            row_stride,
            format!("{rot} (dense)"),
        ));
    }
    // SAFETY: passed on.
    let values = unsafe { numbers(name, (address, num_positions * rot))? };
    Ok(AngleTable { values, rot })
}

/// Address, number of blocks, bytes from a block to the next.
type Blocks = (usize, usize, usize);

fn blocks(caches: Vec<Blocks>, block_bytes: usize) -> Result<Vec<BlocksView>, InvalidArgument> {
    let view = |(address, num_blocks, block_stride_bytes)| -> Result<BlocksView, InvalidArgument> {
        let address = pointer("cache", address, 1, false)?;
        Ok(BlocksView {
            address,
            num_blocks,
            block_stride_bytes,
            block_bytes,
        })
    };
    caches.into_iter().map(view).collect()
}

/// # Safety
/// As `numbers`.
unsafe fn block_pairs<'a>(copies: Indices) -> Result<&'a [[i32; 2]], InvalidArgument> {
    // SAFETY: passed on.
    let words: &[i32] = unsafe { numbers("copies", copies)? };
    let (pairs, []) = words.as_chunks::<2>() else {
        return Err(InvalidArgument::new(
            "length of copies",
            words.len(),
            "an even number",
        ));
    };
    Ok(pairs)
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
pub(super) fn swap_blocks(
    py: Python<'_>,
    sources: Vec<Blocks>,
    destinations: Vec<Blocks>,
    block_bytes: usize,
    copies: Indices,
) -> PyResult<()> {
    let (sources, destinations) = (blocks(sources, block_bytes)?, blocks(destinations, block_bytes)?);
    if sources.len() != destinations.len() {
        let allowed = format!("{}, one for each source", sources.len());
        return Err(InvalidArgument::new("number of destinations", destinations.len(), allowed).into());
    }
    // SAFETY: the caller keeps the pairs alive and unchanged during the call.
    let pairs = unsafe { block_pairs(copies)? };
    copy::check(&sources, &destinations, pairs)?;
    let estimated_ns = copy::estimated_ns(&sources, pairs);
    let mut caches: Vec<_> = sources.into_iter().zip(destinations).map(Into::into).collect();
    // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to the caches.
    run(py, estimated_ns, || unsafe {
        copy::swap_blocks(&mut caches, pairs);
    });
    Ok(())
}

/// See `_core.pyi`. The caller vouches for the addresses.
#[pyfunction]
pub(super) fn copy_blocks(
    py: Python<'_>,
    caches: Vec<Blocks>,
    block_bytes: usize,
    copies: Indices,
) -> PyResult<()> {
    let caches = blocks(caches, block_bytes)?;
    // SAFETY: the caller keeps the arena of the step alive and unchanged during the call.
    let pairs = unsafe { block_pairs(copies)? };
    copy::check(&caches, &caches, pairs)?;
    // SAFETY: checked; the caller vouches for the addresses and for the exclusive access to the caches.
    run(py, copy::estimated_ns(&caches, pairs), || unsafe {
        copy::copy_blocks(&caches, pairs);
    });
    Ok(())
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn set_num_threads(num_threads: usize) -> PyResult<()> {
    Ok(pool::set_num_threads(num_threads)?)
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn num_threads() -> usize {
    pool::num_threads()
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn cpu_features() -> Vec<&'static str> {
    isa::cpu_features()
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn cpu_isa() -> &'static str {
    Level::current().name()
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn set_cpu_isa(name: &str) -> PyResult<()> {
    Ok(Level::choose(name)?)
}

/// See `_core.pyi`.
#[pyfunction]
pub(super) fn cpu_ceilings(py: Python<'_>) -> HashMap<&'static str, f64> {
    py.detach(peak::measure).into_iter().collect()
}
