//! Ghosts: which hashes were published once, and when and why they went. Asked when a lookup stops, to say
//! whether the block that it misses was ever there.
//!
//! A table with as many entries as the pool has blocks, addressed by the hash: a new ghost takes the place of
//! an older one, so the memory is bounded (16 bytes a block) and so is the cost, one write an eviction. It
//! answers questions only; no decision depends on it.

use super::flat::prefetch;

/// Why a block is not there any more.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Removal {
    /// Its place was needed.
    Capacity,
    /// Everything was forgotten.
    Reset,
}

/// When and why a block went.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Evicted {
    /// In told time; see `BlockPool::set_time`.
    pub at_ms: u64,
    /// Why.
    pub reason: Removal,
}

#[derive(Clone, Copy, PartialEq, Eq, Default)]
struct Ghost {
    hash: u64,
    /// Twice the time, plus 1 for a reset; then 1 more, so that 0 is no ghost.
    code: u64,
}

/// The ghosts of one pool.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct Ghosts {
    entries: Vec<Ghost>,
}

impl Ghosts {
    pub(super) fn new(num_blocks: u32) -> Self {
        let num_entries = (num_blocks as usize).next_power_of_two();
        Self {
            entries: vec![Ghost::default(); num_entries],
        }
    }

    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the table is much shorter")]
    fn place(&self, hash: u64) -> usize {
        hash as usize & (self.entries.len() - 1)
    }

    #[inline]
    pub(super) fn add(&mut self, hash: u64, evicted: Evicted) {
        let place = self.place(hash);
        let code = 2 * evicted.at_ms + u64::from(evicted.reason == Removal::Reset) + 1;
        self.entries[place] = Ghost { hash, code };
    }

    pub(super) fn find(&self, hash: u64) -> Option<Evicted> {
        let ghost = self.entries[self.place(hash)];
        let code = ghost.code.checked_sub(1).filter(|_| ghost.hash == hash)?;
        Some(Evicted {
            at_ms: code / 2,
            reason: if code % 2 == 1 {
                Removal::Reset
            } else {
                Removal::Capacity
            },
        })
    }

    /// Fetches the place of `hash` ahead of [`Self::add`].
    #[inline]
    pub(super) fn prefetch(&self, hash: u64) {
        prefetch(&self.entries, self.place(hash));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_one_in_a_place_is_remembered() {
        let mut ghosts = Ghosts::new(5);
        let capacity = |at_ms| Evicted {
            at_ms,
            reason: Removal::Capacity,
        };
        let reset = Evicted {
            at_ms: 9,
            reason: Removal::Reset,
        };
        assert_eq!((ghosts.find(0), ghosts.find(8)), (None, None));
        ghosts.add(0, capacity(0));
        assert_eq!((ghosts.find(0), ghosts.find(8)), (Some(capacity(0)), None));
        ghosts.add(8, reset);
        ghosts.add(7, capacity(11));
        assert_eq!((ghosts.find(0), ghosts.find(8)), (None, Some(reset)));
        assert_eq!(ghosts.find(7), Some(capacity(11)));
    }
}
