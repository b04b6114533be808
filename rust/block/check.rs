//! The invariants of the pool, checked in O(pool): after every operation in tests, and on demand in a running
//! engine.

use super::node::Node;
use super::pool::{BlockPool, BlockState};
use super::prefix::Parent;
use crate::ids::BlockId;

impl BlockPool {
    /// Checks every invariant of the pool and the prefix index.
    ///
    /// # Errors
    /// Says which invariant is broken, and for which block.
    pub fn check(&self) -> Result<(), String> {
        if self.index.nodes[0] != Node::default() {
            return Err("the null block is in use".to_owned());
        }
        self.idle.check(&self.index.nodes)?;
        self.index.check()?;
        let published = self.index.nodes.iter().filter(|node| node.is_published());
        self.shares.check(published.map(|node| node.share))?;
        self.check_lists()?;
        self.check_counts()?;
        self.check_idle_order()
    }

    /// Every block is on the list of its state, once.
    fn check_lists(&self) -> Result<(), String> {
        let mut on_free = vec![false; self.index.nodes.len()];
        for block in &self.free {
            if std::mem::replace(&mut on_free[block.index()], true) {
                return Err(format!("block {} is free twice", block.0));
            }
        }
        let mut on_leased = vec![false; self.index.nodes.len()];
        for block in self.leased.iter().flatten().chain(self.lent.keys()) {
            on_leased[block.index()] = true;
        }
        for block in (1..=self.num_blocks()).map(BlockId) {
            let state = self.state(block);
            if (state == BlockState::Free) != on_free[block.index()] {
                return Err(format!(
                    "block {} is {state:?}; on the free list: {}",
                    block.0,
                    on_free[block.index()]
                ));
            }
            let node = &self.index.nodes[block.index()];
            if (state == BlockState::Idle) != node.is_idle() {
                return Err(format!(
                    "block {} is {state:?}; on the idle list: {}",
                    block.0,
                    node.is_idle()
                ));
            }
            if node.holders.is_leased() != on_leased[block.index()] {
                return Err(format!("block {} and the lease list disagree", block.0));
            }
        }
        Ok(())
    }

    /// The counts agree with the states, and add up to the pool.
    fn check_counts(&self) -> Result<(), String> {
        let mut counted = [0; 4];
        for block in (1..=self.num_blocks()).map(BlockId) {
            counted[self.state(block) as usize] += 1;
        }
        let reported = [
            self.num_free(),
            self.num_owned(),
            self.num_idle(),
            self.num_fenced(),
        ];
        if counted != reported || reported.iter().sum::<u32>() != self.num_blocks() {
            return Err(format!(
                "free, owned, idle, fenced are {counted:?} but reported as {reported:?}"
            ));
        }
        if !self.prefix_caching() && self.num_published() > 0 {
            return Err("blocks are published without prefix caching".to_owned());
        }
        Ok(())
    }

    /// A published block is evicted before its parent, and a parent is held while a table holds its child.
    fn check_idle_order(&self) -> Result<(), String> {
        let mut rank = vec![usize::MAX; self.index.nodes.len()];
        for (i, block) in self.idle_blocks().enumerate() {
            rank[block.index()] = i;
        }
        for block in (1..=self.num_blocks()).map(BlockId) {
            let Some(Parent::Block(parent)) = self.parent(block) else {
                continue;
            };
            let num_turns = |block: BlockId| self.index.nodes[block.index()].num_turns;
            if num_turns(block) > num_turns(parent) {
                return Err(format!(
                    "block {} came back more often than its parent {}",
                    block.0, parent.0
                ));
            }
            let parent_rank = rank[parent.index()];
            match self.state(block) {
                BlockState::Owned if self.num_tables(parent) == 0 => {
                    return Err(format!(
                        "a table holds block {} but none holds its parent {}",
                        block.0, parent.0
                    ));
                }
                BlockState::Idle if parent_rank < rank[block.index()] => {
                    return Err(format!(
                        "block {} would be evicted after its parent {}",
                        block.0, parent.0
                    ));
                }
                _ => {}
            }
        }
        Ok(())
    }
}
