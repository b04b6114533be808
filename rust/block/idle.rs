//! The idle lists: published blocks that nobody holds, one list for each turn class of each share, oldest first.
//!
//! Intrusive doubly linked lists over block ids, so that a block taken up again leaves from the middle in O(1)
//! and no operation allocates. Every list is a ring closed by a sentinel of its own behind the blocks. A block
//! keeps the time at which it went idle; within a list the times never decrease.

use super::flat::prefetch;
use super::turn::NUM_CLASSES;
use crate::ids::BlockId;

/// Marks a block that is on no list.
const OFF_LIST: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Link {
    prev: u32,
    next: u32,
    /// When the block went idle, in allocations of the pool.
    since: u64,
}

/// Idle blocks by list, oldest first. The lists of a share lie together, its turn classes in order.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct IdleLists {
    /// By block id; the sentinels of the lists come last.
    links: Vec<Link>,
    num_lists: usize,
    len: u32,
}

impl IdleLists {
    /// Empty lists of `num_shares` shares over blocks `1..=num_blocks`.
    pub(super) fn new(num_blocks: u32, num_shares: usize) -> Self {
        let num_lists = num_shares * NUM_CLASSES;
        let off = Link {
            prev: OFF_LIST,
            next: OFF_LIST,
            since: 0,
        };
        let mut links = vec![off; num_blocks as usize + 1];
        let sentinels = (num_blocks + 1..).take(num_lists);
        links.extend(sentinels.map(|own| Link {
            prev: own,
            next: own,
            since: 0,
        }));
        Self {
            links,
            num_lists,
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
        self.num_lists
    }

    /// Index of the sentinel of a list.
    #[inline]
    fn sentinel(&self, list: usize) -> usize {
        self.links.len() - self.num_lists + list
    }

    /// The oldest block of a list.
    #[inline]
    pub(super) fn front(&self, list: usize) -> Option<BlockId> {
        let sentinel = self.sentinel(list);
        let front = self.links[sentinel].next;
        (front as usize != sentinel).then_some(BlockId(front))
    }

    #[inline]
    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].next != OFF_LIST
    }

    /// When an idle block went idle.
    #[inline]
    pub(super) fn since(&self, block: BlockId) -> u64 {
        self.links[block.index()].since
    }

    /// The block behind an idle one on its list.
    #[inline]
    pub(super) fn next(&self, block: BlockId) -> Option<BlockId> {
        let next = self.links[block.index()].next;
        ((next as usize) < self.sentinel(0)).then_some(BlockId(next))
    }

    /// Fetches the links of a block ahead of their use.
    #[inline]
    pub(super) fn prefetch(&self, block: BlockId) {
        prefetch(&self.links, block.index());
    }

    /// Appends `block`, which goes idle now, to a list.
    #[inline]
    pub(super) fn push_back(&mut self, block: BlockId, list: usize, now: u64) {
        self.link(block, self.sentinel(list), now);
    }

    /// Puts `block` just before the idle block `at`, as old as that one.
    pub(super) fn insert_before(&mut self, block: BlockId, at: BlockId) {
        debug_assert!(self.contains(at), "block {at:?} is not idle");
        self.link(block, at.index(), self.since(at));
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "indices are block ids, or a few more"
    )]
    fn link(&mut self, block: BlockId, at: usize, since: u64) {
        debug_assert!(
            block != BlockId::NULL && !self.contains(block),
            "block {block:?} is on an idle list"
        );
        let next = &mut self.links[at];
        let prev = std::mem::replace(&mut next.prev, block.0);
        self.links[prev as usize].next = block.0;
        self.links[block.index()] = Link {
            prev,
            next: at as u32,
            since,
        };
        self.len += 1;
    }

    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) {
        debug_assert!(
            block != BlockId::NULL && self.contains(block),
            "block {block:?} is on no idle list"
        );
        let link = &mut self.links[block.index()];
        let (prev, next) = (link.prev, link.next);
        (link.prev, link.next) = (OFF_LIST, OFF_LIST);
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.len -= 1;
    }

    /// One list, oldest first. Bounded by the length, so that a broken ring cannot trap its reader.
    pub(super) fn iter(&self, list: usize) -> impl Iterator<Item = BlockId> + '_ {
        let sentinel = self.sentinel(list);
        let first = self.links[sentinel].next;
        std::iter::successors(Some(first), |&block| Some(self.links[block as usize].next))
            .take_while(move |&block| block as usize != sentinel && block != OFF_LIST)
            .take(self.len as usize + 1)
            .map(BlockId)
    }

    /// Checks the rings in both directions, the order of the times and the length.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut count = 0;
        for list in 0..self.num_lists {
            let sentinel = self.sentinel(list);
            let mut prev = sentinel;
            let mut since = 0;
            for block in self.iter(list) {
                let link = self.links[block.index()];
                if link.prev as usize != prev || link.since < since {
                    return Err(format!(
                        "idle list {list}: block {} does not follow {prev}",
                        block.0
                    ));
                }
                (prev, since) = (block.index(), link.since);
                count += 1;
            }
            if self.links[sentinel].prev as usize != prev {
                return Err(format!("idle list {list} does not end with block {prev}"));
            }
        }
        let blocks = &self.links[1..self.sentinel(0)];
        let linked = blocks.iter().filter(|link| link.next != OFF_LIST).count();
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
    use super::*;

    fn order(lists: &IdleLists, list: usize) -> Vec<u32> {
        lists.check().expect("the lists are sound");
        lists.iter(list).map(|block| block.0).collect()
    }

    #[test]
    fn keep_order_through_middle_removal_and_insertion() {
        let mut lists = IdleLists::new(5, 1);
        assert_eq!(lists.front(0), None);
        for (now, block) in [(7, 3), (7, 1), (8, 5)] {
            lists.push_back(BlockId(block), 0, now);
        }
        assert_eq!(order(&lists, 0), [3, 1, 5]);
        lists.remove(BlockId(1));
        assert!(!lists.contains(BlockId(1)));
        lists.insert_before(BlockId(2), BlockId(3));
        lists.insert_before(BlockId(4), BlockId(5));
        assert_eq!((lists.since(BlockId(2)), lists.since(BlockId(4))), (7, 8));
        lists.push_back(BlockId(1), 3, 9);
        assert_eq!((order(&lists, 0), order(&lists, 3)), (vec![2, 3, 4, 5], vec![1]));
        assert_eq!(
            (lists.front(0), lists.front(2), lists.len()),
            (Some(BlockId(2)), None, 5)
        );
        for block in [5, 2, 1, 3, 4] {
            lists.remove(BlockId(block));
        }
        assert_eq!(
            (order(&lists, 0), order(&lists, 3), lists.len()),
            (vec![], vec![], 0)
        );
    }
}
