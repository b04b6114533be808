//! Control flow of a step: `schedule` decides and writes the arena, `commit` takes the sampled tokens.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::block::{BlockPool, PoolConfig, PrefixHit};
use crate::config::{CoreConfig, MAX_ENDED_PER_STEP};
use crate::error::{InvalidConfig, StepError};
use crate::ids::{BlockId, RequestId};
use crate::sync::{Parker, PushChain, Receiver, RequestFlags, Stats, StatsCell, inbox};

use super::edge::{Edge, Shared};
use super::request::{FinishReason, Request};
use super::sequence::{QueueKey, Sequence, Status};
use super::slab::{SeqIdx, Slab};
use super::step::{self, Ended, Part, StepHeader, Writer};

/// A request whose samples have not all ended.
#[derive(Debug)]
pub(super) struct LiveRequest {
    pub(super) request: Box<Request>,
    /// Samples that have not ended, forked or not.
    pub(super) num_live: u32,
    /// Prompt tokens that the first admission found in the cache.
    pub(super) num_cached_tokens: u32,
    pub(super) admitted: bool,
}

/// A sequence's place in the step that is being built or in flight.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scheduled {
    pub(super) seq: SeqIdx,
    /// Tokens that are computed before it.
    pub(super) num_computed: u32,
    pub(super) num_tokens: u32,
    /// Rows that sample its last token: 0 for a chunk that does not reach the end.
    pub(super) num_rows: u32,
}

/// The owner of all cache state. Plain `&mut`: one thread drives it.
pub struct Scheduler {
    pub(super) config: CoreConfig,
    pub(super) pool: BlockPool,
    pub(super) sequences: Slab<Sequence>,
    /// Indexed by the request's flag slot.
    pub(super) requests: Vec<Option<LiveRequest>>,
    pub(super) waiting: BTreeMap<QueueKey, SeqIdx>,
    /// In the order of their keys: the oldest first.
    pub(super) running: Vec<SeqIdx>,
    /// The step being built, or in flight.
    pub(super) scheduled: Vec<Scheduled>,
    pub(super) copies: Vec<(BlockId, BlockId)>,
    pub(super) ended: VecDeque<Ended>,
    pub(super) step_id: u64,
    pub(super) in_flight: bool,
    pub(super) stats: Stats,
    pub(super) hit: PrefixHit,
    pub(super) num_arrived: u64,
    pub(super) inbox: Receiver<Box<Request>>,
    pub(super) edge: Edge,
}

impl Scheduler {
    /// Builds the core. `hash_key` keys the prefix index and should differ in every process.
    ///
    /// # Errors
    /// `InvalidConfig` names the first size that is out of bounds.
    pub fn new(config: CoreConfig, hash_key: [u64; 4]) -> Result<Self, InvalidConfig> {
        config.validate()?;
        let capacity = config.max_queued_requests as usize;
        let (sender, receiver) = inbox(capacity);
        let shared = Arc::new(Shared {
            config: config.clone(),
            finishes: PushChain::new(),
            flags: RequestFlags::new(capacity),
            parker: Parker::new(),
            stats: StatsCell::new(),
        });
        let pool = BlockPool::new(PoolConfig {
            num_blocks: config.num_blocks,
            block_size: config.block_size,
            prefix_caching: config.prefix_caching,
            eviction: config.eviction,
            hash_key,
        });
        let mut scheduler = Self {
            config,
            pool,
            sequences: Slab::new(),
            requests: (0..capacity).map(|_| None).collect(),
            waiting: BTreeMap::new(),
            running: Vec::new(),
            scheduled: Vec::new(),
            copies: Vec::new(),
            ended: VecDeque::new(),
            step_id: 0,
            in_flight: false,
            stats: Stats::default(),
            hit: PrefixHit::default(),
            num_arrived: 0,
            inbox: receiver,
            edge: Edge {
                shared,
                inbox: sender,
            },
        };
        scheduler.publish_stats();
        Ok(scheduler)
    }

    /// The handle for other threads.
    pub const fn edge(&self) -> &Edge {
        &self.edge
    }

    /// The block pool, to look at.
    pub const fn pool(&self) -> &BlockPool {
        &self.pool
    }

    /// Words that an arena must hold.
    pub fn arena_len(&self) -> usize {
        step::arena_len(&self.config)
    }

