//! Blocks that copies read: what keeps them from being reused, and when they come free.
//!
//! The copies of a step run before its first write and are over when it ends. Where a step is built while another one
//! is computed, each has leases of its own. A copy of another thread, such as one to a tier below, may take any number
//! of steps; the scheduler hears from that thread when it is done.

use super::pool::{BlockPool, count};
use crate::ids::BlockId;

impl BlockPool {
    /// Blocks that only copies hold.
    pub fn num_fenced(&self) -> u32 {
        let lent = self.lent.keys();
        let fenced = lent.filter(|block| self.num_tables(**block) == 0);
        self.num_fenced_by_steps() + count(fenced.count())
    }

    /// Of those, blocks that become free or idle when the steps under way have ended.
    pub fn num_fenced_by_steps(&self) -> u32 {
        let leased = self.leased.iter().flatten().copied();
        let mut fenced: Vec<BlockId> = leased
            .filter(|&block| self.num_tables(block) == 0 && !self.lent.contains_key(&block))
            .collect();
        // A block counts once, however many copies read it.
        fenced.sort_unstable();
        fenced.dedup();
        count(fenced.len())
    }

    /// Leases of a block by the steps under way.
    pub fn num_leases(&self, block: BlockId) -> u32 {
        count(
            self.leased
                .iter()
                .flatten()
                .filter(|&&leased| leased == block)
                .count(),
        )
    }

    /// Begins another step before the last one has ended: leases are its own from now on.
    pub fn begin_step(&mut self) {
        self.leased.push(Vec::new());
    }

    /// Keeps a held block from being reused until the step that began last has ended, because it reads the block.
    ///
    /// # Panics
    /// If nobody holds the block.
    pub fn lease(&mut self, block: BlockId) {
        let node = &mut self.index.nodes[block.index()];
        assert!(node.is_held(), "block {} was leased but nobody holds it", block.0);
        node.holders.set_leased(true);
        let newest = self
            .leased
            .last_mut()
            .expect("there is always a step that leases belong to");
        newest.push(block);
    }

    /// Drops the leases of the oldest step: its copies have been made.
    pub fn end_step(&mut self) {
        // There is always a step that leases belong to.
        if self.leased.len() > 1 {
            let leased = self.leased.remove(0);
            self.drop_leases(leased);
        } else {
            let leased = std::mem::take(&mut self.leased[0]);
            self.leased[0] = self.drop_leases(leased);
        }
    }

    /// Drops the leases of the step that began last, which came to nothing.
    pub fn cancel_step(&mut self) {
        if self.leased.len() > 1
            && let Some(leased) = self.leased.pop()
        {
            self.drop_leases(leased);
        } else {
            self.end_step();
        }
    }

    /// Settles the blocks whose last lease is among these. Returns the vector, empty.
    fn drop_leases(&mut self, mut leased: Vec<BlockId>) -> Vec<BlockId> {
        let nodes = &mut self.index.nodes;
        // Each block once, however often it was leased.
        leased.retain(|block| nodes[block.index()].holders.set_leased(false));
        for block in self.leased.iter().flatten() {
            nodes[block.index()].holders.set_leased(true);
        }
        leased.retain(|block| {
            let holders = &mut nodes[block.index()].holders;
            let is_leased = holders.is_leased() || self.lent.contains_key(block);
            holders.set_leased(is_leased);
            !is_leased
        });
        for block in leased.drain(..) {
            self.settle(block);
        }
        leased
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
            node.holders.set_leased(true);
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
                let is_leased = self.num_leases(block) > 0;
                self.index.nodes[block.index()].holders.set_leased(is_leased);
                returned.push(block);
            }
        }
        for block in returned {
            self.settle(block);
        }
    }
}
