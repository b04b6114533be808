//! One binary for every test of the Rust core that is not a unit test.

mod block;
mod scheduler;
mod simulator;
