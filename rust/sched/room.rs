//! How a running sequence gets the blocks for its next tokens, and at whose cost.
//!
//! Nothing is taken from a sequence that a step in flight holds. What the steps in flight will give back is waited for;
//! only if that is not enough somebody is preempted, and who is in flight is held out of the next step first.

use super::policy;
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;

impl Scheduler {
    /// Gets the blocks for the next `num_tokens` tokens of a running sequence, at the cost of newer ones if need be.
    pub(super) fn make_room(&mut self, idx: SeqIdx, num_tokens: u32) -> bool {
        while let Err(needed) = self.reserve(idx, num_tokens) {
            if !self.take_room(idx, needed) {
                return false;
            }
        }
        true
    }

    /// Makes the slots of the next `num_tokens` tokens of a running sequence writable, or leaves everything as it was and
    /// says how many blocks that takes.
    pub(super) fn reserve(&mut self, idx: SeqIdx, num_tokens: u32) -> Result<(), u32> {
        let sequence = self.sequences.get_mut(idx);
        let (from, to) = (sequence.num_scheduled, sequence.num_scheduled + num_tokens);
        let table = sequence
            .table
            .as_mut()
            .expect("a running sequence has a block table");
        let reserved = table.reserve(&mut self.pool, from, to, &mut self.copies);
        reserved.map_err(|lack| lack.needed)
    }

    /// Preempts somebody, because `idx` needs more blocks than there are. False if it has to sit this step out instead.
    pub(super) fn take_room(&mut self, idx: SeqIdx, needed: u32) -> bool {
        if needed <= self.pool.num_available() + self.num_coming_blocks() {
            return false;
        }
        if let Some(victim) = self.victim(idx) {
            self.preempt(victim);
            return true;
        }
        if !self.steps.is_empty() {
            self.hold_out_for(idx);
        }
        false
    }

    /// A running sequence behind `idx` that is part neither of this step nor of one in flight, chosen by `policy`.
    ///
    /// Without one, `idx` keeps its blocks and sits the step out. The first sequence is never a victim, and it can
    /// take every block that no sequence of this step holds, so something always gets on.
    fn victim(&self, idx: SeqIdx) -> Option<SeqIdx> {
        let oldest = self.oldest_step();
        self.last_behind(idx, |other| {
            other.is_in_flight() || (other.is_beam && self.has_beam_since(other.request, oldest))
        })
    }

    /// Whether a sequence sits out the step that is being built.
    pub(super) fn is_held_out(&self, idx: SeqIdx) -> bool {
        !self.held_out.is_empty() && self.held_out.contains(&idx)
    }

    /// Has a sequence that is in flight sit this step out, so that the next one may take its blocks for `idx`.
    fn hold_out_for(&mut self, idx: SeqIdx) {
        let this = self.step_id;
        let victim = self.last_behind(idx, |other| {
            other.last_step == this || (other.is_beam && self.has_beam_since(other.request, this))
        });
        let Some(victim) = victim else {
            return;
        };
        let sequence = self.sequences.get(victim);
        if sequence.is_beam {
            let beams = &self.requests.of(sequence.request).sequences;
            self.held_out.extend_from_slice(beams);
        } else {
            self.held_out.push(victim);
        }
    }

    /// Of the running sequences behind `idx` that are not spared, the first to lose its blocks. Taking a beam takes its
    /// group, so those of the same request are spared too.
    fn last_behind(&self, idx: SeqIdx, is_spared: impl Fn(&Sequence) -> bool) -> Option<SeqIdx> {
        let Sequence { key, request, .. } = *self.sequences.get(idx);
        let may_lose = |&other: &SeqIdx| {
            let other = self.sequences.get(other);
            !(is_spared(other) || (other.is_beam && other.request == request))
        };
        self.queues
            .running_after(key)
            .filter(may_lose)
            .max_by_key(|&other| {
                let sequence = self.sequences.get(other);
                policy::victim_rank(sequence.key, sequence.num_preemptions)
            })
    }

    /// Blocks that the steps in flight give back for certain: fenced ones, and those of sequences that reach their
    /// length in them.
    fn num_coming_blocks(&self) -> u32 {
        if self.steps.is_empty() {
            return 0;
        }
        let running = self.queues.running().map(|idx| self.sequences.get(idx));
        let own = running
            .filter(|sequence| sequence.ends_in_flight())
            .flat_map(|sequence| sequence.table().blocks())
            .filter(|&&block| self.pool.ref_count(block) == 1);
        let num_own = u32::try_from(own.count()).expect("no more than the pool has");
        num_own + self.pool.num_fenced_by_steps() + self.num_blocks_of_fences()
    }
}
