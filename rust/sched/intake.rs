//! What came from other threads since the last step: blocks, requests, early ends, aborts.

use std::sync::Arc;

use crate::ids::RequestId;

use super::beam_group::BeamGroup;
use super::edge::{Finish, Submission};
use super::live::LiveRequest;
use super::queues::QueueKey;
use super::request::FinishReason;
use super::scheduler::Scheduler;
use super::sequence::{EndRule, Sequence};
use super::step::RowWords;

/// Requests that one step takes in at most. Without a bound a client that submits and aborts as fast as it can would
/// keep the step from being taken.
const MAX_ARRIVALS_PER_STEP: u32 = 256;

impl Scheduler {
    /// Takes in requests first, so that an early end finds the request that it names.
    pub(super) fn drain(&mut self) {
        self.take_returned();
        let mut num_arrivals = 0;
        while num_arrivals < MAX_ARRIVALS_PER_STEP
            && let Some(submission) = self.inbox.pop()
        {
            self.enqueue(submission);
            num_arrivals += 1;
        }
        if num_arrivals == MAX_ARRIVALS_PER_STEP {
            // There may be more, whose bell has been answered already.
            self.edge.wake();
        }
        let shared = Arc::clone(&self.edge.shared);
        for finish in shared.finishes.take_all() {
            self.finish_outside(finish);
        }
        if shared.flags.take_any_aborted() {
            let ids = self.requests.iter().map(|live| live.id);
            let aborted: Vec<RequestId> = ids.filter(|&id| shared.flags.is_aborted(id)).collect();
            for id in aborted {
                self.end_request(id, FinishReason::Abort);
            }
        }
    }

    fn enqueue(&mut self, (id, mut request): Submission) {
        let tokens = std::mem::take(&mut request.prompt);
        let tenant = self.tenants.enter(&request.salt);
        let promise = request.params.promise;
        request.params.promise = promise.filter(|&promise| self.holds.take_up(promise, &request.salt));
        let key = QueueKey {
            priority: request.params.priority,
            arrival: self.num_arrived,
            sample_index: 0,
        };
        self.num_arrived += 1;
        let idx = self.sequences.insert(Sequence {
            request: id,
            tenant,
            key,
            words: RowWords::new(id, &request.params),
            end_rule: EndRule::new(&request.params),
            prompt_len: u32::try_from(tokens.len()).expect("submit bounds the prompt"),
            tokens,
            num_computed: 0,
            num_scheduled: 0,
            row: 0,
            table: None,
            pending_forks: request.params.n - 1,
            is_beam: false,
            num_computed_before: 0,
            num_preemptions: 0,
            hashes: std::mem::take(&mut request.hashes),
            num_passed: 0,
            num_deferrals: 0,
            num_admitted_before: self.num_admitted,
            // Whoever submitted it knew of no other weights when it hashed the prompt.
            model_epoch: 0,
            last_step: 0,
        });
        self.queues.wait(tenant, key, idx);
        let share = self.pool.share_of(&request.salt);
        self.tenant_counts[share].requests += 1;
        if let Some(group) = BeamGroup::new(&request.params, self.config.eos_token_ids.len()) {
            self.beams.insert(id, group);
        }
        self.requests.insert(LiveRequest {
            id,
            request,
            share,
            sequences: vec![idx],
        });
        // An abort that came before this moment was raised for a request which no scan could find yet.
        if self.edge.shared.flags.is_aborted(id) {
            self.end_request(id, FinishReason::Abort);
        }
    }

    /// Ends a sample at a stop string that was found outside.
    ///
    /// What was generated beyond it goes with its blocks. A sample that ended by itself in the meantime, in the one
    /// step that was under way, stays as it ended: its blocks hold what its tokens say, and nothing leads there but
    /// the same tokens. A session that it left behind ends where its answer does.
    fn finish_outside(&mut self, finish: Finish) {
        let Some(live) = self.requests.find(finish.request) else {
            self.holds
                .shorten_answer(&mut self.pool, finish.request, finish.num_tokens);
            return;
        };
        if self.beams.contains_key(&finish.request) {
            // A beam is no answer yet, so none can have been cut.
            return;
        }
        let is_meant = |idx: &_| self.sequences.get(*idx).key.sample_index == finish.sample_index;
        let Some(idx) = live.sequences.iter().copied().find(is_meant) else {
            return;
        };
        let sequence = self.sequences.get_mut(idx);
        let num_beyond = sequence.num_generated().saturating_sub(finish.num_tokens);
        let num_kept = sequence.num_tokens() - num_beyond;
        let num_in_flight = sequence.num_scheduled - sequence.num_computed;
        let dropped = sequence
            .table
            .as_mut()
            .map(|table| table.cut(&mut self.pool, num_kept));
        sequence.tokens.truncate(num_kept as usize);
        sequence.num_computed = sequence.num_computed.min(num_kept);
        sequence.num_scheduled = sequence.num_computed + num_in_flight;
        if let Some(dropped) = dropped {
            self.drop_blocks(idx, dropped);
        }
        self.stats.discarded_tokens += u64::from(num_beyond);
        self.end_sequence(idx, FinishReason::Stop, true);
    }
}
