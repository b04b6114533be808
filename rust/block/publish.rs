//! What can be found and what is forgotten: the one way into the index, and the one way out.

use super::ghost::{Evicted, Removal};
use super::pool::BlockPool;
use super::prefix::{Parent, PrefixHit};
use super::root::RootId;
use super::share::ShareCounts;
use crate::ids::BlockId;

/// The published block that goes on like some tokens for longest, beyond the full blocks of a hit.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Closest<'a> {
    /// What it holds.
    pub tokens: &'a [u32],
    /// How many tokens it has in common from its start.
    pub num_common: usize,
}

impl BlockPool {
    /// Makes a block findable, and returns the block that a lookup will find: an older one if one with the same
    /// tokens and parent is published already, and then nothing changes here. Without prefix caching nothing is
    /// published. An idle block whose tokens this one begins with becomes free.
    ///
    /// `hash` is that of [`Self::chain_hash`].
    ///
    /// # Panics
    /// If the block is not held, is published already, holds no tokens or too many, or if its parent is not
    /// published or not full.
    pub fn publish(&mut self, block: BlockId, parent: Parent, hash: u64, tokens: &[u32]) -> BlockId {
        assert!(
            self.num_tables(block) > 0,
            "block {} was published but no table holds it",
            block.0
        );
        assert!(!self.is_published(block), "block {} was published twice", block.0);
        assert!(
            (1..=self.block_size() as usize).contains(&tokens.len()),
            "block {} was published with {} tokens",
            block.0,
            tokens.len()
        );
        if let Parent::Block(parent) = parent {
            assert!(
                self.is_published(parent) && !self.index.is_partial(parent),
                "block {} was published before its parent",
                block.0
            );
        }
        debug_assert!(
            hash == self.chain_hash(parent, tokens),
            "block {} has another hash",
            block.0
        );
        if !self.prefix_caching {
            return block;
        }
        if let Some(canonical) = self.index.find(hash, parent.number(), tokens) {
            return canonical;
        }
        if self.partial_matching
            && self.index.first_child(parent).is_some()
            && let Some(beginning) = self.index.extended_by(parent, tokens)
            && self.index.nodes[beginning.index()].is_idle()
        {
            self.idle.remove(&mut self.index.nodes, beginning);
            self.unpublish(beginning);
            self.free.push(beginning);
        }
        self.index.insert(block, parent, hash, tokens);
        let share = match parent {
            Parent::Root(root) => self.index.roots.get(root).share,
            Parent::Block(parent) => self.index.nodes[parent.index()].share,
        };
        self.index.nodes[block.index()].share = share;
        self.shares.add(share);
        block
    }

    /// Whether a published child of `parent` begins with `tokens`.
    pub(super) fn is_known(&self, parent: Parent, tokens: &[u32]) -> bool {
        let closest = self.index.neighbours(parent, tokens).closest();
        closest.is_some_and(|closest| closest.num_common == tokens.len())
    }

    /// Takes a leaf out of the index.
    #[inline]
    pub(super) fn unpublish(&mut self, block: BlockId) {
        self.shares.remove(self.index.nodes[block.index()].share);
        self.index.remove(block);
    }

    /// Makes a block that exactly one table holds private again, if no published block depends on it.
    pub(super) fn unpublish_sole(&mut self, block: BlockId) {
        if self.num_tables(block) == 1 {
            self.withdraw(block);
        }
    }

    /// Takes a block that tables hold out of the index, if no published block depends on it. None of these tables may
    /// publish anything more; see [`super::BlockTable::seal`].
    pub fn withdraw(&mut self, block: BlockId) {
        let is_leaf = self.index.first_child(Parent::Block(block)).is_none();
        if is_leaf && self.is_published(block) && self.num_tables(block) > 0 {
            self.unpublish(block);
        }
    }

    /// Forgets everything that is published, and returns how many blocks that was. Idle blocks become free;
    /// held ones stay with their tables, which publish nothing any more: what they hold was computed before
    /// the reset.
    pub fn clear_prefix(&mut self) -> u32 {
        let num_published = self.num_published();
        for list in 0..self.idle.num_lists() {
            while let Some(block) = self.idle.front(&self.index.nodes, list) {
                self.idle.remove(&mut self.index.nodes, block);
                self.free.push(block);
            }
        }
        let evicted = Evicted {
            at_ms: self.now_ms,
            reason: Removal::Reset,
        };
        for node in self.index.nodes.iter().filter(|node| node.is_published()) {
            self.index.table.leave_ghost(node.hash, evicted);
        }
        self.last_reset_ms = self.now_ms;
        self.index.clear();
        self.shares.clear();
        self.epoch += 1;
        num_published
    }

    /// What the cache holds that goes on like `tokens` for longest, beyond the full blocks of their hit.
    pub fn closest(&self, root: RootId, tokens: &[u32], hit: &PrefixHit) -> Option<Closest<'_>> {
        let num_full = hit.num_full as usize;
        let parent = hit.blocks[..num_full]
            .last()
            .map_or(Parent::Root(root), |&last| Parent::Block(last));
        let size = self.block_size() as usize;
        let rest = &tokens[num_full * size..];
        let closest = self
            .index
            .neighbours(parent, &rest[..rest.len().min(size)])
            .closest()?;
        Some(Closest {
            tokens: self.index.tokens(closest.block),
            num_common: closest.num_common,
        })
    }

    /// Tells the time, for [`Evicted`]. Nothing else depends on it.
    pub fn set_time(&mut self, now_ms: u64) {
        self.now_ms = now_ms;
    }

    /// The time that was told last.
    pub fn now_ms(&self) -> u64 {
        self.now_ms
    }

    /// When everything was forgotten last; 0 if never.
    pub fn last_reset_ms(&self) -> u64 {
        self.last_reset_ms
    }

    /// When and why the block with this chained hash went, as far as that is remembered.
    pub fn evicted(&self, hash: u64) -> Option<Evicted> {
        self.index.table.ghost(hash)
    }

    /// How the shares stand: the common one first, then the named ones in their order.
    pub fn share_counts(&self) -> &[ShareCounts] {
        &self.shares.counts
    }

    /// The share of a salt, as an index of [`Self::share_counts`].
    pub fn share_of(&self, salt: &[u8]) -> usize {
        self.shares.of_salt(salt).into()
    }
}
