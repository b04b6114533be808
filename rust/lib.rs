//! The core of pagedkv: every decision about memory and order.
//!
//! Dependencies point one way: `sync <- block <- sched <- python`. `cpu` holds kernels and knows of these only
//! `sync`, for its pool of threads; `memory`, `error` and `ids` know nobody.

pub mod block;
pub mod config;
pub mod cpu;
pub mod error;
pub mod ids;
mod memory;
#[cfg(feature = "python")]
mod python;
pub mod sched;
pub mod sync;
