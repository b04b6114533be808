//! The record of a block: what the index knows of it, who holds it, and its place on an idle list.
//!
//! All of it lies in one cache line, because a block that changes hands is in no cache when its turn comes, and
//! whatever happens to it (a hit, a release, an eviction) asks for most of it.

use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

/// A block. What the index knows of it is all zero while it is not published.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, align(64))]
pub(super) struct Node {
    /// Of the chain of tokens that ends with the block.
    pub(super) hash: u64,
    /// `Parent::number`, 0 while the block is not published.
    pub(super) parent: u32,
    /// The top of the treap of its children, and its own place among its siblings, by block id; 0 is nobody.
    pub(super) first_child: u32,
    pub(super) left: u32,
    pub(super) right: u32,
    /// The sibling that the block hangs below, 0 for the one on top.
    pub(super) above: u32,
    /// Number of tokens that the node stands for; a full block has `block_size`.
    pub(super) fill_len: u16,
    /// How many later requests came back to the block, up to the last class.
    pub(super) num_turns: u8,
    /// The share that the block counts to.
    pub(super) share: u8,
    /// Tables that hold the block.
    pub(super) num_tables: u32,
    /// Whether a step under way, or a copy of another thread, reads the block.
    pub(super) is_leased: bool,
    /// Its place on an idle list.
    pub(super) link: IdleLink,
}

// The reason for this module.
const _: () = assert!(size_of::<Node>() == 64);

/// A place on an idle list; see [`super::idle`].
#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(super) struct IdleLink {
    /// When the block went idle, in allocations of the pool.
    pub(super) since: u64,
    pub(super) prev: u32,
    /// 0 for a block that is on no list.
    pub(super) next: u32,
    /// The block that came onto the list some places after this one, 0 while there is none: a hint.
    pub(super) ahead: u32,
}

/// Equal up to the hint, on which nothing depends.
impl PartialEq for IdleLink {
    fn eq(&self, other: &Self) -> bool {
        (self.since, self.prev, self.next) == (other.since, other.prev, other.next)
    }
}

impl Eq for IdleLink {}

impl Node {
    /// Whether anybody keeps the block from being taken.
    #[inline]
    pub(super) fn is_held(&self) -> bool {
        self.num_tables > 0 || self.is_leased
    }

    /// Whether the block is on an idle list.
    #[inline]
    pub(super) fn is_idle(&self) -> bool {
        self.link.next != 0
    }

    #[inline]
    pub(super) fn is_published(&self) -> bool {
        self.parent != 0
    }

    /// The idle list of its share for a turn class.
    #[inline]
    pub(super) fn idle_list(&self, class: u8) -> usize {
        usize::from(self.share) * NUM_CLASSES + usize::from(class)
    }

    /// Whether the block hangs below a sibling or one below it: a lone child does not.
    #[inline]
    pub(super) fn has_siblings(&self) -> bool {
        self.left | self.right | self.above != 0
    }

    /// Clears what the index knows; who holds the block, and its place on a list, stay.
    #[inline]
    pub(super) fn unpublish(&mut self) {
        (self.hash, self.parent, self.first_child) = (0, 0, 0);
        (self.left, self.right, self.above) = (0, 0, 0);
        (self.fill_len, self.num_turns, self.share) = (0, 0, 0);
    }
}

/// The ids of a pool's usable blocks.
pub(super) fn block_ids(num_blocks: u32) -> impl Iterator<Item = BlockId> {
    (1..=num_blocks).map(BlockId)
}
