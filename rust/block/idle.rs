//! The idle lists: published blocks that nobody holds, one list for each turn class of each share, oldest first.
//!
//! Intrusive doubly linked lists through the nodes of the blocks, so that a block taken up again leaves from the middle
//! in O(1) and no operation allocates. Every list is a ring closed by a node of its own, its end, which lies behind
//! those of the blocks. A block keeps the time at which it went idle; within a list the times never decrease.
//!
//! Whoever takes blocks from the front of a long list waits for memory at every one: the next one's place is
//! known only from the one before. So a block also keeps which block came onto its list [`FAR`] places after it
//! (a jump pointer: Luk and Mowry, "Compiler-based prefetching for recursive data structures", 1996), to be fetched in
//! advance. It is a hint, and may name a block that has left since.

use super::node::{IdleLink, Node};
use super::pool::count;
use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

/// How many evictions ahead of its own a block's node is fetched, and then what is known only from the node.
const FAR: usize = 16;
const NEAR: usize = 8;

/// The last blocks that came by, by their number: the next one takes the place of the oldest.
#[derive(Clone, Copy)]
struct Recent<const LEN: usize> {
    ids: [u32; LEN],
    num_seen: usize,
}

impl<const LEN: usize> Recent<LEN> {
    /// Nobody came by.
    const NONE: Self = Self {
        ids: [0; LEN],
        num_seen: 0,
    };

    /// Adds a block, and returns the one that came `LEN` before it; the null block if there was none.
    #[inline]
    fn replace(&mut self, block: BlockId) -> BlockId {
        let at = self.num_seen % LEN;
        self.num_seen += 1;
        BlockId(std::mem::replace(&mut self.ids[at], block.0))
    }
}

/// Where neighbours were taken off a list: the places on both sides, and how many there were.
#[derive(Default)]
#[must_use = "what lies on both sides has to be joined"]
pub(super) struct Gap {
    prev: u32,
    next: u32,
    len: u32,
}

/// The order of the idle blocks; their links are in the nodes, which every call is given.
#[derive(Clone)]
pub(super) struct IdleLists {
    /// By list: the last blocks that came onto it. The lists of a share lie together, its turn classes in order.
    latest: Vec<Recent<FAR>>,
    /// What the last evictions found to be ahead.
    ahead: Recent<NEAR>,
    /// By share: a bit for each class whose list is not empty, so that an eviction looks at no others.
    used: Vec<u8>,
    /// Index of the end of the first list.
    ends: usize,
    len: u32,
}

/// Equal up to the hints.
impl PartialEq for IdleLists {
    fn eq(&self, other: &Self) -> bool {
        (self.latest.len(), self.ends, self.len) == (other.latest.len(), other.ends, other.len)
    }
}

impl Eq for IdleLists {}

impl IdleLists {
    /// Nodes that the lists of `num_shares` shares need beside those of the blocks.
    pub(super) fn num_ends(num_shares: usize) -> usize {
        num_shares * NUM_CLASSES
    }

    /// Empty lists. `nodes` are those of the null block and of `num_blocks` blocks, and then one for each list.
    pub(super) fn new(nodes: &mut [Node], num_blocks: u32) -> Self {
        let ends = num_blocks as usize + 1;
        let num_lists = nodes.len() - ends;
        for (own, end) in (num_blocks + 1..).zip(&mut nodes[ends..]) {
            (end.link.prev, end.link.next) = (own, own);
        }
        Self {
            latest: vec![Recent::NONE; num_lists],
            ahead: Recent::NONE,
            used: vec![0; num_lists / NUM_CLASSES],
            ends,
            len: 0,
        }
    }

    /// Blocks on all lists.
    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// Lists of all shares.
    #[inline]
    pub(super) fn num_lists(&self) -> usize {
        self.latest.len()
    }

    /// The oldest block of a list.
    #[inline]
    pub(super) fn front(&self, nodes: &[Node], list: usize) -> Option<BlockId> {
        let front = nodes[self.ends + list].link.next;
        ((front as usize) < self.ends).then_some(BlockId(front))
    }

