//! Chains: what a table does to many blocks at once, in one pass over their nodes.
//!
//! It comes to the same as block after block would. But blocks of a chain are mostly in the same state and lie side by
//! side on an idle list, so what is asked and noted for each of them is little, and the rest once for all.

use super::config::Eviction;
use super::idle::Gap;
use super::node::Holders;
use super::pool::BlockPool;
use super::prefix::{Parent, PrefixHit};
use super::root::RootId;
use super::turn::LAST_CLASS;
use crate::ids::BlockId;

impl BlockPool {
    /// Takes `num_blocks` blocks for one table, as [`Self::allocate`] does one after another, and appends them.
    /// Returns whether there were so many; if not, all that there were are taken.
    pub fn allocate_into(&mut self, num_blocks: usize, blocks: &mut Vec<BlockId>) -> bool {
        let rest = self.free.len().saturating_sub(num_blocks);
        let taken = &self.free[rest..];
        for &block in taken {
            self.index.nodes[block.index()].holders = Holders::ONE_TABLE;
        }
        blocks.extend(taken.iter().rev());
        let num_free = taken.len();
        self.free.truncate(rest);
        self.num_allocations += num_free as u64;
        for _ in num_free..num_blocks {
            let Some(block) = self.allocate() else {
                return false;
            };
            blocks.push(block);
        }
        true
    }

    /// Takes a table from the holders of blocks, from the last to the first, as [`Self::release`] does one after another.
    ///
    /// # Panics
    /// If no table holds one of them.
    pub fn release_all(&mut self, blocks: &[BlockId]) {
        let mut left = blocks;
        while let Some(&last) = left.last() {
            let before = left.len();
            left = self.free_private(left);
            left = self.park_alike(left);
            if left.len() == before {
                self.release(last);
                left = &left[..before - 1];
            }
        }
    }

    /// Frees those at the end that one table alone holds and nothing can find. Returns the others.
    #[inline]
    fn free_private<'a>(&mut self, blocks: &'a [BlockId]) -> &'a [BlockId] {
        let mut num_left = blocks.len();
        for &block in blocks.iter().rev() {
            let node = &mut self.index.nodes[block.index()];
            if node.holders != Holders::ONE_TABLE || node.is_published() {
                break;
            }
            node.holders = Holders::NOBODY;
            num_left -= 1;
        }
        let (left, freed) = blocks.split_at(num_left);
        self.free.extend(freed.iter().rev());
        left
    }

    /// Puts those at the end that one table alone holds, that are full and that go onto the same idle list there. Returns
    /// the others.
    #[inline]
    fn park_alike<'a>(&mut self, blocks: &'a [BlockId]) -> &'a [BlockId] {
        let Some(&last) = blocks.last() else {
            return blocks;
        };
        let last = &self.index.nodes[last.index()];
        let (kind, list) = (last.kind(), last.idle_list(last.num_turns));
        if u32::from(last.fill_len) != self.block_size() {
            return blocks;
        }
        let mut num_left = blocks.len();
        for &block in blocks.iter().rev() {
            let node = &mut self.index.nodes[block.index()];
            if node.holders != Holders::ONE_TABLE || node.kind() != kind {
                break;
            }
            node.holders = Holders::NOBODY;
            num_left -= 1;
        }
        let (left, parked) = blocks.split_at(num_left);
        let now = self.num_allocations;
        self.idle.push_back_all(&mut self.index.nodes, parked, list, now);
        left
    }

    /// Adds a table to the holders of the first blocks of a hit. Unless the hit is of a sequence that only lost its
    /// blocks, a request came back to them.
    ///
    /// # Panics
    /// If the hit is not the current one: blocks of it were evicted or forgotten.
    pub(super) fn take_up(&mut self, root: RootId, hit: &PrefixHit, num_blocks: u32) {
        let nodes = &mut self.index.nodes;
        let (most_turns, turn) = match self.eviction {
            Eviction::Turn if !hit.is_resumed => (LAST_CLASS, 1),
            _ => (u8::MAX, 0),
        };
        let full = &hit.hashes[..hit.num_full as usize];
        let mut parent = Parent::Root(root).number();
        let mut gap = Gap::default();
        // How many idle blocks in turn had this class and went idle at this time.
        let (mut class, mut since, mut num_alike) = (0, 0, 0);
        for (idx, &block) in hit.blocks[..num_blocks as usize].iter().enumerate() {
            let node = &mut nodes[block.index()];
            let is_current = node.parent == parent && full.get(idx).is_none_or(|&hash| hash == node.hash);
            assert!(is_current, "block {} of the hit has been evicted", block.0);
            let is_idle = !node.is_held();
            node.holders.add_table();
            if is_idle {
                if (node.num_turns, node.link.since) != (class, since) {
                    if !hit.is_resumed {
                        self.turns
                            .hit(class.into(), self.num_allocations - since, num_alike);
                    }
                    (class, since, num_alike) = (node.num_turns, node.link.since, 0);
                }
                num_alike += 1;
            }
            node.num_turns = (node.num_turns + turn).min(most_turns);
            if is_idle {
                self.idle.take_out(nodes, block, &mut gap);
            }
            parent = block.0;
        }
        if !hit.is_resumed {
            self.turns
                .hit(class.into(), self.num_allocations - since, num_alike);
        }
        self.idle.close(nodes, &mut gap);
    }
}
