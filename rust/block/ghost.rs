//! Ghosts: which hashes were published once, and when and why they went. Asked when a lookup stops, to say
//! whether the block that it misses was ever there.
//!
//! A ghost is one word. It lies in the hash table beside the slot where a search for its hash starts (see
//! [`super::flat`]), so an eviction, which has just been there, fetches nothing for it. A new ghost takes the place of an
//! older one: the memory is bounded. It answers questions only; no decision depends on it. Of the hash it keeps
//! [`TAG_BITS`] bits beside those that the slot stands for, so one answer in millions is about another block.

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

/// Bits of the hash in a ghost: the lowest ones, which do not choose the slot.
const TAG_BITS: u32 = 22;
const TAG: u64 = (1 << TAG_BITS) - 1;

/// The latest time that a ghost can tell. Milliseconds since 1970 fit until 2039.
const LAST_MS: u64 = (1 << (63 - TAG_BITS)) - 2;

/// What is remembered of a block: from the lowest bit on, bits of its hash, whether it went with a reset, and one more
/// than the time. All zero is no ghost.
#[derive(Clone, Copy, PartialEq, Eq, Default)]
#[repr(transparent)]
pub(super) struct Ghost(u64);

impl Ghost {
    #[inline]
    pub(super) fn new(hash: u64, evicted: Evicted) -> Self {
        let is_reset = u64::from(evicted.reason == Removal::Reset);
        let time = evicted.at_ms.min(LAST_MS) + 1;
        Self((time << 1 | is_reset) << TAG_BITS | (hash & TAG))
    }

    /// What it remembers, if it is that of a block with this hash.
    pub(super) fn recall(self, hash: u64) -> Option<Evicted> {
        let code = self.0 >> TAG_BITS;
        let at_ms = (code >> 1)
            .checked_sub(1)
            .filter(|_| (self.0 ^ hash) & TAG == 0)?;
        let reason = if code & 1 == 1 {
            Removal::Reset
        } else {
            Removal::Capacity
        };
        Some(Evicted { at_ms, reason })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_ghost_answers_for_its_hash() {
        assert_eq!(Ghost::default().recall(0), None);
        for reason in [Removal::Capacity, Removal::Reset] {
            for at_ms in [0, 11, LAST_MS] {
                let evicted = Evicted { at_ms, reason };
                for hash in [0, 7, u64::MAX] {
                    let ghost = Ghost::new(hash, evicted);
                    assert_eq!(ghost.recall(hash), Some(evicted));
                    assert_eq!(ghost.recall(hash ^ 1), None);
                }
            }
        }
    }

    #[test]
    fn a_time_that_is_too_late_is_cut() {
        let evicted = |at_ms| Evicted {
            at_ms,
            reason: Removal::Capacity,
        };
        assert_eq!(Ghost::new(3, evicted(u64::MAX)).recall(3), Some(evicted(LAST_MS)));
    }
}
