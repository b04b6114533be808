//! The place in a ranking of tokens where a filter cuts it, found without sorting the vocabulary.
//!
//! Tokens are ranked by score, the highest first, and by id among equal scores. A filter keeps the shortest prefix
//! whose measure reaches a target: a count of tokens (top-k) or their mass (top-p). Scores are at most zero, so that
//! their bits without the sign, taken as an integer, rank them; the place is found by bisection of that integer, each
//! step one pass over the scores, and by sorting the few that are left between the bounds. Called by `sample` and
//! `logprobs`.

#![expect(
    clippy::inline_always,
    reason = "must be compiled with the instruction set of its caller"
)]

use super::isa::LANES;

/// Tokens between the bounds from which on they are sorted.
const SORT_LEN: usize = 128;

/// Rank of a score that is at most zero: ascending where scores descend.
#[inline(always)]
pub(super) fn rank(score: f32) -> u32 {
    score.to_bits() & 0x7fff_ffff
}

/// The last token that is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Cut {
    rank: u32,
    id: usize,
}

impl Cut {
    /// Whether a token is at or before the cut.
    #[inline(always)]
    pub(super) fn keeps(self, score: f32, id: usize) -> bool {
        let rank = rank(score);
        rank < self.rank || (rank == self.rank && id <= self.id)
    }

    /// Ends the shortest prefix whose measure reaches `target`, which is not zero; None if that of all tokens does not.
    #[inline(always)]
    pub(super) fn find(scores: &[f32], measure: &impl Measure, target: u64) -> Option<Self> {
        // The answer lies at a rank above `low` (below all ranks at first) and at most `high`.
        let mut low: Option<u32> = None;
        let mut high = rank(f32::NEG_INFINITY);
        let (mut before, mut num_before) = (0, 0);
        let (total, mut num_within) = measure.up_to(scores, high);
        if total < target {
            return None;
        }
        while num_within - num_before > SORT_LEN && low.map_or(0, |low| low + 1) < high {
            let first = low.map_or(0, |low| low + 1);
            let middle = first + (high - first) / 2;
            let (reached, count) = measure.up_to(scores, middle);
            if reached >= target {
                (high, num_within) = (middle, count);
            } else {
                low = Some(middle);
                (before, num_before) = (reached, count);
            }
        }
        let mut between: Vec<(u32, usize)> = Vec::with_capacity(num_within - num_before);
        for (start, chunk) in (0..).step_by(LANES).zip(scores.chunks(LANES)) {
            let inside = |score: f32| rank(score) <= high && low.is_none_or(|low| rank(score) > low);
            if chunk.iter().fold(false, |any, &score| any | inside(score)) {
                let tokens = chunk.iter().zip(start..).filter(|(score, _)| inside(**score));
                between.extend(tokens.map(|(&score, id)| (rank(score), id)));
            }
        }
        between.sort_unstable();
        for (rank, id) in between {
            before += measure.of(id);
            if before >= target {
                return Some(Self { rank, id });
            }
        }
        None
    }
}

/// What is summed up along the ranking.
pub(super) trait Measure {
    /// The measure of a token.
    fn of(&self, id: usize) -> u64;
    /// Measure and number of the tokens up to a rank.
    fn up_to(&self, scores: &[f32], last: u32) -> (u64, usize);
}

/// Every token counts one.
pub(super) struct Count;

impl Measure for Count {
    #[inline(always)]
    fn of(&self, _id: usize) -> u64 {
        1
    }

    #[inline(always)]
    fn up_to(&self, scores: &[f32], last: u32) -> (u64, usize) {
        let count: u32 = scores.iter().map(|&score| u32::from(rank(score) <= last)).sum();
        (u64::from(count), count as usize)
    }
}

/// A token counts its mass; there is one for each score.
pub(super) struct Mass<'a>(pub(super) &'a [u32]);

impl Measure for Mass<'_> {
    #[inline(always)]
    fn of(&self, id: usize) -> u64 {
        u64::from(self.0[id])
    }

    #[inline(always)]
    fn up_to(&self, scores: &[f32], last: u32) -> (u64, usize) {
        let (mut sum, mut count) = (0_u64, 0_u32);
        for (&score, &mass) in scores.iter().zip(self.0) {
            let within = rank(score) <= last;
            sum += u64::from(if within { mass } else { 0 });
            count += u32::from(within);
        }
        (sum, count as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// By sorting everything.
    fn sorted(scores: &[f32], measure: &impl Measure, target: u64) -> Option<Cut> {
        let mut order: Vec<(u32, usize)> = scores.iter().map(|&score| rank(score)).zip(0..).collect();
        order.sort_unstable();
        let mut sum = 0;
        order.into_iter().find_map(|(rank, id)| {
            sum += measure.of(id);
            (sum >= target).then_some(Cut { rank, id })
        })
    }

    proptest! {
        #[test]
        fn the_cut_is_that_of_a_sorted_list(
            // Few distinct scores, so that there are ties of any length.
            picks in proptest::collection::vec((0..9_usize, 0..50_u32), 1..700),
            target in 1..1000_u64,
        ) {
            let values = [0.0, -1e-40, -0.5, -0.500_000_1, -1.0, -7.25, -80.0, -3e38, f32::NEG_INFINITY];
            let scores: Vec<f32> = picks.iter().map(|&(pick, _)| values[pick]).collect();
            let masses: Vec<u32> = picks.iter().map(|&(_, mass)| mass).collect();
            prop_assert_eq!(Cut::find(&scores, &Count, target), sorted(&scores, &Count, target));
            let mass = Mass(&masses);
            prop_assert_eq!(Cut::find(&scores, &mass, target), sorted(&scores, &mass, target));
        }

        #[test]
        fn distinct_scores_are_cut_alike(count in 1..3000_u16, target in 1..3000_u64) {
            let scores: Vec<f32> = (0..count).map(|idx| -f32::from(idx.wrapping_mul(7919) % count)).collect();
            prop_assert_eq!(Cut::find(&scores, &Count, target), sorted(&scores, &Count, target));
        }
    }
}
