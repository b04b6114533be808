//! Which waiting sequences start: in the order of `policy`, as long as all their known tokens fit beside the running
//! ones. One that does not fit is passed over, but not for ever; one whose next block is being computed by another
//! sequence waits for it, but not for long.

use std::collections::HashSet;

use crate::block::{BlockTable, PrefixHit};

use super::budget::{Budget, Scheduled};
use super::explain::Admission;
use super::holding::namespace;
use super::policy::{self, MAX_DEFERRALS, MAX_PASSED};
use super::scheduler::Scheduler;
use super::slab::SeqIdx;

/// What came of looking at a waiting sequence.
enum Outcome {
    Admitted(Scheduled),
    /// It needs more blocks or rows than there are.
    DoesNotFit,
    /// Its next block is being computed.
    Deferred,
}

/// What is kept from one candidate to the next within a step.
struct Round {
    hit: PrefixHit,
    /// Blocks that are as good as taken.
    due: u32,
    /// Chain hashes of the blocks that this step and one in flight fill.
    in_flight: HashSet<u64>,
    /// Candidates that were not admitted.
    passed: Vec<SeqIdx>,
}

impl Scheduler {
    /// Admits waiting sequences until the budget is spent, or too many had to be passed over.
    pub(super) fn admit_waiting(&mut self, budget: &mut Budget) {
        if self.queues.num_waiting() == 0 || budget.tokens == 0 {
            return;
        }
        let mut round = Round {
            hit: std::mem::take(&mut self.hit),
            due: self.num_due_blocks(),
            in_flight: (self.building.parts.iter())
                .chain(self.steps.iter().flat_map(|step| &step.parts))
                .flat_map(|part| self.hashes_filled_by(part))
                .copied()
                .collect(),
            passed: Vec::new(),
        };
        while budget.tokens > 0 && self.num_places() < self.config.max_num_seqs as usize {
            let Some((idx, is_starved)) = self.next_candidate(&round.passed) else {
                break;
            };
            match self.admit(idx, budget, &mut round) {
                Outcome::Admitted(part) => {
                    self.push_part(part, budget);
                    self.num_admitted += 1;
                    let sequence = self.sequences.get(idx);
                    round.due += self.num_missing_blocks(idx) + self.num_blocks_of_other_beams(sequence);
                    round.in_flight.extend(self.hashes_filled_by(&part));
                }
                // What becomes free is kept for it.
                Outcome::DoesNotFit if is_starved => break,
                Outcome::DoesNotFit => {
                    self.sequences.get_mut(idx).num_passed += 1;
                    round.passed.push(idx);
                }
                Outcome::Deferred => {
                    self.sequences.get_mut(idx).num_deferrals += 1;
                    round.passed.push(idx);
                }
            }
            if round.passed.len() > MAX_PASSED {
                break;
            }
        }
        self.hit = round.hit;
    }

    /// Who is looked at next, and whether it has waited so long that nobody may be admitted before it.
    fn next_candidate(&self, passed: &[SeqIdx]) -> Option<(SeqIdx, bool)> {
        let is_passed = |idx| passed.contains(&idx);
        let starved = self.queues.longest_waiting().filter(|&idx| {
            let sequence = self.sequences.get(idx);
            policy::is_starved(
                sequence.num_passed,
                self.num_admitted - sequence.num_admitted_before,
            )
        });
        if let Some(idx) = starved.filter(|&idx| !is_passed(idx)) {
            return Some((idx, true));
        }
        let first = self
            .queues
            .first_of_tenants(is_passed)
            .min_by_key(|&(tenant, key, _)| policy::turn(key, self.tenants.served(tenant)));
        first.map(|(_, _, idx)| (idx, false))
    }

