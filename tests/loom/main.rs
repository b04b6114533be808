//! Models of `rust/sync`: loom runs each on every interleaving, and every value that the memory model lets a load return,
//! within a bound on the number of preemptions. Capacities are 1 to 4 and threads 2 or 3, which suffices to reach every state
//! of a slot; `broken.rs` shows that the models fail when they should.
//!
//! ```text
//! CARGO_TARGET_DIR=target-loom RUSTFLAGS="--cfg pagedkv_loom" cargo test --release --test loom
//! ```
//!
//! The names of races refer to `rust/sync/README.md`.
#![cfg(pagedkv_loom)]

mod broken;
mod chain;
mod flags;
mod inbox;
mod parker;
mod snapshot;

/// Runs a model with at most three preemptions, or as many as `LOOM_MAX_PREEMPTIONS` says.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
