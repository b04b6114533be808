//! A flat hash table from hashes to block ids: open addressing, linear probing, backward-shift deletion.
//!
//! An entry is one `u64`: the high half of the hash, then the block id. The half hash also names the entry's
//! home slot, so deleting moves entries without looking anything up. No block has id 0, hence a zero entry is
//! an empty slot.
//!
//! Beside its entry a slot keeps the ghost of the last hash at home there that went.

use super::ghost::{Evicted, Ghost};
use super::memory::{array, prefetch};
use crate::ids::BlockId;

#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(C, align(16))]
struct Slot {
    entry: u64,
    ghost: Ghost,
}

/// Block ids by hash; several blocks may have the same hash.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct FlatTable {
    /// A power of two of slots, at least four times as many as there are blocks: most entries are at home and have
    /// no neighbour, so the branches of a removal go the usual way.
    slots: Vec<Slot>,
    len: u32,
}

/// Blocks that may have a hash; see [`FlatTable::candidates`].
pub(super) struct Candidates<'a> {
    slots: &'a [Slot],
    at: usize,
    /// The high half of an entry of the hash.
    half: u64,
}

impl Iterator for Candidates<'_> {
    type Item = BlockId;

    #[expect(
        clippy::inline_always,
        reason = "the loop of a lookup, where a call costs as much as the work"
    )]
    #[inline(always)]
    fn next(&mut self) -> Option<BlockId> {
        loop {
            let entry = self.slots[self.at].entry;
            if entry == 0 {
                return None;
            }
            self.at = (self.at + 1) & (self.slots.len() - 1);
            if entry >> 32 == self.half {
                return Some(FlatTable::block(entry));
            }
        }
    }
}

impl FlatTable {
    /// An empty table for at most `num_blocks` entries.
    pub(super) fn new(num_blocks: u32) -> Self {
        let num_slots = (num_blocks as usize * 4).next_power_of_two();
        Self {
            slots: array(Slot::default(), num_slots),
            len: 0,
        }
    }

    #[inline]
    pub(super) fn len(&self) -> u32 {
        self.len
    }

    /// The entry of `block` under `hash`.
    #[inline]
    fn entry(hash: u64, block: BlockId) -> u64 {
        (hash >> 32 << 32) | u64::from(block.0)
    }

