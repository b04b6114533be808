//! Which idle block is taken, and what happens to a block that nobody holds any more.
//!
//! A block is never evicted before its children. They went idle no later than it did and have not come back
//! more often, so by the rule of [`super::turn`] they are at least as old in scaled age; and among equals the
//! lower class goes first, and within a class the block that went idle first. Parent and child belong to one
//! share, whose weight and floor count for both.

use super::config::Eviction;
use super::ghost::{Evicted, Removal};
use super::pool::{BlockPool, BlockState};
use super::prefix::Parent;
use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

/// The block to evict, the list that it is on, and its age by the weight of its class.
struct Oldest {
    block: BlockId,
    list: usize,
    scaled: u64,
}

impl BlockPool {
    /// The idle blocks in the order in which they would be evicted if no time passed.
    pub fn idle_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let num_lists = self.idle.num_lists();
        let mut lists: Vec<_> = (0..num_lists)
            .map(|list| self.idle.iter(list).peekable())
            .collect();
        let counts = self.shares.counts.iter();
        let mut num_published: Vec<u32> = counts.map(|counts| counts.num_published).collect();
        std::iter::from_fn(move || {
            let fronts: Vec<Option<BlockId>> = lists.iter_mut().map(|list| list.peek().copied()).collect();
            let oldest = self.oldest(|list| fronts[list], |share| num_published[share])?;
            let share = oldest.list / NUM_CLASSES;
            num_published[share] = num_published[share].saturating_sub(1);
            lists[oldest.list].next()
        })
    }

    /// The block to evict among the first ones of every list: of shares above their floors if there is any,
    /// the one of greatest age by the weights of class and share.
    #[inline]
    fn oldest(
        &self,
        front: impl Fn(usize) -> Option<BlockId>,
        num_published: impl Fn(usize) -> u32,
    ) -> Option<Oldest> {
        let mut oldest: Option<((bool, u64), Oldest)> = None;
        for share in 0..self.shares.len() {
            let is_above = self.shares.is_above_floor(share, num_published(share));
            for class in 0..NUM_CLASSES {
                let list = share * NUM_CLASSES + class;
                let Some(block) = front(list) else { continue };
                let scaled = self.turns.scaled(class, self.idle_age(block));
                let rank = (is_above, self.shares.weighted(share, scaled));
                if oldest.as_ref().is_none_or(|(other, _)| rank > *other) {
                    oldest = Some((rank, Oldest { block, list, scaled }));
                }
            }
        }
        oldest.map(|(_, oldest)| oldest)
    }

    /// Allocations since an idle block went idle.
    #[inline]
    fn idle_age(&self, block: BlockId) -> u64 {
        self.num_allocations - self.idle.since(block)
    }

    /// Takes the idle block to evict off its list and out of the index.
    #[inline(never)]
    pub(super) fn evict(&mut self) -> Option<BlockId> {
        let Oldest { block, list, scaled } = self.oldest(
            |list| self.idle.front(list),
            |share| self.shares.counts[share].num_published,
        )?;
        self.prefetch_after(block);
        let evicted = Evicted {
            at_ms: self.now_ms,
            reason: Removal::Capacity,
        };
        self.ghosts.add(self.hash(block), evicted);
        self.unpublish_tree(block);
        self.idle.remove(block);
        self.turns.evicted(list % NUM_CLASSES, scaled);
        self.num_evictions += 1;
        self.shares.counts[list / NUM_CLASSES].num_evictions += 1;
        Some(block)
    }

    /// Fetches what the next evictions will touch, which in a large pool is in no cache: the links and the node of
    /// a block that is some way off, and of one that is nearer, whose node is there by now, the neighbours in the
    /// index.
    #[inline]
    fn prefetch_after(&self, block: BlockId) {
        let (near, far) = self.idle.ahead(block);
        self.idle.prefetch(far);
        self.index.prefetch_node(far);
        self.index.prefetch_removal(near);
        self.ghosts.prefetch(self.hash(near));
    }

    /// Takes an idle block out of the index, and before it what follows it there. Children that are idle are
    /// evicted before their parents, and those that a table holds keep their parents from being idle: what is
    /// left are fenced ones. They lose their publication, and become free when the step ends.
    fn unpublish_tree(&mut self, block: BlockId) {
        let mut node = block;
        loop {
            if let Some(child) = self.index.first_child(Parent::Block(node)) {
                node = child;
                continue;
            }
            let parent = self.index.parent(node);
            assert!(
                node == block || self.state(node) == BlockState::Fenced,
                "evicting a parent of block {}",
                node.0
            );
            self.unpublish(node);
            match parent {
                Some(Parent::Block(parent)) if node != block => node = parent,
                _ => break,
            }
        }
    }

    /// Adds a table to the holders of a block of a hit. `is_turn`: a request came back to it.
    #[inline]
    pub(super) fn reuse(&mut self, block: BlockId, is_turn: bool) {
        let age = self.num_allocations - self.idle.since(block);
        let node = &mut self.index.nodes[block.index()];
        let class = usize::from(node.num_turns);
        if !node.is_held() {
            if is_turn {
                self.turns.hit(class, age);
            }
            self.idle.remove(block);
        }
        node.num_tables += 1;
        if is_turn && self.eviction == Eviction::Turn && class + 1 < NUM_CLASSES {
            node.num_turns += 1;
        }
    }

    /// Puts a published block that nobody holds any more on the list of its class. What a longer block begins
    /// with needs no block of its own.
    #[inline]
    pub(super) fn retire(&mut self, block: BlockId) {
        if self.index.is_partial(block) && self.index.is_extended(block) {
            self.unpublish(block);
            self.free.push(block);
            return;
        }
        let class = self.index.class(block);
        let list = self.shares.list(block, class);
        self.idle.push_back(block, list, self.num_allocations);
    }

    /// Puts a block whose leases were dropped on the list that its state asks for, if it is on none.
    pub(super) fn settle(&mut self, block: BlockId) {
        if self.is_held(block) || self.idle.contains(block) {
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
            && self.index.nodes[parent.index()].num_tables == 0
            && !self.idle.contains(parent)
        {
            chain.push(parent);
            above = self.parent(parent);
        }
        let mut nearest = match above {
            Some(Parent::Block(parent)) if self.idle.contains(parent) => Some(parent),
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
                Some(parent) => self.idle.insert_before(block, parent),
                None => self.retire(block),
            }
            nearest = Some(block);
        }
    }
}
