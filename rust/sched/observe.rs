//! What can be seen from outside: counters after every step, sequences on demand.

use crate::ids::{BlockId, RequestId};

use super::scheduler::Scheduler;
use super::sequence::Sequence;

/// One sequence as a snapshot shows it.
#[derive(Clone, Debug)]
#[expect(missing_docs, reason = "the names are the glossary's")]
pub struct SequenceView {
    pub request: RequestId,
    pub sample_index: u32,
    pub running: bool,
    pub num_tokens: u32,
    pub num_computed: u32,
    pub num_preemptions: u32,
    pub blocks: Vec<BlockId>,
}

impl Scheduler {
    /// Every live sequence, the oldest first.
    pub fn sequences(&self) -> Vec<SequenceView> {
        let mut live: Vec<&Sequence> = self.sequences.iter().map(|(_, sequence)| sequence).collect();
        live.sort_by_key(|sequence| sequence.key);
        live.into_iter()
            .map(|sequence| SequenceView {
                request: sequence.request,
                sample_index: sequence.key.sample_index,
                running: sequence.table.is_some(),
                num_tokens: sequence.num_tokens(),
                num_computed: sequence.num_computed,
                num_preemptions: sequence.num_preemptions,
                blocks: sequence
                    .table
                    .as_ref()
                    .map_or_else(Vec::new, |table| table.blocks().to_vec()),
            })
            .collect()
    }

    pub(super) fn publish_stats(&mut self) {
        self.stats.num_running = self.queues.num_running() as u64;
        self.stats.num_waiting = self.queues.num_waiting() as u64;
        self.stats.evictions = self.pool.num_evictions();
        self.stats.blocks_total = self.pool.num_blocks().into();
        self.stats.blocks_free = self.pool.num_free().into();
        self.stats.blocks_idle = self.pool.num_idle().into();
        self.stats.blocks_owned = self.pool.num_owned().into();
        self.stats.blocks_fenced = self.pool.num_fenced().into();
        self.edge.shared.stats.publish(&self.stats);
    }

    /// Counts the token slots of owned blocks that hold no token. A tail that several samples share counts once.
    ///
    /// What the step in flight computes has its slots already, so a commit changes nothing unless a sequence ends or
    /// is forked.
    pub(super) fn count_wasted_slots(&mut self) {
        // Only samples of one request share a block that is not full.
        let forked = self.queues.has_forks();
        let mut shared_tails: Vec<BlockId> = Vec::new();
        let mut wasted = 0;
        for idx in self.queues.running() {
            let sequence = self.sequences.get(idx);
            let table = sequence.table();
            if forked
                && let Some(&tail) = table.blocks().last()
                && self.pool.ref_count(tail) > 1
            {
                if shared_tails.contains(&tail) {
                    continue;
                }
                shared_tails.push(tail);
            }
            wasted += u64::from(table.len() * self.config.block_size - sequence.num_computed);
        }
        let num_scheduled: u32 = self.scheduled.iter().map(|part| part.num_tokens).sum();
        self.stats.wasted_slots = wasted - u64::from(num_scheduled);
    }
}
