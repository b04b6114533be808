//! Which idle block is taken, and what happens to a block that nobody holds any more.
//!
//! A block is never evicted before its children. They went idle no later than it did and have not come back
//! more often, so by the rule of [`super::turn`] they are at least as old in scaled age; and among equals the
//! lower class goes first, and within a class the block that went idle first. Parent and child belong to one
//! share, whose weight and floor count for both.

use super::ghost::{Evicted, Removal};
use super::node::{Holders, Node};
use super::pool::{BlockPool, BlockState};
use super::prefix::Parent;
use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

impl BlockPool {
    /// The idle blocks in the order in which they would be evicted if no time passed.
    pub fn idle_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let num_lists = self.idle.num_lists();
        let mut lists: Vec<_> = (0..num_lists)
            .map(|list| self.idle.iter(&self.index.nodes, list).peekable())
            .collect();
        let counts = self.shares.counts.iter();
        let mut num_published: Vec<u32> = counts.map(|counts| counts.num_published).collect();
        std::iter::from_fn(move || {
            let node = |block: &BlockId| &self.index.nodes[block.index()];
            let fronts: Vec<Option<&Node>> = lists.iter_mut().map(|list| list.peek().map(node)).collect();
            let (fronts, _) = fronts.as_chunks::<NUM_CLASSES>();
            let list = self.oldest_list(
                |share| {
                    (0..)
                        .zip(fronts[share])
                        .filter_map(|(class, front)| Some((class, front?)))
                },
                |share| num_published[share],
            )?;
            let share = list / NUM_CLASSES;
            num_published[share] = num_published[share].saturating_sub(1);
            lists[list].next()
        })
    }

    /// The list whose first block is evicted, `fronts` being the classes and first blocks of the lists of a share that are
    /// not empty: of shares above their floors if there is any, the one of greatest age by the weights of class and share.
    #[inline]
    fn oldest_list<'a, I: Iterator<Item = (usize, &'a Node)>>(
        &self,
        fronts: impl Fn(usize) -> I,
        num_published: impl Fn(usize) -> u32,
    ) -> Option<usize> {
        let mut oldest = None;
        for share in 0..self.shares.len() {
            let is_above = self.shares.is_above_floor(share, num_published(share));
            let weight = self.shares.weight(share);
            for (class, node) in fronts(share) {
                let scaled = self.turns.scaled(class, self.age(node));
                let rank = (is_above, scaled.saturating_mul(weight));
                if oldest.is_none_or(|(best, _)| rank > best) {
                    oldest = Some((rank, share * NUM_CLASSES + class));
                }
            }
        }
        oldest.map(|(_, list)| list)
    }

    /// Allocations since a block went idle.
    #[inline]
    fn age(&self, node: &Node) -> u64 {
        self.num_allocations - node.link.since
    }

    /// Takes the idle block to evict off its list and out of the index.
    #[inline(never)]
    pub(super) fn evict(&mut self) -> Option<BlockId> {
        let nodes = &self.index.nodes;
        let list = self.oldest_list(
            |share| self.idle.fronts(nodes, share),
            |share| self.shares.counts[share].num_published,
        )?;
        let block = self.idle.front(nodes, list)?;
        self.fetch_ahead(block);
        let node = &self.index.nodes[block.index()];
        let scaled = self.turns.scaled(list % NUM_CLASSES, self.age(node));
        let evicted = Evicted {
            at_ms: self.now_ms,
            reason: Removal::Capacity,
        };
        self.index.table.leave_ghost(node.hash, evicted);
        if node.first_child != 0 {
            self.unpublish_below(block);
        }
        self.unpublish(block);
        self.idle.remove(&mut self.index.nodes, block);
        self.turns.evicted(list % NUM_CLASSES, scaled);
        self.num_evictions += 1;
        self.shares.counts[list / NUM_CLASSES].num_evictions += 1;
        Some(block)
    }

    /// Fetches what the next evictions will touch, which in a large pool is in no cache: the node of a block that is
    /// some way off, and of one that is nearer, whose node is there by now, its slot of the hash table and its
    /// neighbours in the index.
    #[inline]
    fn fetch_ahead(&mut self, block: BlockId) {
        let (far, near) = self.idle.look_ahead(&self.index.nodes, block);
        self.index.prefetch_node(far);
        self.index.prefetch_removal(near);
    }

    /// Takes what follows an idle block out of the index. Children that are idle are evicted before their parents,
    /// and those that a table holds keep their parents from being idle: what is left are fenced ones. They lose their
    /// publication, and become free when the step ends.
    fn unpublish_below(&mut self, block: BlockId) {
        let mut node = block;
        loop {
            if let Some(child) = self.index.first_child(Parent::Block(node)) {
                node = child;
                continue;
            }
            if node == block {
                return;
            }
            assert!(
                self.state(node) == BlockState::Fenced,
                "evicting a parent of block {}",
                node.0
            );
            let parent = self.index.nodes[node.index()].parent;
            self.unpublish(node);
            node = BlockId(parent);
        }
    }

    /// Puts a published block that nobody holds any more on the list of its class. What a longer block begins
    /// with needs no block of its own.
    #[inline(never)]
    pub(super) fn retire(&mut self, block: BlockId) {
        if self.index.is_partial(block) && self.index.is_extended(block) {
            self.unpublish(block);
            self.free.push(block);
            return;
        }
        self.park(block);
    }

    /// Puts a block on the list of its class.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a release, where a call costs half as much as the work"
    )]
    #[inline(always)]
    pub(super) fn park(&mut self, block: BlockId) {
        let node = &self.index.nodes[block.index()];
        let list = node.idle_list(node.num_turns);
        self.idle
            .push_back(&mut self.index.nodes, block, list, self.num_allocations);
    }

    /// Takes a table from the holders of the last blocks of a chain, from its end on, and puts those that become idle
    /// before all that are on the list of class 0.
    ///
    /// This holds up to the first block that somebody else has used: one that another table holds, that a request came
    /// back to, or from which another sequence went on, so that it must not be evicted before that.
    pub(super) fn release_first_out(&mut self, blocks: impl Iterator<Item = BlockId>) {
        // All of them are of one share. Whatever was at its front stays behind them.
        let mut front = None;
        let mut last = None;
        let mut is_own = true;
        for block in blocks {
            if !self.is_published(block) {
                self.release(block);
                continue;
            }
            is_own &= self.is_used_by_one(block, last);
            if !is_own {
                self.release(block);
                continue;
            }
            let nodes = &mut self.index.nodes;
            let node = &mut nodes[block.index()];
            let list = node.idle_list(0);
            node.holders.remove_table();
            match *front.get_or_insert_with(|| self.idle.front(nodes, list)) {
                Some(front) => self.idle.insert_before(nodes, block, front),
                None => self.idle.push_back(nodes, block, list, self.num_allocations),
            }
            last = Some(block);
        }
    }

    /// Whether nobody but the table that holds a published block has a use for it. `next`: its child that is known to
    /// be of no other use.
    fn is_used_by_one(&self, block: BlockId, next: Option<BlockId>) -> bool {
        let node = &self.index.nodes[block.index()];
        let is_last = match self.index.first_child(Parent::Block(block)) {
            None => !(self.index.is_partial(block) && self.index.is_extended(block)),
            Some(child) => next == Some(child) && self.index.is_only_child(child),
        };
        is_last && node.holders == Holders::ONE_TABLE && node.num_turns == 0
    }

    /// Puts a block whose leases were dropped on the list that its state asks for, if it is on none.
    pub(super) fn settle(&mut self, block: BlockId) {
        let node = &self.index.nodes[block.index()];
        if node.is_held() || node.is_idle() {
            return;
        }
        if !self.is_published(block) {
            self.free.push(block);
            return;
        }
        if self.index.is_partial(block) && self.index.is_extended(block) {
            self.retire(block);
            return;
        }
        // Its parents may have become idle while it was fenced. It must be evicted before them, and so it takes the
        // place, age and class of the nearest one; of a fenced chain, the first one goes first. Parents that a copy
        // of another thread still reads take the class, and their place when they come back.
        let mut chain = vec![block];
        let mut above = self.parent(block);
        while let Some(Parent::Block(parent)) = above
            && self.num_tables(parent) == 0
            && !self.index.nodes[parent.index()].is_idle()
        {
            chain.push(parent);
            above = self.parent(parent);
        }
        let mut nearest = match above {
            Some(Parent::Block(parent)) if self.index.nodes[parent.index()].is_idle() => Some(parent),
            _ => None,
        };
        for &block in chain.iter().rev() {
            if let Some(parent) = nearest {
                let num_turns = self.index.nodes[parent.index()].num_turns;
                self.index.nodes[block.index()].num_turns = num_turns;
            }
            if self.is_held(block) {
                continue;
            }
            match nearest {
                Some(parent) => self.idle.insert_before(&mut self.index.nodes, block, parent),
                None => self.retire(block),
            }
            nearest = Some(block);
        }
    }
}
