//! The short way of sequences that decode: most steps consist of them, and what such a step costs is the instructions
//! that it takes for each one. Whatever is not ordinary goes the way of all sequences, in [`super::scheduler`].

use super::budget::{Budget, Scheduled};
use super::scheduler::Scheduler;

impl Scheduler {
    /// Schedules the next token of running sequences from the place `at` on, up to the first one that does not decode
    /// or finds no block. Returns how many.
    pub(super) fn schedule_ready(&mut self, at: usize, budget: &mut Budget) -> u32 {
        let running = self.queues.running_from(at);
        let most = running.len().min(budget.tokens.min(budget.rows) as usize);
        let (step_id, num_before) = (self.step_id, self.scheduled.len());
        let ready = running[..most].iter().map_while(|&(_, idx)| {
            let sequence = self.sequences.get_mut(idx);
            let num_computed = sequence.num_computed;
            if !sequence.decodes() || sequence.last_step == step_id {
                return None;
            }
            let table = sequence.table.as_mut()?;
            let reserved = table.reserve(&mut self.pool, num_computed, num_computed + 1, &mut self.copies);
            reserved.ok()?;
            sequence.last_step = step_id;
            Some(Scheduled {
                seq: idx,
                num_computed,
                num_tokens: 1,
                num_rows: 1,
            })
        });
        self.scheduled.extend(ready);
        let num_ready = u32::try_from(self.scheduled.len() - num_before).expect("no more than the budget");
        budget.tokens -= num_ready;
        budget.rows -= num_ready;
        num_ready
    }

    /// Commits leading parts of a step, up to the first one that is not an ordinary decode or whose sequence ends.
    /// Returns how many.
    pub(super) fn commit_ready(&mut self, scheduled: &[Scheduled], tokens: &[i32]) -> usize {
        // The only rows that are not one sequence's next token are those of beams.
        if !self.beams.is_empty() {
            return 0;
        }
        let mut num_committed = 0;
        for (part, &token) in scheduled.iter().zip(tokens) {
            let sequence = self.sequences.get_mut(part.seq);
            let token = token.cast_unsigned();
            let is_ordinary = part.num_tokens == 1 && part.num_rows == 1;
            if !is_ordinary
                || part.num_computed < sequence.num_counted()
                || sequence.num_generated() + 1 >= sequence.end_rule.max_tokens
                || sequence.stops_at(token, &self.config.eos_token_ids, &self.requests)
            {
                break;
            }
            let Some(table) = &mut sequence.table else { break };
            sequence.num_computed = part.num_computed + 1;
            table.publish(&mut self.pool, &sequence.tokens, sequence.num_computed);
            sequence.tokens.push(token);
            self.tenants.charge(sequence.tenant, 0, 1);
            num_committed += 1;
        }
        num_committed
    }
}
