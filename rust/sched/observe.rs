//! What can be seen from outside: counters after every step, sequences on demand.

use crate::ids::{BlockId, RequestId};

use super::explain::Explanation;
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

/// What a share's requests did, since start.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct TenantCounts {
    pub(super) requests: u64,
    pub(super) prefix_queries: u64,
    pub(super) prefix_hits: u64,
    pub(super) generation_tokens: u64,
}

/// A tenant that was named in the configuration, or all others together.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[expect(missing_docs, reason = "the names are those of the statistics")]
pub struct TenantView {
    pub requests: u64,
    pub prefix_queries: u64,
    pub prefix_hits: u64,
    pub generation_tokens: u64,
    pub blocks_cached: u32,
    pub evictions: u64,
}

impl Scheduler {
    /// All tenants that were not named first, then the named ones in their order.
    pub fn tenants(&self) -> Vec<TenantView> {
        let shares = self.pool.share_counts().iter();
        shares
            .zip(&self.tenant_counts)
            .map(|(share, counts)| TenantView {
                requests: counts.requests,
                prefix_queries: counts.prefix_queries,
                prefix_hits: counts.prefix_hits,
                generation_tokens: counts.generation_tokens,
                blocks_cached: share.num_published,
                evictions: share.num_evictions,
            })
            .collect()
    }

    /// Why a request was found in the cache as far as it was. None where it was not admitted yet, is forgotten, or
    /// has another salt.
    pub fn explain(&self, request: RequestId, salt: &[u8]) -> Option<&Explanation> {
        self.explanations.get(request, salt)
    }

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

    /// Blocks that pins and sessions hold.
    pub const fn num_pinned_blocks(&self) -> u32 {
        self.holds.blocks().len()
    }

    pub(super) fn publish_stats(&mut self) {
        self.stats.num_running = self.queues.num_running() as u64;
        self.stats.num_waiting = self.queues.num_waiting() as u64;
        self.stats.evictions = self.pool.num_evictions();
        self.stats.blocks_total = self.pool.num_blocks().into();
        self.stats.blocks_free = self.pool.num_free().into();
        self.stats.blocks_idle = self.pool.num_idle().into();
        let num_of_fences = self.num_blocks_of_fences();
        self.stats.blocks_owned = (self.pool.num_owned() - num_of_fences).into();
        self.stats.blocks_fenced = (self.pool.num_fenced() + num_of_fences).into();
        self.stats.blocks_pinned = self.holds.blocks().len().into();
        self.stats.blocks_promised = self.holds.num_promised().into();
        self.stats.blocks_pin_budget = self.holds.budget().into();
        self.stats.num_pins = self.holds.num_pins() as u64;
        self.stats.num_sessions = self.holds.num_sessions() as u64;
        self.edge.shared.stats.publish(&self.stats);
    }

    /// Counts the token slots of running sequences' blocks that hold no token. A tail that several samples share counts
    /// once.
    ///
    /// What the steps in flight compute has its slots already, so a commit changes nothing unless a sequence ends or
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
            wasted += u64::from(table.len() * self.config.block_size - sequence.num_scheduled);
        }
        self.stats.wasted_slots = wasted;
    }
}
