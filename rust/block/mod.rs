//! Blocks of the KV cache: who holds them, which can be found again, which may be taken.
//!
//! The scheduler is the only caller, from one thread, through `&mut`: nothing here is atomic or locked. The
//! module knows block ids and token ids and never touches a tensor.
//!
//! # Life of a block
//!
//! ```text
//!                allocate                    publish (the step that filled it was committed)
//!   +------+ ---------------> +-------+ -----------------------------+
//!   | free |                  | owned | <----------------------------+   owned, published or not
//!   +------+ <--------------- +-------+ ------------------+
//!    ^    ^   last release,    ^     |                    | last release while it is
//!    |    |   unpublished      |     | last release,      | leased
//!    |    |                    |     | published          v
//!    |    |              share |     |               +--------+
//!    |    |                    |     v               | fenced |  share: back to owned
//!    |    |   evict           +------+  published    +--------+
//!    |    +------------------ | idle | <---------------+  |
//!    |                        +------+     end_step       | end_step, unpublished
//!    +----------------------------------------------------+
//! ```
//!
//! A copy of another thread makes an idle block fenced as well, and ends with `end_copy` instead of `end_step`.
//!
//! A block is in exactly one state, and the state follows from three facts about it: how many tables hold it,
//! how many copy leases it has, and whether it is published. Only `free` and `idle` blocks can be allocated.
//!
//! # Rules
//!
//! - Where a step is built while another one is in flight, each has its leases: of what its copies read, and of blocks that
//!   were exchanged for equal ones while it reads them. [`BlockPool::end_step`] drops those of the older one.
//! - A block held by two tables, or published, is never written: [`BlockTable::reserve`] copies it first. A
//!   lease of the step does not stop a write, because all copies of a step run before its first write; it stops
//!   the block from becoming the destination of another copy of the same step. One of another thread's copy stops
//!   the write as well.
//! - Tables that hold a block hold the same blocks before it. So a published child has a published parent, a
//!   parent is held wherever its child is, and releasing a table tail first makes children idle before their
//!   parents, and evicts them before.
//! - A block is found by its tokens and its parent, compared in full; the hash only says where to look.
//! - Whatever can fail for want of blocks is decided before anything changes.

mod chain;
mod check;
mod config;
mod eviction;
mod flat;
mod ghost;
mod hash;
mod idle;
mod lease;
mod memory;
mod node;
mod pool;
mod prefix;
mod publish;
mod root;
mod share;
mod siblings;
mod table;
mod tier;
mod turn;

pub use config::{Eviction, PoolConfig};
pub use ghost::{Evicted, Removal};
pub use hash::BlockHasher;
pub use pool::{BlockPool, BlockState};
pub use prefix::{Parent, PrefixHit};
pub use publish::Closest;
pub use root::{Namespace, RootId};
pub use share::{MAX_SHARES, Share, ShareCounts, WEIGHT_ONE, find_share};
pub use table::{BlockTable, OutOfBlocks};
pub use tier::{HostLease, HostPool};
