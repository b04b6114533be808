//! One binary for every test of the Rust core that is not a unit test.

mod sync_stress;
