//! What came from other threads since the last step: requests, early ends, aborts.

use std::sync::Arc;

use crate::ids::RequestId;

use super::edge::Finish;
use super::request::{FinishReason, Request};
use super::scheduler::{LiveRequest, Scheduler};
use super::sequence::{QueueKey, Sequence, Status};

impl Scheduler {
    /// Takes in requests first, so that an early end finds the request that it names.
    pub(super) fn drain(&mut self) {
        while let Some(request) = self.inbox.pop() {
            self.enqueue(request);
        }
        let shared = Arc::clone(&self.edge.shared);
        for finish in shared.finishes.take_all() {
            self.finish_outside(finish);
        }
        if shared.flags.take_any_aborted() {
            let aborted: Vec<RequestId> = self
                .requests
                .iter()
                .flatten()
                .map(|live| live.request.id)
                .filter(|&id| shared.flags.is_aborted(id))
                .collect();
            for id in aborted {
                self.end_request(id, FinishReason::Abort);
            }
        }
    }

    fn enqueue(&mut self, mut request: Box<Request>) {
        let tokens = std::mem::take(&mut request.prompt);
        let key = QueueKey {
            arrival: self.num_arrived,
            sample_index: 0,
        };
        self.num_arrived += 1;
        let sequence = Sequence {
            request: request.id,
            key,
            status: Status::Waiting,
            prompt_len: u32::try_from(tokens.len()).expect("submit bounds the prompt"),
            tokens,
            num_computed: 0,
            table: None,
            pending_forks: request.params.n - 1,
            num_computed_before: 0,
            num_preemptions: 0,
            last_step: 0,
        };
        let (id, slot) = (request.id, request.id.slot() as usize);
        let num_live = request.params.n;
        let idx = self.sequences.insert(sequence);
        self.waiting.insert(key, idx);
        let live = LiveRequest {
            request,
            num_live,
            num_cached_tokens: 0,
            admitted: false,
        };
        assert!(
            self.requests[slot].replace(live).is_none(),
            "a flag slot belongs to one live request"
        );
        // An abort that came before this moment was raised for a request which no scan could find yet.
        if self.edge.shared.flags.is_aborted(id) {
            self.end_request(id, FinishReason::Abort);
        }
    }

    fn finish_outside(&mut self, finish: Finish) {
        let found = self.sequences.iter().find(|(_, sequence)| {
            sequence.request == finish.request && sequence.key.sample_index == finish.sample_index
        });
        // It may have ended by itself in the meantime, which is no fault of the caller's.
        let Some((idx, sequence)) = found else { return };
        let num_beyond = sequence.num_generated().saturating_sub(finish.num_tokens);
        self.stats.generation_tokens -= u64::from(num_beyond);
        let kept = sequence.num_tokens() - num_beyond;
        let sequence = self.sequences.get_mut(idx);
        if let Some(table) = sequence.table.as_mut() {
            table.truncate(&mut self.pool, kept);
        }
        self.end_sequence(idx, FinishReason::Stop, true);
    }
}
