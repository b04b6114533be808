//! Which waiting sequences start: in order of arrival, as long as all their known tokens fit beside the running ones.

use crate::block::{BlockTable, PrefixHit};

use super::scheduler::{Budget, Scheduled, Scheduler};
use super::slab::SeqIdx;

impl Scheduler {
    /// Admits from the head of the queue until one does not fit.
    pub(super) fn admit_waiting(&mut self, budget: &mut Budget) {
        if self.queues.num_waiting() == 0 {
            return;
        }
        let mut hit = std::mem::take(&mut self.hit);
        let mut promised = self.num_promised_blocks();
        while budget.tokens > 0 && self.queues.num_running() < self.config.max_num_seqs as usize {
            let Some(idx) = self.queues.first_waiting() else {
                break;
            };
            let Some(part) = self.admit(idx, promised, budget, &mut hit) else {
                break;
            };
            self.push_part(part, budget);
            promised += self.num_missing_blocks(idx);
        }
        self.hit = hit;
    }

    /// Blocks that running sequences need for tokens which they know already: they are as good as taken.
    fn num_promised_blocks(&self) -> u32 {
        self.queues
            .running()
            .map(|idx| {
                let sequence = self.sequences.get(idx);
                if sequence.last_step == self.step_id {
                    self.num_missing_blocks(idx)
                } else {
                    sequence
                        .table()
                        .cost(&self.pool, sequence.num_computed, sequence.num_tokens())
                }
            })
            .sum()
    }

    /// Blocks that a sequence's known tokens need beyond its table.
    fn num_missing_blocks(&self, idx: SeqIdx) -> u32 {
        let sequence = self.sequences.get(idx);
        self.config
            .blocks_for(sequence.num_tokens())
            .saturating_sub(sequence.table().len())
    }

    /// Starts a waiting sequence. None leaves everything as it was.
    fn admit(
        &mut self,
        idx: SeqIdx,
        promised: u32,
        budget: &Budget,
        hit: &mut PrefixHit,
    ) -> Option<Scheduled> {
        let mut table = self.look_up_prefix(idx, hit);
        let part = self
            .usable_hit(idx, &table, hit, promised)
            .and_then(|num_computed| budget.part_of(idx, self.sequences.get(idx), num_computed));
        match part {
            Some(part) => self.start(part, table, hit),
            None => table.release(&mut self.pool),
        }
        part
    }

    /// Looks for the sequence's tokens under the root of its salt, and opens a table there.
    fn look_up_prefix(&mut self, idx: SeqIdx, hit: &mut PrefixHit) -> BlockTable {
        let sequence = self.sequences.get(idx);
        let root = self.pool.root(&self.requests.of(sequence.request).request.salt);
        self.pool.lookup(root, &sequence.tokens, hit);
        let table = BlockTable::new(root, &mut self.pool);
        self.pool.release_root(root);
        table
    }

    /// Moves a sequence to the running ones, with the blocks of its first part.
    fn start(&mut self, part: Scheduled, mut table: BlockTable, hit: &PrefixHit) {
        let end = part.num_computed + part.num_tokens;
        table
            .admit(&mut self.pool, hit, part.num_computed, end, &mut self.copies)
            .expect("the cost of all its tokens was found available");
        let sequence = self.sequences.get_mut(part.seq);
        sequence.table = Some(table);
        sequence.num_computed = part.num_computed;
        self.queues.remove(sequence.key);
        self.queues.run(sequence.key, part.seq);
        self.count_hit(part.seq);
    }

    /// How many tokens of the hit the sequence can start with. None: it does not fit now.
    ///
    /// The last token is always computed, since its logits are needed. Where the hit holds it, the block around it
    /// is copied first; where there is no room for both the block and its copy, that block is not used.
    fn usable_hit(&self, idx: SeqIdx, table: &BlockTable, hit: &PrefixHit, promised: u32) -> Option<u32> {
        let num_tokens = self.sequences.get(idx).num_tokens();
        let block_size = self.config.block_size;
        let num_hit = u32::try_from(hit.blocks.len()).expect("tables are short") * block_size;
        let margin = if self.queues.num_running() == 0 {
            0
        } else {
            self.config.watermark()
        };
        let num_available = u64::from(self.pool.num_available());
        let whole = num_hit.min(num_tokens - 1);
        [whole, whole - whole % block_size]
            .into_iter()
            .find(|&num_computed| {
                let cost = table.admission_cost(&self.pool, hit, num_computed, num_tokens);
                u64::from(cost) + u64::from(promised) + u64::from(margin) <= num_available
            })
    }

    /// Tokens found again after a preemption are no prefix hits: the cache only gives back what it took.
    fn count_hit(&mut self, idx: SeqIdx) {
        let sequence = self.sequences.get(idx);
        let (num_tokens, num_hit) = (sequence.num_tokens(), sequence.num_computed);
        let live = self.requests.of_mut(sequence.request);
        if live.num_cached_tokens.is_some() {
            self.stats.recompute_hits += u64::from(num_hit);
            return;
        }
        live.num_cached_tokens = Some(num_hit);
        self.stats.prefix_queries += u64::from(num_tokens);
        self.stats.prefix_hits += u64::from(num_hit);
    }
}
