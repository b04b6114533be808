//! Which idle block is taken, and what happens to a block that nobody holds any more.
//!
//! A block is never evicted before its children. They went idle no later than it did and have not come back
//! more often, so by the rule of [`super::turn`] they are at least as old in scaled age; and among equals the
//! lower class goes first, and within a class the block that went idle first.

use super::config::Eviction;
use super::pool::{BlockPool, BlockState};
use super::prefix::Parent;
use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

impl BlockPool {
    /// The idle blocks in the order in which they would be evicted if no time passed.
    pub fn idle_blocks(&self) -> impl Iterator<Item = BlockId> + '_ {
        let mut lists: [_; NUM_CLASSES] = std::array::from_fn(|class| self.idle.iter(class).peekable());
        std::iter::from_fn(move || {
            let fronts = lists.iter_mut().map(|list| list.peek().copied());
            let (class, _) = self.oldest(fronts)?;
            lists[class].next()
        })
    }

    /// Class and scaled age of the block to evict among the first ones of every class.
    #[inline]
    fn oldest(&self, fronts: impl Iterator<Item = Option<BlockId>>) -> Option<(usize, u64)> {
        let mut oldest = None;
        for (class, front) in fronts.enumerate() {
            let Some(block) = front else { continue };
            let scaled = self.turns.scaled(class, self.idle_age(block));
            if oldest.is_none_or(|(_, other)| scaled > other) {
                oldest = Some((class, scaled));
            }
        }
        oldest
    }

    /// Allocations since an idle block went idle.
    #[inline]
    fn idle_age(&self, block: BlockId) -> u64 {
        self.num_allocations - self.idle.since(block)
    }

    /// Takes the idle block to evict off its list and out of the index.
    #[inline(never)]
    pub(super) fn evict(&mut self) -> Option<BlockId> {
        let fronts: [_; NUM_CLASSES] = std::array::from_fn(|class| self.idle.front(class));
        let (class, scaled) = self.oldest(fronts.into_iter())?;
        let block = fronts[class].expect("the oldest is one of them");
        self.prefetch_after(block);
        self.unpublish_tree(block);
        self.idle.remove(block);
        self.turns.evicted(class, scaled);
        self.num_evictions += 1;
        Some(block)
    }

    /// Fetches what the next evictions will touch, which in a large pool is in no cache: of the block behind
    /// `block` on its list, whose node is there already, the neighbours in the index, and of the one behind
    /// that the node.
    fn prefetch_after(&self, block: BlockId) {
        if let Some(next) = self.idle.next(block) {
            self.index.prefetch_removal(next);
            if let Some(after) = self.idle.next(next) {
                self.index.prefetch_node(after);
                self.idle.prefetch(after);
            }
        }
    }

    /// Takes an idle block out of the index, and before it what follows it there. Children that are idle are
    /// evicted before their parents, and those that a table holds keep their parents from being idle: what is
    /// left are fenced ones. They lose their publication, and become free when the step ends.
    fn unpublish_tree(&mut self, block: BlockId) {
        let mut node = block;
        loop {
            if let Some(child) = self.index.first_child(node) {
                node = child;
                continue;
            }
            let parent = self.index.parent(node);
            assert!(
                node == block || self.state(node) == BlockState::Fenced,
                "evicting a parent of block {}",
                node.0
            );
            self.index.remove(node);
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

    /// Puts a published block that nobody holds any more on the list of its class.
    #[inline]
    pub(super) fn retire(&mut self, block: BlockId) {
        let class = self.index.class(block);
        self.idle.push_back(block, class, self.num_allocations);
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
        // Its parent may have become idle while it was fenced. It must be evicted before that parent, and so it
        // takes the parent's place, age and class; of a fenced chain, the first one goes first.
        let mut chain = vec![block];
        while let Some(Parent::Block(parent)) = self.parent(chain[chain.len() - 1])
            && !self.is_held(parent)
            && !self.idle.contains(parent)
        {
            chain.push(parent);
        }
        for &block in chain.iter().rev() {
            match self.parent(block) {
                Some(Parent::Block(parent)) if self.idle.contains(parent) => {
                    let num_turns = self.index.nodes[parent.index()].num_turns;
                    self.index.nodes[block.index()].num_turns = num_turns;
                    self.idle.insert_before(block, parent);
                }
                _ => self.retire(block),
            }
        }
    }
}
