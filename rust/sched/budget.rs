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
    /// The row of the step in flight that samples its token; -1 where its tokens are known.
    pub(super) source: i32,
}

/// What a step may still take on.
pub(super) struct Budget {
    pub(super) tokens: u32,
    pub(super) rows: u32,
}

impl Budget {
    /// The part that fits of what a running sequence may compute next, or None where its rows do not.
    pub(super) fn part_of(&self, seq: SeqIdx, sequence: &Sequence) -> Option<Scheduled> {
        self.part(seq, sequence, sequence.num_scheduled, sequence.num_schedulable())
    }

    /// The same for one that begins to run with `num_computed` tokens.
    pub(super) fn first_part_of(
        &self,
        seq: SeqIdx,
        sequence: &Sequence,
        num_computed: u32,
    ) -> Option<Scheduled> {
        self.part(seq, sequence, num_computed, sequence.num_alone() - num_computed)
    }

    fn part(&self, seq: SeqIdx, sequence: &Sequence, num_computed: u32, most: u32) -> Option<Scheduled> {
        let num_tokens = most.min(self.tokens);
        let num_known = sequence.num_tokens();
        let num_rows = if num_computed + num_tokens >= num_known {
            sequence.num_rows()
        } else {
            0
        };
        let source = if num_computed < num_known {
            -1
        } else {
            sequence.row.cast_signed()
        };
        (num_tokens > 0 && num_rows <= self.rows).then_some(Scheduled {
            seq,
            num_computed,
            num_tokens,
            num_rows,
            source,
        })
    }
}
