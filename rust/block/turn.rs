//! The weights of policy `turn`: how much faster a block seems to age than one that came back more often.
//!
//! A published block has a class: how many later requests came back to it, up to [`NUM_CLASSES`] - 1. The
//! block to evict is the one with the greatest age times weight of its class, ages being counted in allocations
//! of the pool, so that nothing here knows a clock. With equal weights that is LRU, with weights that fall with
//! the class, chains which were continued stay longer.
//!
//! The weights are learned. Space is well divided if a little more of it would earn every class the same; so
//! the classes are compared by the hits that they have late in their lives, at ages which only somewhat less
//! space would have cost them: hits per block that lived that long, per time. A class that earns more than
//! class 0 gets a smaller weight, and one that earns less a greater one. What is learned is bounded on both
//! sides, so that a workload that misleads it loses little: no weight exceeds that of a class which came back
//! less often (nothing is treated worse than by LRU for having been used), and none falls below an eighth.
//!
//! It is integer arithmetic throughout: the same operations evict the same blocks on every machine.

/// Classes that are told apart: blocks that came back never, once, twice, more often.
pub(super) const NUM_CLASSES: usize = LAST_CLASS as usize + 1;
pub(super) const LAST_CLASS: u8 = 3;

/// The weight of class 0, and the least weight.
const ONE: u64 = 4096;
const LEAST: u64 = ONE / 8;

/// A hit is late from this part of the scaled age at which blocks are evicted.
const LATE: u64 = 3;

/// Evictions, in parts of the pool, between two adaptations; and the least number, some dozens of requests: the
/// blocks of one request come and go together.
const PERIOD: u32 = 4;
const LEAST_PERIOD: u32 = 1024;

/// Strength of the assumption that all classes are hit alike: in parts of the pool, blocks that are counted
/// beside the ones that were seen, and some more for a small pool.
const PRIOR: u32 = 8;
const MORE_PRIOR: u32 = 128;

/// Weights of the classes and what they are learned from.
#[derive(Clone, PartialEq, Eq)]
pub(super) struct TurnWeights {
    weights: [u64; NUM_CLASSES],
    /// Blocks of each class that were taken up late in their lives, or evicted. Old ones fade.
    late_hits: [u64; NUM_CLASSES],
    evictions: [u64; NUM_CLASSES],
    /// Scaled age of the block that was evicted last; 0 before the first.
    evicted_age: u64,
    /// Evictions since the last adaptation.
    num_evictions: u32,
    period: u32,
    prior: u64,
}

impl TurnWeights {
    /// Equal weights, for a pool of `num_blocks`.
    pub(super) fn new(num_blocks: u32) -> Self {
        Self {
            weights: [ONE; NUM_CLASSES],
            late_hits: [0; NUM_CLASSES],
            evictions: [0; NUM_CLASSES],
            evicted_age: 0,
            num_evictions: 0,
            period: (num_blocks / PERIOD).max(LEAST_PERIOD),
            prior: u64::from(num_blocks / PRIOR + MORE_PRIOR),
        }
    }

    /// Age times weight. The greatest is evicted first, and among equals the lowest class.
    #[inline]
    pub(super) fn scaled(&self, class: usize, age: u64) -> u64 {
        age * self.weights[class]
    }

    /// Idle blocks were found again at this age.
    pub(super) fn hit(&mut self, class: usize, age: u64, num_blocks: u64) {
        let late = self.scaled(class, age) * LATE > self.evicted_age && self.evicted_age > 0;
        self.late_hits[class] += u64::from(late) * num_blocks;
    }

    /// A block was evicted at this scaled age.
    #[inline]
    pub(super) fn evicted(&mut self, class: usize, scaled_age: u64) {
        self.evictions[class] += 1;
        self.evicted_age = scaled_age;
        self.num_evictions += 1;
        if self.num_evictions == self.period {
            self.num_evictions = 0;
            self.adapt();
        }
    }

