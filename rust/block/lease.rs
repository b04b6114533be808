//! Blocks that copies read: what keeps them from being reused, and when they come free.
//!
//! The copies of a step run before its first write and are over when it ends. A copy of another thread, such as one
//! to a tier below, may take any number of steps; the scheduler hears from that thread when it is done.

use super::pool::{BlockPool, count};
use crate::ids::BlockId;

impl BlockPool {
    /// Blocks that only copies hold.
    pub fn num_fenced(&self) -> u32 {
        let in_step = self.leased.iter().enumerate();
        let in_step = in_step
            .filter(|&(at, block)| !self.leased[..at].contains(block) && !self.lent.contains_key(block))
            .map(|(_, block)| block);
        let fenced = in_step
            .chain(self.lent.keys())
            .filter(|block| self.index.nodes[block.index()].num_tables == 0);
        count(fenced.count())
    }

    /// Copies of the step in flight that read a block.
    pub fn num_leases(&self, block: BlockId) -> u32 {
        count(self.leased.iter().filter(|&&leased| leased == block).count())
    }

    /// Keeps a held block from being reused until [`Self::end_step`], because a copy of the step reads it.
    ///
    /// # Panics
    /// If nobody holds the block.
    pub fn lease(&mut self, block: BlockId) {
        let node = &mut self.index.nodes[block.index()];
        assert!(node.is_held(), "block {} was leased but nobody holds it", block.0);
        node.is_leased = true;
        self.leased.push(block);
    }

    /// Drops the leases of the step: its copies have been made.
    pub fn end_step(&mut self) {
        let mut leased = std::mem::take(&mut self.leased);
        let nodes = &mut self.index.nodes;
        leased.retain(|block| {
            let is_lent = self.lent.contains_key(block);
            std::mem::replace(&mut nodes[block.index()].is_leased, is_lent) && !is_lent
        });
        for block in leased.drain(..) {
            self.settle(block);
        }
        self.leased = leased;
    }

    /// Copies of other threads that read a block.
    pub fn num_lent(&self, block: BlockId) -> u32 {
        self.lent.get(&block).copied().unwrap_or(0)
    }

    /// Keeps blocks from being written or reused until [`Self::end_copy`] gets the same ones, because a copy of
    /// another thread reads them. Idle ones are fenced meanwhile, and come back as the youngest of their class.
    ///
    /// # Panics
    /// If a block is free.
    pub fn lease_for_copy(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            let node = &mut self.index.nodes[block.index()];
            let was_held = node.is_held();
            assert!(
                was_held || node.parent != 0,
                "block {} was lent but is free",
                block.0
            );
            node.is_leased = true;
            if !was_held {
                self.idle.remove(&mut self.index.nodes, block);
            }
            *self.lent.entry(block).or_default() += 1;
        }
    }

    /// Takes blocks back from a copy of another thread.
    ///
    /// # Panics
    /// If no copy reads one of them.
    pub fn end_copy(&mut self, blocks: &[BlockId]) {
        let mut returned = Vec::with_capacity(blocks.len());
        for &block in blocks {
            let num_lent = self.lent.get_mut(&block);
            let num_lent = num_lent.unwrap_or_else(|| panic!("block {} came back but was not lent", block.0));
            *num_lent -= 1;
            if *num_lent == 0 {
                self.lent.remove(&block);
                self.index.nodes[block.index()].is_leased = self.leased.contains(&block);
                returned.push(block);
            }
        }
        for block in returned {
            self.settle(block);
        }
    }
}
