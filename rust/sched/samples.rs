//! How one prompt becomes several samples: each starts with the blocks of the first.

use super::scheduler::Scheduler;
use super::slab::SeqIdx;

impl Scheduler {
    /// Appends the sampled tokens: the first to the sequence, the others to its forks, in the order of the rows.
    pub(super) fn append_forks(&mut self, idx: SeqIdx, sampled: &[i32], states: &mut Vec<i32>) {
        let mut samples = Vec::with_capacity(sampled.len());
        // All of them share the prompt before the first one can end and release it.
        for (sample_index, &token) in (1..).zip(&sampled[1..]) {
            samples.push(self.fork(idx, sample_index, token.cast_unsigned()));
        }
        self.append(idx, sampled[0], states);
        for idx in samples {
            self.conclude(idx, states);
        }
    }

    /// Adds a sample that shares every block of `parent`. Without a place to run it waits, and finds them by prefix.
    fn fork(&mut self, parent: SeqIdx, sample_index: u32, token: u32) -> SeqIdx {
        let has_place = self.num_places() < self.config.max_num_seqs as usize;
        let sequence = self.sequences.get(parent);
        let (request, tenant) = (sequence.request, sequence.tenant);
        let mut tokens = sequence.tokens.clone();
        tokens.push(token);
        let table = has_place.then(|| sequence.table().fork(&mut self.pool));
        let num_computed = if has_place { sequence.num_computed } else { 0 };
        let mut fork = sequence.sibling(sample_index, tokens, num_computed, table);
        fork.num_admitted_before = self.num_admitted;
        let key = fork.key;
        let idx = self.sequences.insert(fork);
        if has_place {
            self.queues.run(key, idx);
        } else {
            self.queues.wait(tenant, key, idx);
        }
        self.requests.of_mut(request).sequences.push(idx);
        idx
    }
}
