//! The invariants that hold between any two calls. Tests check them after every operation, the engine when it idles.

use std::collections::HashMap;

use crate::ids::BlockId;

use super::scheduler::Scheduler;
use super::sequence::Status;
use super::slab::SeqIdx;

impl Scheduler {
    /// Checks the pool, the reference counts, the queues and the tables.
    ///
    /// # Errors
    /// The first invariant that does not hold, in words.
    pub fn check_invariants(&self) -> Result<(), String> {
        self.pool.check()?;
        self.check_ref_counts()?;
        self.check_queues()?;
        self.check_tables()?;
        self.check_requests()
    }

    /// ref(b) = tables and leases that hold b.
    fn check_ref_counts(&self) -> Result<(), String> {
        let mut holders: HashMap<BlockId, u32> = HashMap::new();
        for (_, sequence) in self.sequences.iter() {
            for &block in sequence.table.iter().flat_map(crate::block::BlockTable::blocks) {
                *holders.entry(block).or_default() += 1;
            }
        }
        for id in 1..=self.pool.num_blocks() {
            let block = BlockId(id);
            let num_leases = self.pool.num_leases(block);
            if num_leases > 0 && !self.in_flight {
                return Err(format!("block {id} has a copy lease that outlived its step"));
            }
            let held = holders.get(&block).copied().unwrap_or(0) + num_leases;
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

    /// Every sequence is in exactly the queue of its status, and the running ones are in order.
    fn check_queues(&self) -> Result<(), String> {
        let live: Vec<SeqIdx> = self.sequences.iter().map(|(idx, _)| idx).collect();
        if live.len() != self.waiting.len() + self.running.len() {
            return Err(format!(
                "{} sequences live, {} wait and {} run",
                live.len(),
                self.waiting.len(),
                self.running.len()
            ));
        }
        for idx in live {
            let sequence = self.sequences.get(idx);
            let waits = self.waiting.get(&sequence.key) == Some(&idx);
            let runs = self.running.contains(&idx);
            if (sequence.status == Status::Waiting) != waits || (sequence.status == Status::Running) != runs {
                return Err(format!(
                    "{:?} is {:?}, but waits: {waits}, runs: {runs}",
                    sequence.key, sequence.status
                ));
            }
        }
        let ordered = |pair: &[SeqIdx]| self.sequences.get(pair[0]).key < self.sequences.get(pair[1]).key;
        if !self.running.windows(2).all(ordered) {
            return Err("running sequences are out of order".into());
        }
        if self.running.len() > self.config.max_num_seqs as usize {
            return Err(format!(
                "{} sequences run, {} may",
                self.running.len(),
                self.config.max_num_seqs
            ));
        }
        Ok(())
    }

    /// A table covers what is computed and what is scheduled, and not one block more.
    fn check_tables(&self) -> Result<(), String> {
        for (idx, sequence) in self.sequences.iter() {
            let Some(table) = &sequence.table else {
                if sequence.num_computed != 0 || sequence.status == Status::Running {
                    return Err(format!(
                        "{:?} has no table and claims computed tokens",
                        sequence.key
                    ));
                }
                continue;
            };
            let scheduled = self
                .scheduled
                .iter()
                .find(|part| part.seq == idx)
                .map_or(0, |part| part.num_tokens);
            let covered = self.config.blocks_for(sequence.num_computed + scheduled);
            if table.blocks().len() != covered as usize {
                return Err(format!(
                    "{:?} holds {} blocks for {} computed and {scheduled} scheduled tokens",
                    sequence.key,
                    table.blocks().len(),
                    sequence.num_computed
                ));
            }
        }
        let scheduled: u32 = self.scheduled.iter().map(|part| part.num_tokens).sum();
        if scheduled > self.config.max_num_batched_tokens {
            return Err(format!(
                "{scheduled} tokens are scheduled, {} may",
                self.config.max_num_batched_tokens
            ));
        }
        Ok(())
    }

    /// A request counts exactly the samples that have not ended.
    fn check_requests(&self) -> Result<(), String> {
        let mut samples: HashMap<u64, u32> = HashMap::new();
        for (_, sequence) in self.sequences.iter() {
            *samples.entry(sequence.request.0).or_default() += sequence.num_rows();
        }
        for live in self.requests.iter().flatten() {
            let counted = samples.remove(&live.request.id.0).unwrap_or(0);
            if live.num_live != counted {
                return Err(format!(
                    "request {} counts {} samples, {counted} live",
                    live.request.id.0, live.num_live
                ));
            }
        }
        if samples.is_empty() {
            Ok(())
        } else {
            Err("a sequence outlived its request".into())
        }
    }
}
