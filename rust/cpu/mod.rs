//! Kernels for tensors in ordinary memory: products with packed weights, attention over the paged cache, rotation and
//! cache write, block copies, norms, activation, sampling.
//!
//! The callers are the bindings (`rust/python`), which hand tensors over as address, shape and strides. The
//! kernels know nothing of Python, of the block pool or of the scheduler: they read block tables as plain integers.
//!
//! | file | owns |
//! |---|---|
//! | `element` | the element types of tensors, and rows of them to and from f32 |
//! | `tensor` | views: an address with a shape, strides and an element type |
//! | `batch` | the block tables of one step, checked once before a kernel trusts them |
//! | `isa`, `x86` | vectors of sixteen f32 in three instruction sets, and the choice among them |
//! | `level` | which of them a process uses |
//! | `linear` | products with packed weights; a directory with a table of its own |
//! | `plan` | how the attention of a step is cut into pieces, once for all layers; who shares what |
//! | `attention` | the pieces of a layer on threads |
//! | `tile`, `tile_loops`, `tile_direct` | the arithmetic of one piece in f32, and its inner loops for many and for few rows |
//! | `tile_amx`, `prompt_amx` | the same in bf16 on matrix tiles |
//! | `few_rows` | their bits on vectors, for decodes, which wait for memory |
//! | `keys_amx`, `values_amx`, `softmax_amx`, `amx` | what lies around their products, and their instructions |
//! | `prefetch` | keys and values, and runs of bytes, asked for before their turn |
//! | `rope_cache`, `copy_blocks` | the two kernels that write the cache |
//! | `norm`, `activation` | the row-wise kernels between the linear layers |
//! | `decoder`, `layer` | a forward pass, and a layer of it: the kernels one after another, and what they hand on |
//! | `sample`, `cut`, `noise` | sampling, where a filter cuts the ranking, and the arithmetic that all backends share |
//! | `logprobs` | log probabilities of chosen and of most likely tokens |
//! | `pool` | the threads |
//! | `peak` | what the processor could do at most |
//!
//! Results depend on the arguments and on the instruction set, and on nothing else: not on the number of threads, nor
//! on what else is in the batch, nor on how a prompt was cut into chunks. `tile` says how.

#![cfg_attr(
    not(target_arch = "x86_64"),
    expect(
        dead_code,
        unreachable_pub,
        unused_variables,
        reason = "what matrix tiles alone need has nobody to need it where there are none"
    )
)]

pub mod activation;
mod amx;
pub mod attention;
pub mod batch;
pub mod copy_blocks;
mod cut;
pub mod decoder;
pub mod element;
#[cfg(target_arch = "x86_64")]
mod few_rows;
pub mod isa;
#[cfg(target_arch = "x86_64")]
mod keys_amx;
pub mod layer;
pub mod level;
pub mod linear;
pub mod logprobs;
mod noise;
pub mod norm;
pub mod peak;
pub mod plan;
pub mod pool;
mod prefetch;
#[cfg(target_arch = "x86_64")]
mod prompt_amx;
pub mod rope_cache;
pub mod sample;
#[cfg(target_arch = "x86_64")]
mod softmax_amx;
pub mod tensor;
mod tile;
#[cfg(target_arch = "x86_64")]
mod tile_amx;
mod tile_direct;
mod tile_loops;
#[cfg(target_arch = "x86_64")]
mod values_amx;
#[cfg(target_arch = "x86_64")]
mod x86;

use std::fmt;

/// An argument that a kernel refuses.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct InvalidArgument {
    /// Name of the argument, with an index where it is an array.
    pub field: String,
    /// What was given.
    pub value: String,
    /// What would have been accepted.
    pub allowed: String,
}

impl InvalidArgument {
    /// Builds the error from anything that can be shown.
    pub fn new(field: impl Into<String>, value: impl fmt::Display, allowed: impl Into<String>) -> Self {
        Self {
            field: field.into(),
            value: value.to_string(),
            allowed: allowed.into(),
        }
    }
}

impl fmt::Display for InvalidArgument {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is {}, allowed: {}", self.field, self.value, self.allowed)
    }
}

impl std::error::Error for InvalidArgument {}
