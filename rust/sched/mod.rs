//! Continuous batching over the paged cache: which tokens are computed in the next step, and where their keys and
//! values go.
//!
//! One rule serves prompts, chunks, prefix hits, resumption and decoding: a sequence has `num_computed` tokens in the
//! cache and `num_tokens` tokens in all, and every step lets the first number chase the second under a token budget.
//! A step may be built while the one before it is computed: `num_scheduled` runs ahead of `num_computed` then, by one
//! token even of `num_tokens`; see `in_flight`.
//!
//! ```text
//!              admit                    last token, stop, length
//!  waiting ------------> running -----------------------------------> ended
//!     ^                     |                                           ^
//!     +------ preempt ------+        abort or finish, in any state -----+
//! ```
//!
//! [`Edge`] is what other threads hold; [`Scheduler`] belongs to the engine thread.

mod admission;
mod beam_group;
mod beam_rows;
mod beam_search;
mod budget;
mod check;
mod copy_lease;
mod decode;
mod edge;
mod ending;
mod events;
mod explain;
mod fairness;
mod held_blocks;
mod hold;
mod hold_key;
mod holding;
mod in_flight;
mod intake;
mod live;
mod lookup;
mod observe;
mod policy;
mod queues;
mod request;
mod room;
mod samples;
mod scheduler;
mod sequence;
mod slab;
mod step;
mod suspects;
mod swap;
mod token_ids;

pub use beam_rows::{BeamResult, BeamRows};
pub use beam_search::{BeamParams, EarlyStopping, Hypothesis};
pub use copy_lease::CopyLease;
pub use edge::{Edge, Prepared};
pub use events::{Event, EventReader};
pub use explain::{Explanation, Verdict};
pub use hold_key::{HoldKey, HoldKind, HoldView};
pub use holding::{HoldRequest, ResetCounts};
pub use lookup::{Lookup, Obstacle};
pub use observe::{SequenceView, TenantView};
pub use request::{CachePriority, FinishReason, Request, SamplingParams};
pub use scheduler::{Scheduler, VOID};
pub use step::{ARENA_VERSION, Section, StepHeader};
