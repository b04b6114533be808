//! The invariants that hold between any two calls. Tests check them after every operation, the engine when it turns idle.

use std::collections::HashMap;

use crate::ids::BlockId;

use super::budget::Scheduled;
use super::in_flight::MAX_STEPS;
use super::scheduler::Scheduler;

impl Scheduler {
    /// Checks the pool, the reference counts, the queues and the tables.
    ///
    /// # Errors
    /// The first invariant that does not hold, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.pool.check()?;
        self.holds.check(self.config.block_size)?;
        self.check_ref_counts()?;
        self.check_queues()?;
        self.check_tables()?;
        self.check_steps()?;
        self.check_beams()?;
        self.check_requests()
    }

    /// ref(b) = tables and leases that hold b, and copies of other threads that read it.
    fn check_ref_counts(&self) -> Result<(), String> {
        let mut holders: HashMap<BlockId, u32> = HashMap::new();
        let running = self.sequences.iter().map(|(_, sequence)| &sequence.table);
        let held = self.holds.iter().map(|hold| &hold.table);
        for table in running.chain(held).flatten().chain(self.steps.fenced_tables()) {
            for &block in table.blocks() {
                *holders.entry(block).or_default() += 1;
            }
        }
        for id in 1..=self.pool.num_blocks() {
            let block = BlockId(id);
            let num_leases = self.pool.num_leases(block);
            if num_leases > 0 && self.steps.is_empty() {
                return Err(format!("block {id} has a copy lease that outlived its step"));
            }
            let held = holders.get(&block).copied().unwrap_or(0) + num_leases + self.pool.num_lent(block);
            if self.pool.ref_count(block) != held {
                return Err(format!(
                    "block {id} counts {} references, {held} hold it",
                    self.pool.ref_count(block)
                ));
            }
        }
        if holders.contains_key(&BlockId::NULL) {
            return Err("a table holds the null block".into());
        }
        Ok(())
    }

    /// Every sequence is in exactly one queue: it runs if it has a table, and waits otherwise.
    fn check_queues(&self) -> Result<(), String> {
        let (num_waiting, num_running) = (self.queues.num_waiting(), self.queues.num_running());
        if self.sequences.len() != num_waiting + num_running {
            let num_live = self.sequences.len();
            return Err(format!(
                "{num_live} sequences live, {num_waiting} wait and {num_running} run"
            ));
        }
        for (_, sequence) in self.sequences.iter() {
            let has_table = sequence.table.is_some();
            let (waits, runs) = self.queues.places_of(sequence.tenant, sequence.key);
            if (waits, runs) != (!has_table, has_table) {
                return Err(format!(
                    "{:?} has a table: {has_table}, waits: {waits}, runs: {runs}",
                    sequence.key
                ));
            }
        }
        if !self.queues.is_ordered() {
            return Err("running sequences are out of order".into());
        }
        let num_places = self.num_places();
        if num_places > self.config.max_num_seqs as usize {
            return Err(format!(
                "{num_running} sequences run and will be {num_places}, {} may",
                self.config.max_num_seqs
            ));
        }
        Ok(())
    }

    /// A table covers what is computed and what is scheduled, and not one block more.
    fn check_tables(&self) -> Result<(), String> {
        for (idx, sequence) in self.sequences.iter() {
            let Some(table) = &sequence.table else {
                if sequence.num_scheduled != 0 {
                    return Err(format!(
                        "{:?} has no table and claims computed tokens",
                        sequence.key
                    ));
                }
                continue;
            };
            let mut scheduled = sequence.num_computed;
            for part in self.parts_in_flight().filter(|part| part.seq == idx) {
                if part.num_computed != scheduled {
                    return Err(format!(
                        "{:?} is scheduled from {} on, with {scheduled} tokens before",
                        sequence.key, part.num_computed
                    ));
                }
                scheduled += part.num_tokens;
            }
            let covered = self.config.blocks_for(scheduled);
            if table.blocks().len() != covered as usize || sequence.num_scheduled != scheduled {
                return Err(format!(
                    "{:?} holds {} blocks for {} computed and {scheduled} scheduled tokens, counted as {}",
                    sequence.key,
                    table.blocks().len(),
                    sequence.num_computed,
                    sequence.num_scheduled
                ));
            }
        }
        Ok(())
    }

    /// Steps keep to the budget, are numbered in order, and hold nobody who lives without being in flight.
    fn check_steps(&self) -> Result<(), String> {
        let ids: Vec<u64> = self.steps.iter().map(|step| step.id).collect();
        if ids.len() > MAX_STEPS || !ids.is_sorted_by(|one, next| one < next) {
            return Err(format!("the steps {ids:?} are in flight"));
        }
        for step in self.steps.iter() {
            let (scheduled, most) = (step.num_tokens(), self.config.max_num_batched_tokens);
            if scheduled == 0 || scheduled > most {
                return Err(format!("step {} has {scheduled} tokens, {most} may", step.id));
            }
            let live = step.parts.iter().filter_map(|part| self.sequences.find(part.seq));
            for sequence in live {
                if !sequence.is_in_flight() || sequence.last_step < step.id {
                    return Err(format!("{:?} is not in step {}", sequence.key, step.id));
                }
            }
        }
        Ok(())
    }

    fn parts_in_flight(&self) -> impl Iterator<Item = &Scheduled> {
        self.steps.iter().flat_map(|step| &step.parts)
    }

    /// A request lists exactly its sequences.
    fn check_requests(&self) -> Result<(), String> {
        let listed: usize = self.requests.iter().map(|live| live.sequences.len()).sum();
        if listed != self.sequences.len() {
            return Err(format!(
                "requests list {listed} sequences, {} live",
                self.sequences.len()
            ));
        }
        for (idx, sequence) in self.sequences.iter() {
            let live = self.requests.find(sequence.request);
            if !live.is_some_and(|live| live.sequences.contains(&idx)) {
                return Err(format!("{:?} is not listed by its request", sequence.key));
            }
        }
        Ok(())
    }
}
