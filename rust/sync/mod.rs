//! What threads share, and nothing else: the only home of atomics.
//!
//! One thread, the owner, holds the whole cache state by plain `&mut`. Every other thread reaches it through
//! the structures of this module, none of which ever makes the owner wait for a stalled peer:
//!
//! | structure | writers | reader | carries |
//! |---|---|---|---|
//! | [`inbox()`] | any thread | owner | submissions, bounded, in order |
//! | [`PushChain`] | any thread | owner | blocks handed back by copy threads, ends at stop strings, unbounded |
//! | [`RequestFlags`] | any thread | owner | request ids, and the wish to abort one |
//! | [`Parker`] | any thread | owner | the wake-up of an idle owner |
//! | [`ring()`] | owner | one thread | what happened in a step, bounded, in order |
//! | [`StatsCell`] | owner | any thread | counters, as one consistent snapshot |
//! | [`Board`] | owner of a thread pool | its workers | the pieces of a job |
//! | [`Heartbeat`] | owner | any thread | when it last showed that it goes on |
//!
//! The order of use is always the same: publish first (push, raise a flag), [`Parker::unpark`] second. The
//! owner drains first and parks second. `README.md` beside this file tells the protocols in prose and names
//! the races they exclude; `tests/loom` checks each of them on every interleaving within its bounds.
//!
//! Atomics come from `primitive`, which is std or, under `cfg(pagedkv_loom)`, the loom model checker.

mod board;
mod chain;
mod flags;
mod heartbeat;
mod inbox;
mod parker;
mod primitive;
mod ring;
mod snapshot;
mod stats;

pub use board::Board;
pub use chain::{PushChain, Taken};
pub use flags::RequestFlags;
pub use heartbeat::Heartbeat;
pub use inbox::{Receiver, Sender, inbox};
pub use parker::Parker;
pub use ring::{Consumer, Producer, ring};
pub use snapshot::SnapshotCell;
pub use stats::{Stats, StatsCell};
