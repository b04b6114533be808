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
    pub(super) holders: Holders,
    /// Its place on an idle list.
    pub(super) link: IdleLink,
}

/// Who keeps a block from being taken: the tables that hold it, and whether a step under way, or a copy of another
/// thread, reads it. One word, since most questions are about all of them at once.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub(super) struct Holders(u32);

impl Holders {
    const LEASE: u32 = 1;
    const TABLE: u32 = 2;

    pub(super) const NOBODY: Self = Self(0);
    /// One table and no copy.
    pub(super) const ONE_TABLE: Self = Self(Self::TABLE);

    #[inline]
    pub(super) fn num_tables(self) -> u32 {
        self.0 / Self::TABLE
    }

    #[inline]
    pub(super) fn has_table(self) -> bool {
        self.0 >= Self::TABLE
    }

    #[inline]
    pub(super) fn add_table(&mut self) {
        self.0 += Self::TABLE;
    }

    /// There must be one.
    #[inline]
    pub(super) fn remove_table(&mut self) {
        self.0 -= Self::TABLE;
    }

    #[inline]
    pub(super) fn is_leased(self) -> bool {
        self.0 & Self::LEASE != 0
    }

    /// Returns whether it was leased before.
    #[inline]
    pub(super) fn set_leased(&mut self, is_leased: bool) -> bool {
        let was_leased = self.is_leased();
        self.0 = self.0 & !Self::LEASE | u32::from(is_leased);
        was_leased
    }
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
        self.holders != Holders::NOBODY
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

    /// Length, class and share as one word, so that one comparison tells whether two blocks that go idle go onto the same
    /// list.
    #[inline]
    pub(super) fn kind(&self) -> u32 {
        u32::from(self.fill_len) | u32::from(self.num_turns) << 16 | u32::from(self.share) << 24
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
