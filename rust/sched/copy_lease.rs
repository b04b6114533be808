//! Blocks lent to a copy that another thread makes, such as one to a tier below the device, and how they come back.
//!
//! The owner lends and counts; the other thread only gives back, by a push to a chain that the owner takes whole
//! before it builds a step. Until then nobody can be given a block that is lent.

use std::sync::Arc;

use crate::ids::BlockId;

use super::edge::Shared;
use super::scheduler::Scheduler;

/// The right to read some blocks, from any thread and over any number of steps. What they hold does not change
/// meanwhile, whatever becomes of the sequences that hold them. Dropped, it gives the blocks back, also by a thread
/// that panics.
#[must_use = "the blocks come back at once if nobody keeps the lease"]
pub struct CopyLease {
    blocks: Vec<BlockId>,
    shared: Arc<Shared>,
}

impl CopyLease {
    /// The blocks that may be read.
    pub fn blocks(&self) -> &[BlockId] {
        &self.blocks
    }
}

impl Drop for CopyLease {
    fn drop(&mut self) {
        self.shared.returned.push(std::mem::take(&mut self.blocks));
        self.shared.parker.unpark();
    }
}

impl Scheduler {
    /// Lends blocks to a copy of another thread. A block may be lent several times.
    ///
    /// # Panics
    /// If a block is free, or not full and published while a step is in flight, which may write to it.
    pub fn lease_for_copy(&mut self, blocks: Vec<BlockId>) -> CopyLease {
        let is_full = |&block: &BlockId| {
            let tokens = self.pool.published_tokens(block);
            tokens.is_some_and(|tokens| tokens.len() == self.config.block_size as usize)
        };
        assert!(
            self.steps.is_empty() || blocks.iter().all(is_full),
            "blocks were lent while a step writes"
        );
        self.pool.lease_for_copy(&blocks);
        CopyLease {
            blocks,
            shared: Arc::clone(&self.edge.shared),
        }
    }

    /// Takes back what copies of other threads are done with.
    pub(super) fn take_returned(&mut self) {
        for blocks in self.edge.shared.returned.take_all() {
            self.pool.end_copy(&blocks);
        }
    }
}
