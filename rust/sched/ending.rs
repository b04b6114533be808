//! How a sequence leaves the running ones: it ends, or it is preempted.

use crate::ids::RequestId;

use super::request::{CachePriority, FinishReason};
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;
use super::step::{Ended, row_request};

impl Scheduler {
    /// Ends every sample of a request, forked or not. Nothing happens if all of them have ended.
    pub(super) fn end_request(&mut self, request: RequestId, reason: FinishReason) {
        for idx in self.sequences_of(request) {
            self.end_sequence(idx, reason, true);
        }
    }

    /// Those of a request that have not ended.
    fn sequences_of(&self, request: RequestId) -> Vec<SeqIdx> {
        let live = self.requests.find(request);
        live.map_or_else(Vec::new, |live| live.sequences.clone())
    }

    /// Ends the requests of rows of the oldest step in flight that could not be sampled. What the step computed of them is
    /// void, as if they had been aborted while it was: nobody is to find a block of whatever made such logits, nor, if
    /// that may be bad as well, what earlier steps computed.
    pub(super) fn end_unsampled(&mut self, tokens: &[i32]) {
        if tokens.iter().all(|&token| token >= 0) {
            return;
        }
        let Some(step) = self.steps.oldest() else {
            return;
        };
        let (mut failed, mut sampled) = (Vec::new(), Vec::new());
        for (&token, row) in tokens.iter().zip(&step.rows) {
            let requests = if token < 0 { &mut failed } else { &mut sampled };
            requests.push(row_request(row));
        }
        failed.sort_unstable();
        failed.dedup();
        let failed = failed.into_iter().flat_map(|request| self.sequences_of(request));
        let failed: Vec<SeqIdx> = failed.collect();
        self.withdraw(&failed, &sampled);
        for idx in failed {
            self.end_sequence(idx, FinishReason::Error, true);
        }
    }

    /// Releases a sequence. `outside`: no commit reports its end, so the next step does.
    pub(super) fn end_sequence(&mut self, idx: SeqIdx, reason: FinishReason, outside: bool) {
        let mut sequence = self.sequences.remove(idx);
        let request = sequence.request;
        let was_in_flight = sequence.is_in_flight();
        self.vacate(idx, was_in_flight);
        self.queues.remove(sequence.tenant, sequence.key);
        // A step that failed may not have made the copy that the tail begins with, and one in flight may still fail.
        if reason != FinishReason::Error
            && !self.is_tail_awaited(&sequence)
            && let Some(table) = sequence.table.as_mut()
        {
            table.publish_tail(&mut self.pool, &sequence.tokens, sequence.num_computed);
        }
        if was_in_flight {
            self.fence(&mut sequence);
        }
        if let Some(promise) = self.requests.of(request).request.params.promise {
            self.settle_promise(promise, &mut sequence, reason);
        }
        self.release_table(&mut sequence);
        self.drop_swapped(&mut sequence);
        let first = sequence.key.sample_index;
        // A group of beams ends as a unit, as all the answers that it would have given.
        let num_samples = match self.beams.get(&request) {
            Some(group) if first == 0 => group.width(),
            Some(_) => 0,
            None => sequence.num_rows(),
        };
        if outside {
            let samples = first..first + num_samples;
            self.ended.extend(samples.map(|sample_index| Ended {
                request,
                sample_index,
                reason,
            }));
        }
        let counter = match reason {
            FinishReason::Stop => &mut self.stats.finished_stop,
            FinishReason::Length => &mut self.stats.finished_length,
            FinishReason::Abort => &mut self.stats.finished_abort,
            FinishReason::Error => &mut self.stats.finished_error,
        };
        *counter += u64::from(num_samples);
        let live = self.requests.of_mut(request);
        self.tenant_counts[live.share].generation_tokens += u64::from(sequence.num_generated());
        live.sequences.retain(|&other| other != idx);
        if live.sequences.is_empty() {
            let num_computed = sequence.num_computed;
            self.explanations.ended(&self.pool, request, num_computed);
            self.requests.remove(request);
            self.beams.remove(&request);
            self.tenants.leave(sequence.tenant);
            self.edge.shared.flags.retire(request);
        }
    }

    /// Releases the table of a sequence that has ended, as its request's cache priority asks.
    fn release_table(&mut self, sequence: &mut Sequence) {
        let Some(table) = sequence.table.as_mut() else {
            return;
        };
        match self.requests.of(sequence.request).request.params.cache_priority {
            CachePriority::Normal => table.release(&mut self.pool),
            CachePriority::Low => {
                let num_found = sequence.words.num_cached_tokens().unwrap_or(0);
                table.release_first_out(&mut self.pool, num_found / self.config.block_size);
            }
        }
    }

    /// Takes a sequence's blocks; it waits again, to get them back from host memory or to compute its tokens anew, except those
    /// still found by prefix. A beam takes all of its group along.
    pub(super) fn preempt(&mut self, idx: SeqIdx) {
        let sequence = self.sequences.get(idx);
        let idx = if sequence.is_beam {
            self.park_beams(sequence.request)
        } else {
            idx
        };
        let swapped = self.swap_out(idx);
        let sequence = self.sequences.get_mut(idx);
        assert!(!sequence.is_in_flight(), "a sequence in flight keeps its blocks");
        sequence.swapped = swapped;
        let num_computed = std::mem::take(&mut sequence.num_computed);
        sequence.num_scheduled = 0;
        sequence.num_computed_before = sequence.num_computed_before.max(num_computed);
        sequence.num_preemptions += 1;
        let mut table = sequence
            .table
            .take()
            .expect("a running sequence has a block table");
        table.publish_tail(&mut self.pool, &sequence.tokens, num_computed);
        table.release(&mut self.pool);
        sequence.num_admitted_before = self.num_admitted;
        self.queues.remove(sequence.tenant, sequence.key);
        self.queues.wait(sequence.tenant, sequence.key, idx);
        self.stats.preemptions += 1;
    }
}
