//! The short way of sequences that decode: most steps consist of them, and what such a step costs is the instructions
//! that it takes for each one. Whatever is not ordinary goes the way of all sequences, in [`super::scheduler`].

use super::budget::{Budget, Scheduled};
use super::scheduler::Scheduler;

impl Scheduler {
    /// Schedules the next token of running sequences from the place `at` on, up to the first one that does not decode
    /// or finds no block. Returns how many.
    pub(super) fn schedule_ready(&mut self, at: usize, budget: &mut Budget) -> u32 {
        if !self.held_out.is_empty() {
            return 0;
        }
        let running = self.queues.running_from(at);
        let most = running.len().min(budget.tokens.min(budget.rows) as usize);
        let (step_id, first_row) = (self.step_id, self.config.max_rows() - budget.rows);
        let num_before = self.building.parts.len();
        let ready = (first_row..).zip(&running[..most]).map_while(|(row, &(_, idx))| {
            let sequence = self.sequences.get_mut(idx);
            let from = sequence.num_scheduled;
            if !sequence.decodes() || sequence.num_schedulable() != 1 || sequence.last_step == step_id {
                return None;
            }
            let source = sequence.source();
            let table = sequence.table.as_mut()?;
            let reserved = table.reserve(&mut self.pool, from, from + 1, &mut self.copies);
            reserved.ok()?;
            sequence.last_step = step_id;
            sequence.num_scheduled = from + 1;
            sequence.row = row;
            Some(Scheduled {
                seq: idx,
                num_computed: from,
                num_tokens: 1,
                num_rows: 1,
                source,
            })
        });
        self.building.parts.extend(ready);
        let num_ready = self.building.parts.len() - num_before;
        let num_ready = u32::try_from(num_ready).expect("no more than the budget");
        budget.tokens -= num_ready;
        budget.rows -= num_ready;
        num_ready
    }

    /// Commits leading parts of a step without beams, up to the first one that is not an ordinary decode or whose
    /// sequence ends. Returns how many.
    pub(super) fn commit_ready(&mut self, parts: &[Scheduled], tokens: &[i32]) -> usize {
        let mut num_committed = 0;
        for (part, &token) in parts.iter().zip(tokens) {
            let Some(sequence) = self.sequences.find_mut(part.seq) else {
                break;
            };
            let token = token.cast_unsigned();
            let is_ordinary = part.num_tokens == 1 && part.num_rows == 1;
            if !is_ordinary
                || part.num_computed < sequence.num_counted()
                || sequence.num_generated() + 1 >= sequence.end_rule.max_tokens
                || sequence.stops_at(token, &self.config.eos_token_ids, &self.requests)
            {
                break;
            }
            let end = part.num_computed + 1;
            let is_in_flight = sequence.num_scheduled > end;
            let Some(table) = &mut sequence.table else { break };
            // What is published may be exchanged, so a step in flight has to keep it.
            if is_in_flight && !table.is_published_within(end) {
                break;
            }
            sequence.num_computed = end;
            table.publish(&mut self.pool, &sequence.tokens, end);
            sequence.tokens.push(token);
            self.tenants.charge(sequence.tenant, 0, 1);
            num_committed += 1;
        }
        num_committed
    }
}