    /// Decides the next step and writes it into `arena`. None: nothing runs and nothing ended.
    ///
    /// # Errors
    /// `InFlight` before the last step was committed, `ArenaTooSmall`.
    pub fn schedule(&mut self, arena: &mut [i32]) -> Result<Option<StepHeader>, StepError> {
        if self.in_flight {
            return Err(StepError::InFlight {
                step_id: self.step_id,
            });
        }
        let needed = self.arena_len();
        if arena.len() < needed {
            return Err(StepError::ArenaTooSmall {
                given: arena.len(),
                needed,
            });
        }
        self.drain();
        self.scheduled.clear();
        self.copies.clear();
        self.step_id += 1;
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens,
            rows: self.config.max_rows(),
        };
        let preemptions = self.stats.preemptions;
        let num_decodes = self.schedule_running(&mut budget, true);
        self.schedule_running(&mut budget, false);
        if self.stats.preemptions == preemptions {
            self.admit_waiting(&mut budget);
        }
        let header = self.write(arena, num_decodes);
        self.in_flight = header.num_tokens > 0;
        if !self.in_flight {
            self.step_id -= 1;
            self.pool.end_step();
        }
        self.publish_stats();
        Ok((header.num_tokens + header.num_ended > 0).then_some(header))
    }

    /// Takes the sampled token of every row; `states` gets 0 or the finish reason of each.
    ///
    /// # Errors
    /// `NotInFlight`, `RowCount`. Nothing has changed then.
    pub fn commit(&mut self, step_id: u64, tokens: &[i32], states: &mut Vec<i32>) -> Result<(), StepError> {
        self.expect_in_flight(step_id)?;
        let rows = self.scheduled.iter().map(|part| part.num_rows as usize).sum();
        if tokens.len() != rows {
            return Err(StepError::RowCount {
                given: tokens.len(),
                rows,
            });
        }
        states.clear();
        let scheduled = std::mem::take(&mut self.scheduled);
        let mut row = 0;
        for part in &scheduled {
            self.advance(*part);
            let sampled = &tokens[row..row + part.num_rows as usize];
            row += sampled.len();
            if !sampled.is_empty() {
                self.append(part.seq, sampled, states);
            }
        }
        self.scheduled = scheduled;
        self.end_step();
        self.stats.steps += 1;
        self.publish_stats();
        Ok(())
    }

    /// Ends every request that the step in flight was computing; the next `schedule` reports them.
    ///
    /// # Errors
    /// `NotInFlight`.
    pub fn fail_step(&mut self) -> Result<(), StepError> {
        self.expect_in_flight(self.step_id)?;
        let failed: Vec<RequestId> = self
            .scheduled
            .iter()
            .map(|part| self.sequences.get(part.seq).request)
            .collect();
        for request in failed {
            self.end_request(request, FinishReason::Error);
        }
        self.end_step();
        self.publish_stats();
        Ok(())
    }

    /// Whether any request is waiting or running.
    pub fn has_work(&self) -> bool {
        self.sequences.len() > 0 || !self.ended.is_empty()
    }

    /// Forgets every published block; running sequences keep theirs. Returns how many were forgotten.
    pub fn reset_prefix_cache(&mut self) -> u32 {
        self.pool.clear_prefix()
    }

    const fn expect_in_flight(&self, step_id: u64) -> Result<(), StepError> {
        if self.in_flight && step_id == self.step_id {
            Ok(())
        } else {
            Err(StepError::NotInFlight { step_id })
        }
    }

    fn end_step(&mut self) {
        self.scheduled.clear();
        self.pool.end_step();
        self.in_flight = false;
    }

    // Building a step.

    /// Schedules the running sequences that decode, or those that compute more than one token. Returns how many.
    fn schedule_running(&mut self, budget: &mut Budget, decodes: bool) -> u32 {
        let mut num_scheduled = 0;
        let mut at = 0;
        while at < self.running.len() && budget.tokens > 0 {
            let idx = self.running[at];
            let sequence = self.sequences.get(idx);
            if sequence.last_step == self.step_id
                || (sequence.num_remaining() == 1 && sequence.pending_forks == 0) != decodes
            {
                at += 1;
                continue;
            }
            let Some(part) = budget.part_of(idx, sequence, sequence.num_computed) else {
                at += 1;
                continue;
            };
            if self.make_room(idx, part.num_tokens) {
                self.push_part(part, budget);
                num_scheduled += 1;
            }
            at += 1;
        }
        num_scheduled
    }

    /// Gets the blocks for the next `num_tokens` tokens of a running sequence, at the cost of newer ones if need be.
    fn make_room(&mut self, idx: SeqIdx, num_tokens: u32) -> bool {
        loop {
            let sequence = self.sequences.get_mut(idx);
            let (from, to) = (sequence.num_computed, sequence.num_computed + num_tokens);
            let table = sequence
                .table
                .as_mut()
                .expect("a running sequence has a block table");
            if table.reserve(&mut self.pool, from, to, &mut self.copies).is_ok() {
                return true;
            }
            let Some(victim) = self.victim(idx) else {
                return false;
            };
            self.preempt(victim);
        }
    }

    /// The newest running sequence that is newer than `idx` and not part of this step.
    ///
    /// Without one, `idx` keeps its blocks and sits the step out. The oldest sequence is never a victim, and it can
    /// take every block that no sequence of this step holds, so something always gets on.
    fn victim(&self, idx: SeqIdx) -> Option<SeqIdx> {
        let newer = self
            .running
            .iter()
            .rev()
            .copied()
            .take_while(|&other| other != idx);
        newer
            .into_iter()
            .find(|&other| self.sequences.get(other).last_step != self.step_id)
    }

    pub(super) fn push_part(&mut self, part: Scheduled, budget: &mut Budget) {
        budget.tokens -= part.num_tokens;
        budget.rows -= part.num_rows;
        self.sequences.get_mut(part.seq).last_step = self.step_id;
        self.scheduled.push(part);
    }

    fn write(&mut self, arena: &mut [i32], num_decodes: u32) -> StepHeader {
        let num_ended = self.ended.len().min(MAX_ENDED_PER_STEP);
        let count = |len: usize| u32::try_from(len).expect("step counts fit");
        let block_size = self.config.block_size;
        let header = StepHeader {
            step_id: self.step_id,
            num_tokens: self.scheduled.iter().map(|part| part.num_tokens).sum(),
            num_sequences: count(self.scheduled.len()),
            num_decodes,
            num_rows: self.scheduled.iter().map(|part| part.num_rows).sum(),
            num_copies: count(self.copies.len()),
            num_ended: count(num_ended),
        };
        let num_table_blocks = self
            .scheduled
            .iter()
            .map(|part| {
                self.config
                    .blocks_for(self.sequences.get(part.seq).num_computed + part.num_tokens)
                    as usize
            })
            .sum();
        let mut writer = Writer::new(arena, &header, num_table_blocks, block_size);
        for part in &self.scheduled {
            let sequence = self.sequences.get(part.seq);
            let live = self.live(sequence.request);
            let start = sequence.num_computed;
            writer.part(&Part {
                request: sequence.request,
                tokens: &sequence.tokens[start as usize..(start + part.num_tokens) as usize],
                start,
                table: sequence.table(),
                sample_index: sequence.key.sample_index,
                num_rows: part.num_rows,
                params: &live.request.params,
                num_cached_tokens: live.num_cached_tokens,
            });
        }
        writer.finish(&self.copies, self.ended.drain(..num_ended));
        self.stats.copies += self.copies.len() as u64;
        header
    }

    // Taking a step's result.

    /// Counts the computed tokens and publishes the blocks that became full.
    fn advance(&mut self, part: Scheduled) {
        let sequence = self.sequences.get_mut(part.seq);
        let start = sequence.num_computed;
        sequence.num_computed += part.num_tokens;
        let num_again = sequence
            .num_computed_before
            .saturating_sub(start)
            .min(part.num_tokens);
        self.stats.recomputed_tokens += u64::from(num_again);
        let num_prompt = sequence.prompt_len.saturating_sub(start).min(part.num_tokens);
        self.stats.prompt_tokens += u64::from(num_prompt.saturating_sub(num_again));
        self.stats.scheduled_tokens += u64::from(part.num_tokens);
        let table = sequence
            .table
            .as_mut()
            .expect("a scheduled sequence has a block table");
        table.publish(&mut self.pool, &sequence.tokens, sequence.num_computed);
    }

    /// Appends the sampled tokens: the first to the sequence, the others to its forks.
    fn append(&mut self, idx: SeqIdx, sampled: &[i32], states: &mut Vec<i32>) {
        let first = self.sequences.get(idx).key.sample_index;
        for (sample_index, &token) in (first + 1..).zip(&sampled[1..]) {
            self.fork(idx, sample_index, token.cast_unsigned());
        }
        let forks = sampled.len() - 1;
        let sequence = self.sequences.get_mut(idx);
        sequence.pending_forks -= u32::try_from(forks).expect("n is bounded");
        sequence.tokens.push(sampled[0].cast_unsigned());
        let key = sequence.key;
        // Forks were added in the order of their rows; each is looked at once, after all of them share the prompt.
        for sample_index in first..=first + u32::try_from(forks).expect("n is bounded") {
            let key = QueueKey { sample_index, ..key };
            let idx = self.find(key);
            self.stats.generation_tokens += 1;
            let state = self.finish_state(idx);
            states.push(state.map_or(0, |reason| reason as i32));
            if let Some(reason) = state {
                self.end_sequence(idx, reason, false);
            }
        }
    }

    /// Adds a sample that shares every block of `parent`. Without a place to run it waits, and finds them by prefix.
    fn fork(&mut self, parent: SeqIdx, sample_index: u32, token: u32) {
        let place = self.running.len() < self.config.max_num_seqs as usize;
        let sequence = self.sequences.get(parent);
        let mut tokens = sequence.tokens.clone();
        tokens.push(token);
        let child = Sequence {
            request: sequence.request,
            key: QueueKey {
                sample_index,
                ..sequence.key
            },
            status: if place { Status::Running } else { Status::Waiting },
            tokens,
            prompt_len: sequence.prompt_len,
            num_computed: if place { sequence.num_computed } else { 0 },
            table: place.then(|| sequence.table().fork(&mut self.pool)),
            pending_forks: 0,
            num_computed_before: sequence.num_computed,
            num_preemptions: 0,
            last_step: 0,
        };
        let key = child.key;
        let idx = self.sequences.insert(child);
        if place {
            self.insert_running(idx);
        } else {
            self.waiting.insert(key, idx);
        }
    }

    fn finish_state(&self, idx: SeqIdx) -> Option<FinishReason> {
        let sequence = self.sequences.get(idx);
        let params = &self.live(sequence.request).request.params;
        let token = *sequence.tokens.last().expect("a sequence has tokens");
        if (!params.ignore_eos && self.config.eos_token_ids.contains(&token))
            || params.stop_token_ids.contains(&token)
        {
            return Some(FinishReason::Stop);
        }
        (sequence.num_generated() >= params.max_tokens).then_some(FinishReason::Length)
    }

    pub(super) fn insert_running(&mut self, idx: SeqIdx) {
        let key = self.sequences.get(idx).key;
        let at = self
            .running
            .partition_point(|&other| self.sequences.get(other).key < key);
        self.running.insert(at, idx);
    }

    fn find(&self, key: QueueKey) -> SeqIdx {
        self.waiting.get(&key).copied().unwrap_or_else(|| {
            let at = self
                .running
                .partition_point(|&other| self.sequences.get(other).key < key);
            self.running[at]
        })
    }

    pub(super) fn live(&self, request: RequestId) -> &LiveRequest {
        self.requests[request.slot() as usize]
            .as_ref()
            .expect("a live sequence has a live request")
    }
}

/// What a step may still take on.
pub(super) struct Budget {
    pub(super) tokens: u32,
    pub(super) rows: u32,
}

impl Budget {
    /// The part that fits of the tokens which a sequence has beyond `num_computed`, or None where its rows do not.
    pub(super) fn part_of(&self, seq: SeqIdx, sequence: &Sequence, num_computed: u32) -> Option<Scheduled> {
        let num_remaining = sequence.num_tokens() - num_computed;
        let num_tokens = num_remaining.min(self.tokens);
        let num_rows = if num_tokens == num_remaining {
            sequence.num_rows()
        } else {
            0
        };
        (num_tokens > 0 && num_rows <= self.rows).then_some(Scheduled {
            seq,
            num_computed,
            num_tokens,
            num_rows,
        })
    }
}
