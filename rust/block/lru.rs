//! The idle list: published blocks that nobody holds, in the order in which they will be evicted.
//!
//! An intrusive doubly linked list over block ids, so that a block taken up again leaves from the middle in
//! O(1) and no operation allocates. The null block, which is never idle, is the sentinel that closes the
//! ring.

use crate::ids::BlockId;

/// Marks a block that is not on the list.
const OFF_LIST: u32 = u32::MAX;

#[derive(Clone, Copy, PartialEq, Eq)]
struct Link {
    prev: u32,
    next: u32,
}

/// Idle blocks, oldest first.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct IdleList {
    links: Vec<Link>,
    len: u32,
}

impl IdleList {
    /// An empty list over blocks `1..=num_blocks`.
    pub(super) fn new(num_blocks: u32) -> Self {
        let off = Link {
            prev: OFF_LIST,
            next: OFF_LIST,
        };
        let mut links = vec![off; num_blocks as usize + 1];
        links[0] = Link { prev: 0, next: 0 };
        Self { links, len: 0 }
    }

    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The block to evict next.
    #[inline]
    pub(super) fn front(&self) -> Option<BlockId> {
        let front = BlockId(self.links[0].next);
        (front != BlockId::NULL).then_some(front)
    }

    #[inline]
    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.links[block.index()].next != OFF_LIST
    }

    /// Makes `block` the last to be evicted.
    #[inline]
    pub(super) fn push_back(&mut self, block: BlockId) {
        self.insert_before(block, BlockId::NULL);
    }

    /// Puts `block` just before `at`; before the null block is the back of the list.
    #[inline]
    pub(super) fn insert_before(&mut self, block: BlockId, at: BlockId) {
        debug_assert!(
            block != BlockId::NULL && !self.contains(block),
            "block {block:?} is on the idle list"
        );
        let prev = self.links[at.index()].prev;
        self.links[block.index()] = Link { prev, next: at.0 };
        self.links[prev as usize].next = block.0;
        self.links[at.index()].prev = block.0;
        self.len += 1;
    }

    #[inline]
    pub(super) fn remove(&mut self, block: BlockId) {
        debug_assert!(
            block != BlockId::NULL && self.contains(block),
            "block {block:?} is not on the idle list"
        );
        let Link { prev, next } = self.links[block.index()];
        self.links[prev as usize].next = next;
        self.links[next as usize].prev = prev;
        self.links[block.index()] = Link {
            prev: OFF_LIST,
            next: OFF_LIST,
        };
        self.len -= 1;
    }

    /// The list in order of eviction. Bounded by the length, so that a broken ring cannot trap its reader.
    pub(super) fn iter(&self) -> impl Iterator<Item = BlockId> + '_ {
        let first = self.links[0].next;
        std::iter::successors(Some(first), |&block| Some(self.links[block as usize].next))
            .take_while(|&block| block != 0 && block != OFF_LIST)
            .take(self.len as usize + 1)
            .map(BlockId)
    }

    /// Checks the ring in both directions and the length.
    pub(super) fn check(&self) -> Result<(), String> {
        let mut count = 0;
        let mut prev = BlockId::NULL;
        for block in self.iter() {
            if self.links[block.index()].prev != prev.0 {
                return Err(format!(
                    "idle list: block {} does not point back to {}",
                    block.0, prev.0
                ));
            }
            prev = block;
            count += 1;
        }
        let linked = self.links[1..]
            .iter()
            .filter(|link| link.next != OFF_LIST)
            .count();
        if count != self.len || linked != count as usize || self.links[0].prev != prev.0 {
            return Err(format!(
                "idle list: {count} reached, {linked} linked, {} counted",
                self.len
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn order(list: &IdleList) -> Vec<u32> {
        list.check().expect("the list is sound");
        list.iter().map(|block| block.0).collect()
    }

    #[test]
    fn keeps_order_through_middle_removal_and_insertion() {
        let mut list = IdleList::new(5);
        assert_eq!(list.front(), None);
        for block in [3, 1, 5] {
            list.push_back(BlockId(block));
        }
        assert_eq!(order(&list), [3, 1, 5]);
        list.remove(BlockId(1));
        assert!(!list.contains(BlockId(1)));
        list.insert_before(BlockId(2), BlockId(3));
        list.insert_before(BlockId(4), BlockId(5));
        list.push_back(BlockId(1));
        assert_eq!(order(&list), [2, 3, 4, 5, 1]);
        assert_eq!((list.front(), list.len()), (Some(BlockId(2)), 5));
        for block in [5, 2, 1, 3, 4] {
            list.remove(BlockId(block));
        }
        assert_eq!((order(&list), list.front(), list.len()), (vec![], None, 0));
    }
}