    /// Blocks that running sequences need for tokens which they know already: they are as good as taken.
    pub(super) fn num_due_blocks(&self) -> u32 {
        let of_sequences: u32 = self
            .queues
            .running()
            .map(|idx| {
                let sequence = self.sequences.get(idx);
                if sequence.last_step == self.step_id {
                    self.num_missing_blocks(idx)
                } else {
                    let from = sequence.num_scheduled;
                    let to = (from + sequence.num_schedulable()).max(sequence.num_tokens());
                    sequence.table().cost(&self.pool, from, to)
                }
            })
            .sum();
        of_sequences + self.num_blocks_due_to_beams()
    }

    /// Blocks that a sequence's known tokens need beyond its table.
    fn num_missing_blocks(&self, idx: SeqIdx) -> u32 {
        let sequence = self.sequences.get(idx);
        self.config
            .blocks_for(sequence.num_tokens())
            .saturating_sub(sequence.table().len())
    }

    /// Hashes of the prompt blocks that a part of a step fills; none where it is void.
    fn hashes_filled_by(&self, part: &Scheduled) -> &[u64] {
        let Some(sequence) = self.sequences.find(part.seq) else {
            return &[];
        };
        let hashes = &sequence.hashes;
        let size = self.config.block_size;
        let (from, to) = (
            part.num_computed / size,
            (part.num_computed + part.num_tokens) / size,
        );
        let end = hashes.len().min(to as usize);
        &hashes[end.min(from as usize)..end]
    }

    /// Starts a waiting sequence, or leaves everything as it was.
    fn admit(&mut self, idx: SeqIdx, budget: &Budget, round: &mut Round) -> Outcome {
        let mut table = self.look_up_prefix(idx, &mut round.hit);
        let outcome = self.decide(idx, &table, budget, round);
        if let Outcome::Admitted(part) = outcome {
            self.start(part, table, &round.hit);
        } else {
            table.release(&mut self.pool);
        }
        std::mem::swap(&mut self.sequences.get_mut(idx).hashes, &mut round.hit.hashes);
        outcome
    }

    /// What is to come of a waiting sequence, given what of it was found.
    fn decide(&self, idx: SeqIdx, table: &BlockTable, budget: &Budget, round: &Round) -> Outcome {
        let sequence = self.sequences.get(idx);
        let next_block = round.hit.hashes.get(round.hit.num_full as usize);
        if sequence.num_deferrals < MAX_DEFERRALS
            && next_block.is_some_and(|hash| round.in_flight.contains(hash))
        {
            Outcome::Deferred
        } else {
            let has_places =
                self.num_places() + self.places_for(sequence) <= self.config.max_num_seqs as usize;
            self.usable_hit(idx, table, round)
                .filter(|_| has_places)
                .and_then(|num_computed| budget.first_part_of(idx, sequence, num_computed))
                .map_or(Outcome::DoesNotFit, Outcome::Admitted)
        }
    }

    /// Looks for the sequence's tokens under the root of its salt, and opens a table there. The sequence's hashes go to
    /// the hit.
    fn look_up_prefix(&mut self, idx: SeqIdx, hit: &mut PrefixHit) -> BlockTable {
        let model_epoch = self.model_epoch;
        let sequence = self.sequences.get_mut(idx);
        let salt = &self.requests.of(sequence.request).request.salt;
        let root = self.pool.namespace(&namespace(salt, model_epoch));
        if sequence.model_epoch != model_epoch {
            // The hashes are those of other weights.
            sequence.hashes.clear();
            sequence.model_epoch = model_epoch;
        }
        std::mem::swap(&mut sequence.hashes, &mut hit.hashes);
        hit.is_resumed = sequence.words.num_cached_tokens().is_some();
        self.pool.extend_hashes(root, &sequence.tokens, &mut hit.hashes);
        self.pool.probe(root, &sequence.tokens, hit);
        let table = BlockTable::new(root, &mut self.pool);
        self.pool.release_root(root);
        table
    }