    /// The classes and the nodes of the oldest blocks of the lists of a share that are not empty.
    #[inline]
    pub(super) fn fronts<'a>(
        &self,
        nodes: &'a [Node],
        share: usize,
    ) -> impl Iterator<Item = (usize, &'a Node)> + use<'a> {
        let mut used = self.used[share];
        let first = self.ends + share * NUM_CLASSES;
        std::iter::from_fn(move || {
            let class = used.trailing_zeros() as usize;
            used &= used.checked_sub(1)?;
            let front = nodes[first + class].link.next;
            Some((class, &nodes[front as usize]))
        })
    }

    /// A block came to the front and goes: returns which one to fetch, and which one, fetched some evictions ago, is
    /// there by now. The null block where none is known.
    #[inline]
    pub(super) fn look_ahead(&mut self, nodes: &[Node], front: BlockId) -> (BlockId, BlockId) {
        let far = BlockId(nodes[front.index()].link.ahead);
        (far, self.ahead.replace(far))
    }

    /// Appends `block`, which goes idle now, to a list.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a release, where a call costs half as much as the work"
    )]
    #[inline(always)]
    pub(super) fn push_back(&mut self, nodes: &mut [Node], block: BlockId, list: usize, now: u64) {
        let before = self.latest[list].replace(block);
        nodes[before.index()].link.ahead = block.0;
        self.link(nodes, block, self.ends + list, now);
    }

    /// Puts `block` just before the idle block `at`, as old as that one.
    pub(super) fn insert_before(&mut self, nodes: &mut [Node], block: BlockId, at: BlockId) {
        let since = nodes[at.index()].link.since;
        debug_assert!(nodes[at.index()].is_idle(), "block {at:?} is not idle");
        self.link(nodes, block, at.index(), since);
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "indices are block ids, or a few more"
    )]
    fn link(&mut self, nodes: &mut [Node], block: BlockId, at: usize, since: u64) {
        debug_assert!(
            block != BlockId::NULL && !nodes[block.index()].is_idle(),
            "block {block:?} is on an idle list"
        );
        let next = &mut nodes[at].link;
        let prev = std::mem::replace(&mut next.prev, block.0);
        nodes[prev as usize].link.next = block.0;
        nodes[block.index()].link = IdleLink {
            since,
            prev,
            next: at as u32,
            ahead: 0,
        };
        self.len += 1;
        if prev as usize == at {
            self.flip_used(at);
        }
    }

    /// A list, given by its end, has got its first block or lost its last one.
    #[cold]
    fn flip_used(&mut self, end: usize) {
        let list = end - self.ends;
        self.used[list / NUM_CLASSES] ^= 1 << (list % NUM_CLASSES);
    }

    /// Appends blocks, the last one first, which go idle now, to a list.
    pub(super) fn push_back_all(&mut self, nodes: &mut [Node], blocks: &[BlockId], list: usize, since: u64) {
        let Some(&last) = blocks.first() else {
            return;
        };
        let at = self.ends + list;
        let end = count(at);
        let mut prev = std::mem::replace(&mut nodes[at].link.prev, last.0);
        if prev as usize == at {
            self.flip_used(at);
        }
        nodes[prev as usize].link.next = blocks[blocks.len() - 1].0;
        for (idx, &block) in blocks.iter().enumerate().rev() {
            let place = |back: usize| idx.checked_sub(back).map(|idx| blocks[idx].0);
            nodes[block.index()].link = IdleLink {
                since,
                prev,
                next: place(1).unwrap_or(end),
                ahead: place(FAR).unwrap_or(0),
            };
            prev = block.0;
        }
        let num_recent = blocks.len().min(FAR);
        let recent = blocks[..num_recent].iter().rev();
        for (&block, &ahead) in recent.zip(blocks.iter().rev()) {
            let before = self.latest[list].replace(block);
            nodes[before.index()].link.ahead = ahead.0;
        }
        self.len += count(blocks.len());
    }

    #[inline]
    pub(super) fn remove(&mut self, nodes: &mut [Node], block: BlockId) {
        let mut gap = Gap::default();
        self.take_out(nodes, block, &mut gap);
        self.close(nodes, &mut gap);
    }

    /// Takes a block off its list, and leaves it to [`Self::close`] to join its neighbours. Neighbours that are taken off
    /// one after another, each the one before the last, are left for one joint.
    #[inline]
    pub(super) fn take_out(&mut self, nodes: &mut [Node], block: BlockId, gap: &mut Gap) {
        if gap.prev != block.0 {
            self.close(nodes, gap);
            gap.next = nodes[block.index()].link.next;
        }
        let link = &mut nodes[block.index()].link;
        debug_assert!(link.next != 0, "block {block:?} is on no idle list");
        gap.prev = link.prev;
        gap.len += 1;
        link.next = 0;
    }

    /// Joins what lies on both sides of a gap, which is none any more.
    #[inline]
    pub(super) fn close(&mut self, nodes: &mut [Node], gap: &mut Gap) {
        let Gap { prev, next, len } = std::mem::take(gap);
        if len == 0 {
            return;
        }
        nodes[prev as usize].link.next = next;
        nodes[next as usize].link.prev = prev;
        self.len -= len;
        if prev == next {
            self.flip_used(prev as usize);
        }
    }

    /// One list, oldest first. Bounded by the length, so that a broken ring cannot trap its reader.
    pub(super) fn iter<'a>(&self, nodes: &'a [Node], list: usize) -> impl Iterator<Item = BlockId> + use<'a> {
        let end = self.ends + list;
        let first = nodes[end].link.next;
        std::iter::successors(Some(first), |&block| Some(nodes[block as usize].link.next))
            .take_while(move |&block| block as usize != end && block != 0)
            .take(self.len as usize + 1)
            .map(BlockId)
    }

    /// Checks the rings in both directions, the order of the times and the length.
    pub(super) fn check(&self, nodes: &[Node]) -> Result<(), String> {
        let mut count = 0;
        for list in 0..self.num_lists() {
            let end = self.ends + list;
            let mut prev = end;
            let mut since = 0;
            for block in self.iter(nodes, list) {
                let link = nodes[block.index()].link;
                if link.prev as usize != prev || link.since < since {
                    return Err(format!(
                        "idle list {list}: block {} does not follow {prev}",
                        block.0
                    ));
                }
                (prev, since) = (block.index(), link.since);
                count += 1;
            }
            let is_used = self.used[list / NUM_CLASSES] >> (list % NUM_CLASSES) & 1 == 1;
            if is_used == (prev == end) {
                return Err(format!(
                    "idle list {list} is empty or not, and said to be the opposite"
                ));
            }
            if nodes[end].link.prev as usize != prev {
                return Err(format!("idle list {list} does not end with block {prev}"));
            }
        }
        let linked = nodes[1..self.ends].iter().filter(|node| node.is_idle()).count();
        if count != self.len || linked != count as usize {
            return Err(format!(
                "idle lists: {count} reached, {linked} linked, {} counted",
                self.len
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::node::block_ids;
    use super::*;

    fn order(nodes: &[Node], lists: &IdleLists, list: usize) -> Vec<u32> {
        lists.check(nodes).expect("the lists are sound");
        lists.iter(nodes, list).map(|block| block.0).collect()
    }

    #[test]
    fn keep_order_through_middle_removal_and_insertion() {
        let mut nodes = vec![Node::default(); 6 + IdleLists::num_ends(1)];
        let nodes = nodes.as_mut_slice();
        let mut lists = IdleLists::new(nodes, 5);
        assert_eq!(lists.front(nodes, 0), None);
        for (now, block) in [(7, 3), (7, 1), (8, 5)] {
            lists.push_back(nodes, BlockId(block), 0, now);
        }
        assert_eq!(order(nodes, &lists, 0), [3, 1, 5]);
        lists.remove(nodes, BlockId(1));
        assert!(!nodes[1].is_idle());
        lists.insert_before(nodes, BlockId(2), BlockId(3));
        lists.insert_before(nodes, BlockId(4), BlockId(5));
        assert_eq!((nodes[2].link.since, nodes[4].link.since), (7, 8));
        lists.push_back(nodes, BlockId(1), 3, 9);
        assert_eq!(
            (order(nodes, &lists, 0), order(nodes, &lists, 3)),
            (vec![2, 3, 4, 5], vec![1])
        );
        assert_eq!(
            (lists.front(nodes, 0), lists.front(nodes, 2), lists.len()),
            (Some(BlockId(2)), None, 5)
        );
        for block in [5, 2, 1, 3, 4] {
            lists.remove(nodes, BlockId(block));
        }
        assert_eq!(
            (order(nodes, &lists, 0), order(nodes, &lists, 3), lists.len()),
            (vec![], vec![], 0)
        );
    }

    #[test]
    fn a_block_is_announced_far_ahead_and_again_near() {
        let mut nodes = vec![Node::default(); 33 + IdleLists::num_ends(1)];
        let mut lists = IdleLists::new(&mut nodes, 32);
        for block in block_ids(32) {
            lists.push_back(&mut nodes, block, 0, 0);
        }
        for block in 1..=16 {
            let (far, near) = lists.look_ahead(&nodes, BlockId(block));
            let expected_near = if block > 8 { block + 8 } else { 0 };
            assert_eq!((far.0, near.0), (block + 16, expected_near));
            lists.remove(&mut nodes, BlockId(block));
        }
    }
}
