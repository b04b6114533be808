//! One binary for every test of the Rust core that is not a unit test.

#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    clippy::cast_precision_loss,
    clippy::cast_sign_loss,
    clippy::too_many_lines,
    clippy::many_single_char_names,
    reason = "a test that panics has said what it has to say, and its numbers are small"
)]

mod beams;
mod block;
mod cache_control;
mod cache_priority;
mod copy_leases;
mod cpu_kernels;
mod cpu_linear;
mod edge_stress;
mod events;
mod explain;
mod holds;
mod holds_random;
mod liveness;
mod overlap;
mod samples;
mod scheduler;
mod scheduler_partial;
mod scheduler_policy;
mod scheduler_random;
mod simulator;
mod sync_stress;
