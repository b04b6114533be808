//! How a sequence leaves the running ones: it ends, or it is preempted.

use crate::ids::RequestId;

use super::request::FinishReason;
use super::scheduler::Scheduler;
use super::sequence::Status;
use super::slab::SeqIdx;
use super::step::Ended;

impl Scheduler {
    /// Ends every sample of a request, forked or not.
    pub(super) fn end_request(&mut self, request: RequestId, reason: FinishReason) {
        let live: Vec<SeqIdx> = self
            .sequences
            .iter()
            .filter(|(_, sequence)| sequence.request == request)
            .map(|(idx, _)| idx)
            .collect();
        for idx in live {
            self.end_sequence(idx, reason, true);
        }
    }

    /// Releases a sequence. `outside`: no commit reports its end, so the next step does.
    pub(super) fn end_sequence(&mut self, idx: SeqIdx, reason: FinishReason, outside: bool) {
        let mut sequence = self.sequences.remove(idx);
        match sequence.status {
            Status::Waiting => assert!(
                self.waiting.remove(&sequence.key).is_some(),
                "it is in the queue of its status"
            ),
            Status::Running => self.running.retain(|&other| other != idx),
        }
        if let Some(table) = sequence.table.as_mut() {
            table.release(&mut self.pool);
        }
        let num_samples = sequence.num_rows();
        for sample_index in sequence.key.sample_index..sequence.key.sample_index + num_samples {
            if outside {
                self.ended.push_back(Ended {
                    request: sequence.request,
                    sample_index,
                    reason,
                });
            }
        }
        let counter = match reason {
            FinishReason::Stop => &mut self.stats.finished_stop,
            FinishReason::Length => &mut self.stats.finished_length,
            FinishReason::Abort => &mut self.stats.finished_abort,
            FinishReason::Error => &mut self.stats.finished_error,
        };
        *counter += u64::from(num_samples);
        let slot = sequence.request.slot() as usize;
        let live = self.requests[slot]
            .as_mut()
            .expect("a live sequence has a live request");
        live.num_live -= num_samples;
        if live.num_live == 0 {
            self.requests[slot] = None;
            self.edge.shared.flags.retire(sequence.request);
        }
    }

    /// Takes a sequence's blocks; it waits again and computes its tokens anew, except those still found by prefix.
    pub(super) fn preempt(&mut self, idx: SeqIdx) {
        self.running.retain(|&other| other != idx);
        let sequence = self.sequences.get_mut(idx);
        sequence.status = Status::Waiting;
        sequence.num_computed_before = sequence.num_computed_before.max(sequence.num_computed);
        sequence.num_computed = 0;
        sequence.num_preemptions += 1;
        let mut table = sequence
            .table
            .take()
            .expect("a running sequence has a block table");
        table.release(&mut self.pool);
        self.waiting.insert(sequence.key, idx);
        self.stats.preemptions += 1;
    }
}