    #[inline]
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the low half of an entry is a block id"
    )]
    fn block(entry: u64) -> BlockId {
        BlockId(entry as u32)
    }

    /// The slot at which the search for an entry, or for the hash it was made from, starts.
    #[inline]
    fn home(&self, entry: u64) -> usize {
        (entry >> 32) as usize & (self.slots.len() - 1)
    }

    #[inline]
    fn after(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    /// The blocks whose hashes have the same upper half as `hash`.
    #[expect(
        clippy::inline_always,
        reason = "the loop of a lookup, where a call costs as much as the work"
    )]
    #[inline(always)]
    pub(super) fn candidates(&self, hash: u64) -> Candidates<'_> {
        Candidates {
            slots: &self.slots,
            at: self.home(hash),
            half: hash >> 32,
        }
    }

    /// Fetches the home slot of `hash` ahead of its use.
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&self.slots, self.home(hash));
    }

    /// Fetches what [`Self::remove`] of an entry of `hash` will touch, most likely: its home slot and the two after, of which
    /// the second lies in the next cache line half of the time.
    #[inline]
    pub(super) fn prefetch_removal(&self, hash: u64) {
        let home = self.home(hash);
        prefetch(&self.slots, home);
        prefetch(&self.slots, home + 2);
    }

    /// The block in the home slot of `hash`, whoever it is: a guess at the first of [`Self::candidates`]. The null block
    /// if there is none.
    #[inline]
    pub(super) fn guess(&self, hash: u64) -> BlockId {
        Self::block(self.slots[self.home(hash)].entry)
    }

    /// Remembers when and why a block with this hash went, in the place of an older one.
    #[inline]
    pub(super) fn leave_ghost(&mut self, hash: u64, evicted: Evicted) {
        let home = self.home(hash);
        self.slots[home].ghost = Ghost::new(hash, evicted);
    }

    /// When and why the last block with this hash went, as far as that is remembered.
    pub(super) fn ghost(&self, hash: u64) -> Option<Evicted> {
        self.slots[self.home(hash)].ghost.recall(hash)
    }

    /// Adds a block that is not in the table.
    pub(super) fn insert(&mut self, hash: u64, block: BlockId) {
        assert!(
            (self.len as usize) < self.slots.len() / 4,
            "the prefix table has more entries than blocks"
        );
        let mut slot = self.home(hash);
        while self.slots[slot].entry != 0 {
            slot = self.after(slot);
        }
        self.slots[slot].entry = Self::entry(hash, block);
        self.len += 1;
    }

    /// Takes a block out, and closes the gap by moving later entries towards their home slots.
    #[inline]
    pub(super) fn remove(&mut self, hash: u64, block: BlockId) {
        let wanted = Self::entry(hash, block);
        let mut gap = self.home(hash);
        while self.slots[gap].entry != wanted {
            assert!(
                self.slots[gap].entry != 0,
                "block {} is not in the prefix table",
                block.0
            );
            gap = self.after(gap);
        }
        let mask = self.slots.len() - 1;
        let mut slot = self.after(gap);
        loop {
            let entry = self.slots[slot].entry;
            if entry == 0 {
                break;
            }
            // An entry may move to the gap unless its home lies after the gap, on the way from the gap to the
            // entry.
            let from_home = slot.wrapping_sub(self.home(entry)) & mask;
            let from_gap = slot.wrapping_sub(gap) & mask;
            if from_home >= from_gap {
                self.slots[gap].entry = entry;
                gap = slot;
            }
            slot = self.after(slot);
        }
        self.slots[gap].entry = 0;
        self.len -= 1;
    }

    /// Forgets every entry, and leaves the ghosts.
    pub(super) fn clear(&mut self) {
        for slot in &mut self.slots {
            slot.entry = 0;
        }
        self.len = 0;
    }

    /// Checks the count, and that no entry lies behind an empty slot on the way from its home.
    pub(super) fn check(&self) -> Result<(), String> {
        let used = self.slots.iter().filter(|slot| slot.entry != 0).count();
        if used != self.len as usize || used * 4 > self.slots.len() {
            return Err(format!(
                "prefix table: {used} of {} slots used, {} counted",
                self.slots.len(),
                self.len
            ));
        }
        for (slot, &Slot { entry, .. }) in self.slots.iter().enumerate() {
            let mut step = self.home(entry);
            while entry != 0 && step != slot {
                if self.slots[step].entry == 0 {
                    return Err(format!(
                        "prefix table: block {} is out of reach",
                        Self::block(entry).0
                    ));
                }
                step = self.after(step);
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::super::ghost::Removal;
    use super::*;

    /// A hash whose home is `home` in any table of at least that many slots.
    fn hash(home: u64, low: u64) -> u64 {
        home << 32 | low
    }

    fn find(table: &FlatTable, hash: u64, block: u32) -> bool {
        table.candidates(hash).any(|found| found == BlockId(block))
    }

    #[test]
    fn deletion_closes_gaps_across_the_end_of_the_table() {
        let mut table = FlatTable::new(4);
        assert_eq!(table.slots.len(), 16);
        // Homes 14, 15, 14, 15 fill slots 14, 15, 0, 1.
        let homes = [14, 15, 14, 15];
        for (i, &home) in (1..).zip(&homes) {
            table.insert(hash(home, 9), BlockId(i));
        }
        table.check().expect("sound after insertion");
        table.remove(hash(14, 9), BlockId(1));
        table.check().expect("sound after deletion");
        // Block 3 came home to 14; block 4 took its place; block 2 never moved.
        assert_eq!(
            [14, 15, 0, 1].map(|slot| FlatTable::block(table.slots[slot].entry).0),
            [3, 2, 4, 0]
        );
        for (block, home) in [(2, 15), (3, 14), (4, 15)] {
            assert!(find(&table, hash(home, 1), block));
        }
        assert!(!find(&table, hash(14, 9), 1));
        assert_eq!(table.len(), 3);
    }

    #[test]
    fn random_use_agrees_with_a_list() {
        let mut rng = 12_345_u64;
        let mut draw = |bound: u64| {
            rng = rng
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (rng >> 33) % bound
        };
        for num_blocks in [1, 2, 7, 33] {
            let mut table = FlatTable::new(num_blocks);
            let mut held: Vec<(u64, u32)> = Vec::new();
            for _ in 0..3000 {
                let block = 1 + u32::try_from(draw(u64::from(num_blocks))).unwrap();
                if let Some(at) = held.iter().position(|&(_, other)| other == block) {
                    let (hash, _) = held.swap_remove(at);
                    table.remove(hash, BlockId(block));
                    assert!(!find(&table, hash, block));
                } else {
                    let hash = hash(draw(9), draw(3));
                    table.insert(hash, BlockId(block));
                    held.push((hash, block));
                }
                table.check().unwrap();
                assert!(held.iter().all(|&(hash, block)| find(&table, hash, block)));
                assert_eq!(table.len() as usize, held.len());
            }
        }
    }

    #[test]
    #[should_panic(expected = "block 2 is not in the prefix table")]
    fn removing_a_stranger_panics() {
        let mut table = FlatTable::new(4);
        table.insert(5, BlockId(1));
        table.remove(5, BlockId(2));
    }

    #[test]
    fn the_last_ghost_at_home_in_a_slot_is_remembered() {
        let mut table = FlatTable::new(4);
        let evicted = |at_ms| Evicted {
            at_ms,
            reason: Removal::Capacity,
        };
        table.insert(hash(3, 1), BlockId(1));
        table.leave_ghost(hash(3, 1), evicted(0));
        table.remove(hash(3, 1), BlockId(1));
        assert_eq!(
            (
                table.ghost(hash(3, 1)),
                table.ghost(hash(3, 2)),
                table.ghost(hash(4, 1))
            ),
            (Some(evicted(0)), None, None)
        );
        table.leave_ghost(hash(3, 2), evicted(5));
        table.clear();
        assert_eq!(
            (table.ghost(hash(3, 1)), table.ghost(hash(3, 2))),
            (None, Some(evicted(5)))
        );
    }
}