    /// Moves a sequence to the running ones, with the blocks of its first part.
    fn start(&mut self, part: Scheduled, mut table: BlockTable, hit: &PrefixHit) {
        self.explain_admission(part, &table, hit);
        let end = part.num_computed + part.num_tokens;
        table
            .admit(&mut self.pool, hit, part.num_computed, end, &mut self.copies)
            .expect("the cost of all its tokens was found available");
        let sequence = self.sequences.get_mut(part.seq);
        sequence.table = Some(table);
        sequence.num_computed = part.num_computed;
        sequence.num_scheduled = part.num_computed;
        self.queues.remove(sequence.tenant, sequence.key);
        self.queues.run(sequence.key, part.seq);
        if let Some(&first) = hit.blocks.first().filter(|_| part.num_computed > 0) {
            self.holds.note_hit(first);
        }
        self.count_hit(part.seq);
    }

    /// Notes why the hit ends where it does, the first time that a request is admitted: before admission evicts
    /// anything.
    fn explain_admission(&mut self, part: Scheduled, table: &BlockTable, hit: &PrefixHit) {
        let sequence = self.sequences.get(part.seq);
        if sequence.words.num_cached_tokens().is_some() {
            return;
        }
        let live = self.requests.of(sequence.request);
        let admission = Admission {
            request: sequence.request,
            namespace: namespace(&live.request.salt, self.model_epoch),
            root: table.root(),
            tokens: &sequence.tokens,
            hit,
            num_computed: part.num_computed,
        };
        self.explanations.note(&self.pool, &admission);
    }

    /// How many tokens of the hit the sequence can start with. None: it does not fit now.
    ///
    /// The last token is always computed, since its logits are needed; so is a beam's last but one, before the step that
    /// takes all beams further. Where the hit ends inside a block, that block is copied first; where there is no room
    /// for both the block and its copy, it is not used.
    fn usable_hit(&self, idx: SeqIdx, table: &BlockTable, round: &Round) -> Option<u32> {
        let sequence = self.sequences.get(idx);
        let (num_tokens, num_alone) = (sequence.num_tokens(), sequence.num_alone());
        let num_reserved = u64::from(round.due) + u64::from(self.num_blocks_of_other_beams(sequence));
        let margin = u64::from(self.growth_margin());
        let num_available = u64::from(self.pool.num_available());
        self.hit_choices(&round.hit, num_alone)
            .into_iter()
            .find(|&num_computed| {
                let cost = table.admission_cost(&self.pool, &round.hit, num_computed, num_tokens);
                u64::from(cost) + num_reserved + margin <= num_available
            })
    }

    /// How much of a hit might be used, the most first.
    pub(super) fn hit_choices(&self, hit: &PrefixHit, num_tokens: u32) -> [u32; 2] {
        let block_size = self.config.block_size;
        let whole = hit.num_tokens.min(num_tokens - 1);
        [whole, whole - whole % block_size]
    }

    /// Blocks to leave to the running sequences; none where nothing runs, so that the largest request fits.
    pub(super) fn growth_margin(&self) -> u32 {
        if self.queues.num_running() == 0 {
            return 0;
        }
        let num_tokens_left = self.queues.running().flat_map(|idx| {
            let sequence = self.sequences.get(idx);
            let num_branches = self.num_branches(sequence) as usize;
            std::iter::repeat_n(
                sequence.end_rule.max_tokens - sequence.num_generated(),
                num_branches,
            )
        });
        policy::growth_margin(num_tokens_left, self.config.num_blocks, self.config.block_size)
    }

    /// Tokens found again after a preemption are no prefix hits: the cache only gives back what it took.
    fn count_hit(&mut self, idx: SeqIdx) {
        let sequence = self.sequences.get_mut(idx);
        let (num_tokens, num_hit) = (sequence.num_tokens(), sequence.num_computed);
        if sequence.words.num_cached_tokens().is_some() {
            self.stats.recompute_hits += u64::from(num_hit);
            return;
        }
        sequence.words.set_num_cached_tokens(num_hit);
        let counts = &mut self.tenant_counts[self.requests.of(sequence.request).share];
        counts.prefix_queries += u64::from(num_tokens);
        counts.prefix_hits += u64::from(num_hit);
        self.stats.prefix_queries += u64::from(num_tokens);
        self.stats.prefix_hits += u64::from(num_hit);
    }
}