    /// Moves every weight by up to three eighths of itself towards equal gains, and lets the counts fade.
    fn adapt(&mut self) {
        let num_hits: u64 = self.late_hits.iter().sum();
        let num_blocks = num_hits + self.evictions.iter().sum::<u64>();
        let prior_hits = self.prior * (num_hits << 16) / num_blocks;
        // The greater its weight, the shorter is the time in which a class had its late hits.
        let gain: [u64; NUM_CLASSES] = std::array::from_fn(|class| {
            let hits = (self.late_hits[class] << 16) + prior_hits;
            let blocks = self.late_hits[class] + self.evictions[class] + self.prior;
            hits / blocks * self.weights[class]
        });
        for class in 1..NUM_CLASSES {
            let (least, most) = (LEAST, self.weights[class - 1]);
            let weight = self.weights[class];
            // In eighths, from -3 to 3 of the weight.
            let sum = (gain[0] + gain[class]).max(1);
            let up = weight * 3 * gain[0].saturating_sub(gain[class]) / sum / 8;
            let down = weight * 3 * gain[class].saturating_sub(gain[0]) / sum / 8;
            self.weights[class] = (weight + up - down).clamp(least, most);
        }
        for count in self.late_hits.iter_mut().chain(&mut self.evictions) {
            *count -= *count / 8;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Weights after a while in which blocks of each class had these late hits and evictions per round.
    fn learned(rounds: u32, hits: [u32; NUM_CLASSES], evictions: [u32; NUM_CLASSES]) -> [u64; NUM_CLASSES] {
        let mut weights = TurnWeights::new(256);
        for _ in 0..rounds {
            for class in 0..NUM_CLASSES {
                (0..hits[class]).for_each(|_| weights.hit(class, 1_000, 1));
                (0..evictions[class]).for_each(|_| weights.evicted(class, 1_000 * ONE));
            }
        }
        weights.weights
    }

    #[test]
    fn equal_gains_leave_lru() {
        assert_eq!(learned(1000, [0; 4], [5; 4]), [ONE; 4]);
        // Counts are cut short as they fade, so the gains are not quite equal.
        let weights = learned(1000, [3; 4], [5; 4]);
        assert!(
            weights.iter().all(|&weight| weight > ONE * 99 / 100),
            "{weights:?}"
        );
    }

    #[test]
    fn what_comes_back_is_kept_longer_within_bounds() {
        let weights = learned(1000, [1, 3, 6, 9], [9, 7, 4, 1]);
        assert_eq!(weights[0], ONE);
        assert!(weights.is_sorted_by(|a, b| a > b), "{weights:?}");
        assert_eq!(learned(10_000, [0, 9, 9, 9], [9, 1, 1, 1])[1..], [LEAST; 3]);
    }

    #[test]
    fn nothing_is_treated_worse_for_having_been_used() {
        assert_eq!(learned(1000, [9, 1, 0, 0], [1, 9, 9, 9]), [ONE; 4]);
    }

    #[test]
    fn a_lesson_is_unlearned() {
        let mut weights = TurnWeights::new(256);
        for (hits, expected) in [([0, 9], LEAST..ONE / 4), ([9, 0], ONE..ONE + 1)] {
            for _ in 0..10_000 {
                for (class, num_hits) in hits.into_iter().enumerate() {
                    (0..num_hits).for_each(|_| weights.hit(class, 1_000_000, 1));
                    weights.evicted(class, 1_000 * ONE);
                }
            }
            assert!(expected.contains(&weights.weights[1]), "{}", weights.weights[1]);
        }
    }

    #[test]
    fn early_hits_say_nothing() {
        let mut weights = TurnWeights::new(256);
        for _ in 0..1000 {
            weights.hit(3, 100, 1);
            weights.evicted(0, 1_000 * ONE);
        }
        assert_eq!((weights.weights, weights.late_hits), ([ONE; 4], [0; 4]));
    }
}
