//! How much a step takes on: a budget of tokens and rows, and the parts of sequences that it is spent on.

use super::sequence::Sequence;
use super::slab::SeqIdx;

/// A sequence's place in the step that is being built or in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scheduled {
    pub(super) seq: SeqIdx,
    /// Tokens that are computed before it.
    pub(super) num_computed: u32,
    pub(super) num_tokens: u32,
    /// Rows that sample its last token: 0 for a chunk that does not reach the end.
    pub(super) num_rows: u32,
}

/// What a step may still take on.
pub(super) struct Budget {
    pub(super) tokens: u32,
    pub(super) rows: u32,
}

impl Budget {
    /// The part that fits of the tokens which a sequence has beyond `num_computed`, or None where its rows do not.
    pub(super) fn part_of(&self, seq: SeqIdx, sequence: &Sequence, num_computed: u32) -> Option<Scheduled> {
        let num_remaining = sequence.num_alone() - num_computed;
        let num_tokens = num_remaining.min(self.tokens);
        let num_rows = if num_computed + num_tokens == sequence.num_tokens() {
            sequence.num_rows()
        } else {
            0
        };
        (num_tokens > 0 && num_rows <= self.rows).then_some(Scheduled {
            seq,
            num_computed,
            num_tokens,
            num_rows,
        })
    }
}
