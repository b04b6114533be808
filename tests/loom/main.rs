//! Models of `rust/sync`: loom runs each on every interleaving, and every value that the memory model lets a
//! load return, within a bound on the number of preemptions. Capacities are 1 or 2 and threads 2 or 3, which
//! suffices to reach every state of a slot; `broken.rs` shows that the models fail when they should.
//!
//! A trap when writing models: loom tries a different order of two accesses only if the later one conflicts
//! with the *latest* earlier access of that atomic. A thread that loads and then exchanges hides the load of
//! a thread before it behind its own; a model in which the reader comes first may then run once and prove
//! nothing. So where it matters writers go first, on the main thread, and readers are spawned. A new model is
//! worth trusting once it has failed with an ordering weakened: so far each release and acquire in
//! `rust/sync`, but those in destructors and `is_empty`, has been relaxed in turn, and a model failed.
//!
//! ```text
//! CARGO_TARGET_DIR=target-loom RUSTFLAGS="--cfg pagedkv_loom" cargo test --release --test loom
//! ```
//!
//! The names of races refer to `rust/sync/README.md`.
#![cfg(pagedkv_loom)]
#![expect(
    clippy::unwrap_used,
    reason = "a model that fails shall panic, in its helpers too"
)]

mod board;
mod broken;
mod chain;
mod flags;
mod inbox;
mod parker;
mod ring;
mod snapshot;

/// Runs a model with at most three preemptions, or as many as `LOOM_MAX_PREEMPTIONS` says.
fn check(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(3));
    builder.check(model);
}
