//! Prefixes that may be bad: what sequences without a next token have computed or found.
//!
//! Bad keys and values spoil every later token of their sequence. So whoever was sampled with a block in its past has
//! shown that the block is good: sequences that decode have, and so has everything that pins and sessions keep. A block
//! that only others hold is withdrawn from the prefix index with all that follows it, although they go on reading it. If
//! it stayed, whoever came while one of them holds it would find it and fail as well, without an end.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};

use crate::block::BlockTable;
use crate::ids::{BlockId, RequestId};

use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;

impl Scheduler {
    /// Has nobody find what sequences that could not be sampled hold, as far as nothing speaks for it. `sampled`: the
    /// requests that the same step did sample. What an idle block follows stays: as a rule somebody ended well beyond it.
    pub(super) fn withdraw(&mut self, failed: &[SeqIdx], sampled: &[RequestId]) {
        let is_suspect = |idx: SeqIdx, sequence: &Sequence| {
            let is_proven = sequence.has_proven() || sampled.contains(&sequence.request);
            sequence.table.is_some() && (failed.contains(&idx) || !is_proven)
        };
        let all = self.sequences.iter();
        let suspects = all.filter(|&(idx, sequence)| is_suspect(idx, sequence));
        let suspects: Vec<SeqIdx> = suspects.map(|(idx, _)| idx).collect();
        let mut num_suspects: HashMap<BlockId, u32> = HashMap::new();
        for &idx in &suspects {
            for &block in self.sequences.get(idx).table().blocks() {
                *num_suspects.entry(block).or_default() += 1;
            }
        }
        let tables = failed
            .iter()
            .filter_map(|&idx| self.sequences.get(idx).table.as_ref());
        let bad: HashSet<BlockId> = tables
            .flat_map(BlockTable::blocks)
            .copied()
            .filter(|block| num_suspects[block] == self.pool.num_tables(*block))
            .collect();
        let mut withdrawn = Vec::new();
        for idx in suspects {
            let table = self.sequences.get_mut(idx).table.as_mut();
            let table = table.expect("a suspect holds blocks");
            if let Some(first) = table.blocks().iter().position(|block| bad.contains(block)) {
                withdrawn.extend(table.blocks().iter().copied().enumerate().skip(first));
                table.seal();
            }
        }
        // The last ones first, since a published block needs a published parent.
        withdrawn.sort_unstable_by_key(|&place| Reverse(place));
        withdrawn.dedup();
        for (_, block) in withdrawn {
            self.pool.withdraw(block);
        }
    }
}
