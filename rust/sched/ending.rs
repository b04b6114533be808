//! How a sequence leaves the running ones: it ends, or it is preempted.

use crate::ids::RequestId;

use super::request::FinishReason;
use super::scheduler::Scheduler;
use super::slab::SeqIdx;
use super::step::Ended;

impl Scheduler {
    /// Ends every sample of a request, forked or not. Nothing happens if all of them have ended.
    pub(super) fn end_request(&mut self, request: RequestId, reason: FinishReason) {
        let sequences = self
            .requests
            .find(request)
            .map_or_else(Vec::new, |live| live.sequences.clone());
        for idx in sequences {
            self.end_sequence(idx, reason, true);
        }
    }

    /// Releases a sequence. `outside`: no commit reports its end, so the next step does.
    pub(super) fn end_sequence(&mut self, idx: SeqIdx, reason: FinishReason, outside: bool) {
        let mut sequence = self.sequences.remove(idx);
        let request = sequence.request;
        self.queues.remove(sequence.tenant, sequence.key);
        if let Some(table) = sequence.table.as_mut() {
            // A step that failed may not have made the copy that the tail begins with.
            if reason != FinishReason::Error {
                table.publish_tail(&mut self.pool, &sequence.tokens, sequence.num_computed);
            }
            table.release(&mut self.pool);
        }
        if outside {
            let first = sequence.key.sample_index;
            let samples = first..first + sequence.num_rows();
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
        *counter += u64::from(sequence.num_rows());
        let live = self.requests.of_mut(request);
        self.tenant_counts[live.share].generation_tokens += u64::from(sequence.num_generated());
        live.sequences.retain(|&other| other != idx);
        if live.sequences.is_empty() {
            let num_computed = sequence.num_computed;
            self.explanations.ended(&self.pool, request, num_computed);
            self.requests.remove(request);
            self.tenants.leave(sequence.tenant);
            self.edge.shared.flags.retire(request);
        }
    }

    /// Takes a sequence's blocks; it waits again and computes its tokens anew, except those still found by prefix.
    pub(super) fn preempt(&mut self, idx: SeqIdx) {
        let sequence = self.sequences.get_mut(idx);
        let num_computed = std::mem::take(&mut sequence.num_computed);
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
