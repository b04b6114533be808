//! Control flow of a step: `schedule` decides and writes the arena, `commit` takes the sampled tokens.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use crate::block::{BlockPool, HostPool, PoolConfig, PrefixHit};
use crate::config::{CoreConfig, MAX_ENDED_PER_STEP};
use crate::error::{InvalidConfig, StepError};
use crate::ids::{BlockId, RequestId};
use crate::sync::{Parker, PushChain, Receiver, RequestFlags, Stats, StatsCell, inbox};

use super::beam_group::BeamGroup;
use super::beam_rows::{BeamResult, BeamRows};
use super::budget::{Budget, Scheduled};
use super::edge::{Edge, Shared, Submission};
use super::events::EventQueue;
use super::explain::Explanations;
use super::fairness::Tenants;
use super::hold::Holds;
use super::live::LiveRequests;
use super::observe::TenantCounts;
use super::policy;
use super::queues::Queues;
use super::request::FinishReason;
use super::sequence::Sequence;
use super::slab::{SeqIdx, Slab};
use super::step::{self, Ended, Part, ROW_WORDS, StepHeader, Writer};
use super::swap::Swap;

/// The owner of all cache state. Plain `&mut`: one thread drives it.
pub struct Scheduler {
    pub(super) config: CoreConfig,
    pub(super) pool: BlockPool,
    pub(super) host: HostPool,
    pub(super) sequences: Slab<Sequence>,
    pub(super) requests: LiveRequests,
    /// What the groups of beams have beside their sequences.
    pub(super) beams: BTreeMap<RequestId, BeamGroup>,
    /// Answers of searches that ended and were not asked for yet.
    pub(super) beam_results: Vec<BeamResult>,
    pub(super) queues: Queues,
    pub(super) tenants: Tenants,
    /// By share.
    pub(super) tenant_counts: Vec<TenantCounts>,
    pub(super) explanations: Explanations,
    pub(super) holds: Holds,
    /// Counts the weights that have computed here; see [`crate::block::Namespace`].
    pub(super) model_epoch: u64,
    /// The step being built, or in flight.
    pub(super) scheduled: Vec<Scheduled>,
    pub(super) copies: Vec<(BlockId, BlockId)>,
    /// Blocks that move between device and host in the step that is being built.
    pub(super) swaps: Vec<Swap>,
    pub(super) ended: VecDeque<Ended>,
    /// The section `rows` of the step in flight.
    pub(super) rows: Vec<[i32; ROW_WORDS]>,
    /// Where events go, if anybody reads them.
    pub(super) events: Option<EventQueue>,
    pub(super) step_id: u64,
    pub(super) in_flight: bool,
    pub(super) stats: Stats,
    /// Kept to be filled again by the next lookup.
    pub(super) hit: PrefixHit,
    pub(super) num_arrived: u64,
    /// Admissions of all sequences, repeated ones too: the clock by which waiting is measured.
    pub(super) num_admitted: u64,
    pub(super) inbox: Receiver<Submission>,
    pub(super) edge: Edge,
}

impl Scheduler {
    /// Builds the core. `hash_key` keys the prefix index and should differ in every process.
    ///
    /// # Errors
    /// `InvalidConfig` names the first size that is out of bounds.
    pub fn new(config: CoreConfig, hash_key: [u64; 4]) -> Result<Self, InvalidConfig> {
        config.validate()?;
        step::check_arena_len(&config)?;
        let capacity = config.max_queued_requests as usize;
        let (sender, receiver) = inbox(capacity);
        let tenant_counts = vec![TenantCounts::default(); config.tenants.len() + 1];
        let sizes = PoolConfig {
            num_blocks: config.num_blocks,
            block_size: config.block_size,
            prefix_caching: config.prefix_caching,
            partial_matching: config.partial_matching,
            eviction: config.eviction,
            hash_key,
        };
        let pool = BlockPool::with_shares(sizes, config.tenants.clone());
        let holds = Holds::new(config.max_pinned_blocks, config.num_blocks);
        let shared = Arc::new(Shared {
            config: config.clone(),
            hasher: pool.hasher(),
            finishes: PushChain::new(),
            returned: PushChain::new(),
            flags: RequestFlags::new(capacity),
            parker: Parker::new(),
            stats: StatsCell::new(),
        });
        let mut scheduler = Self {
            host: HostPool::new(config.host.num_blocks),
            config,
            pool,
            sequences: Slab::new(),
            requests: LiveRequests::new(capacity),
            beams: BTreeMap::new(),
            beam_results: Vec::new(),
            queues: Queues::default(),
            tenants: Tenants::default(),
            tenant_counts,
            explanations: Explanations::new(),
            holds,
            model_epoch: 0,
            scheduled: Vec::new(),
            copies: Vec::new(),
            swaps: Vec::new(),
            ended: VecDeque::new(),
            rows: Vec::new(),
            events: None,
            step_id: 0,
            in_flight: false,
            stats: Stats::default(),
            hit: PrefixHit::default(),
            num_arrived: 0,
            num_admitted: 0,
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
        if let Some(events) = &mut self.events {
            events.flush();
        }
        self.scheduled.clear();
        self.copies.clear();
        self.swaps.clear();
        self.resume_beams();
        self.step_id += 1;
        let mut budget = Budget {
            tokens: self.config.max_num_batched_tokens,
            rows: self.config.max_rows(),
        };
        let preemptions = self.stats.preemptions;
        let num_decodes = self.schedule_running(&mut budget, true);
        if (num_decodes as usize) < self.queues.num_running() {
            self.schedule_running(&mut budget, false);
        }
        if self.stats.preemptions == preemptions {
            self.admit_waiting(&mut budget);
        }
        let header = self.write(arena, num_decodes);
        self.in_flight = header.num_tokens > 0;
        let is_step = self.in_flight || header.num_ended > 0;
        if !self.in_flight {
            self.forget_swaps();
            self.pool.end_step();
        }
        if !is_step {
            self.step_id -= 1;
        }
        self.count_wasted_slots();
        self.publish_stats();
        Ok(is_step.then_some(header))
    }

    /// Takes the sampled token of every row, or where that belongs to a beam its candidates; `states` gets 0 or the finish
    /// reason of each. All rows of a search get the same one: [`Self::take_beams`] has the answers of those that ended.
    ///
    /// # Errors
    /// `NotInFlight`, `RowCount`, `CandidateCount`. Nothing has changed then.
    pub fn commit(
        &mut self,
        step_id: u64,
        tokens: &[i32],
        candidates: &BeamRows<'_>,
        states: &mut Vec<i32>,
    ) -> Result<(), StepError> {
        self.expect_in_flight(step_id)?;
        let rows = self.scheduled.iter().map(|part| part.num_rows as usize).sum();
        if tokens.len() != rows {
            return Err(StepError::RowCount {
                given: tokens.len(),
                rows,
            });
        }
        self.check_candidates(candidates)?;
        states.clear();
        let mut rows_of_beams = Vec::new();
        states.reserve(rows);
        let num_changes = self.queues.num_changes();
        let scheduled = std::mem::take(&mut self.scheduled);
        let mut left = tokens;
        for part in &scheduled {
            self.stats.scheduled_tokens += u64::from(part.num_tokens);
            self.advance(*part);
            let (sampled, rest) = left.split_at(part.num_rows as usize);
            left = rest;
            match *sampled {
                [] => {}
                [_] if self.beam_candidates(part).is_some() => {
                    rows_of_beams.push((part.seq, states.len()));
                    states.push(0);
                }
                [token] => self.append(part.seq, token, states),
                _ => self.append_forks(part.seq, sampled, states),
            }
        }
        self.commit_beams(&rows_of_beams, candidates, states);
        self.scheduled = scheduled;
        self.report_rows(tokens, states);
        self.end_step();
        self.stats.steps += 1;
        self.stats.generation_tokens += rows as u64;
        if self.queues.num_changes() != num_changes || !rows_of_beams.is_empty() {
            self.count_wasted_slots();
        }
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
        self.forget_swaps();
        self.end_step();
        self.count_wasted_slots();
        self.publish_stats();
        Ok(())
    }

    /// Whether any request is waiting or running.
    pub fn has_work(&self) -> bool {
        self.sequences.len() > 0 || !self.ended.is_empty()
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
        self.host.end_step(self.step_id);
        self.in_flight = false;
    }

    // Building a step.

    /// Schedules the running sequences that decode, or those that compute more than one token. Returns how many.
    fn schedule_running(&mut self, budget: &mut Budget, decodes: bool) -> u32 {
        let mut num_scheduled = 0;
        let mut at = 0;
        // Whoever is preempted on the way stands behind `at`.
        while let Some(idx) = self.queues.running_at(at).filter(|_| budget.tokens > 0) {
            at += 1;
            let sequence = self.sequences.get(idx);
            if sequence.last_step == self.step_id {
                continue;
            }
            if decodes && sequence.leads_beams() {
                num_scheduled += self.schedule_beams(idx, budget);
                continue;
            }
            if sequence.decodes() != decodes {
                continue;
            }
            let Some(part) = budget.part_of(idx, sequence, sequence.num_computed) else {
                continue;
            };
            if self.make_room(idx, part.num_tokens) {
                self.push_part(part, budget);
                num_scheduled += 1;
            }
        }
        num_scheduled
    }

    /// Gets the blocks for the next `num_tokens` tokens of a running sequence, at the cost of newer ones if need be.
    fn make_room(&mut self, idx: SeqIdx, num_tokens: u32) -> bool {
        while !self.reserve(idx, num_tokens) {
            let Some(victim) = self.victim(idx) else {
                return false;
            };
            self.preempt(victim);
        }
        true
    }

    /// Makes the slots of the next `num_tokens` tokens of a running sequence writable, or leaves everything as it was.
    pub(super) fn reserve(&mut self, idx: SeqIdx, num_tokens: u32) -> bool {
        let sequence = self.sequences.get_mut(idx);
        let (from, to) = (sequence.num_computed, sequence.num_computed + num_tokens);
        let table = sequence
            .table
            .as_mut()
            .expect("a running sequence has a block table");
        table.reserve(&mut self.pool, from, to, &mut self.copies).is_ok()
    }

    /// A running sequence behind `idx` that is not part of this step, chosen by `policy`.
    ///
    /// Without one, `idx` keeps its blocks and sits the step out. The first sequence is never a victim, and it can
    /// take every block that no sequence of this step holds, so something always gets on.
    pub(super) fn victim(&self, idx: SeqIdx) -> Option<SeqIdx> {
        let Sequence { key, request, .. } = *self.sequences.get(idx);
        // Taking a beam takes its group.
        let spare = |&other: &SeqIdx| {
            let other = self.sequences.get(other);
            other.last_step != self.step_id
                && !(other.is_beam && (other.request == request || self.has_beam_in_step(other.request)))
        };
        self.queues.running_after(key).filter(spare).max_by_key(|&other| {
            let sequence = self.sequences.get(other);
            policy::victim_rank(sequence.key, sequence.num_preemptions)
        })
    }

    pub(super) fn push_part(&mut self, part: Scheduled, budget: &mut Budget) {
        budget.tokens -= part.num_tokens;
        budget.rows -= part.num_rows;
        let sequence = self.sequences.get_mut(part.seq);
        sequence.last_step = self.step_id;
        if sequence.is_beam {
            let request = sequence.request;
            self.note_beam_step(request);
        }
        self.scheduled.push(part);
    }

    fn write(&mut self, arena: &mut [i32], num_decodes: u32) -> StepHeader {
        let num_ended = self.ended.len().min(MAX_ENDED_PER_STEP);
        let count = |len: usize| u32::try_from(len).expect("step counts fit");
        let block_size = self.config.block_size;
        let beam_rows = self.beam_rows();
        let num_swaps_out = self.order_swaps();
        let header = StepHeader {
            step_id: self.step_id,
            num_tokens: self.scheduled.iter().map(|part| part.num_tokens).sum(),
            num_sequences: count(self.scheduled.len()),
            num_decodes,
            num_rows: self.scheduled.iter().map(|part| part.num_rows).sum(),
            num_copies: count(self.copies.len()),
            num_swaps_out: count(num_swaps_out),
            num_swaps_in: count(self.swaps.len() - num_swaps_out),
            num_ended: count(num_ended),
            num_beam_rows: count(beam_rows.len()),
        };
        let num_table_blocks = self
            .scheduled
            .iter()
            .map(|part| self.config.blocks_for(part.num_computed + part.num_tokens) as usize)
            .sum();
        let mut writer = Writer::new(arena, &header, num_table_blocks, block_size);
        let (decodes, others) = self.scheduled.split_at(num_decodes as usize);
        let sequences = &self.sequences;
        let describe = |part: &Scheduled| {
            let sequence = sequences.get(part.seq);
            let start = part.num_computed;
            Part {
                tokens: &sequence.tokens[start as usize..(start + part.num_tokens) as usize],
                start,
                table: sequence.table(),
                sample_index: sequence.key.sample_index,
                num_rows: part.num_rows,
                words: &sequence.words,
            }
        };
        writer.decodes(decodes.iter().map(describe));
        for part in others.iter().map(describe) {
            writer.part(&part);
        }
        self.report_ended(num_ended);
        let rows = writer.finish(
            &self.copies,
            &self.swaps,
            self.ended.drain(..num_ended),
            &beam_rows,
        );
        self.rows.clear();
        self.rows.extend_from_slice(rows);
        self.stats.copies += self.copies.len() as u64;
        header
    }

    // Taking a step's result.

    /// Counts the computed tokens and publishes the blocks that became full.
    fn advance(&mut self, part: Scheduled) {
        let sequence = self.sequences.get_mut(part.seq);
        let start = part.num_computed;
        sequence.num_computed = start + part.num_tokens;
        let num_again = sequence
            .num_computed_before
            .saturating_sub(start)
            .min(part.num_tokens);
        self.stats.recomputed_tokens += u64::from(num_again);
        let num_prompt = sequence.prompt_len.saturating_sub(start).min(part.num_tokens);
        let num_new_prompt = num_prompt.saturating_sub(num_again);
        self.stats.prompt_tokens += u64::from(num_new_prompt);
        self.tenants
            .charge(sequence.tenant, num_new_prompt, part.num_rows);
        let table = sequence
            .table
            .as_mut()
            .expect("a scheduled sequence has a block table");
        table.publish(&mut self.pool, &sequence.tokens, sequence.num_computed);
    }

    /// Appends a sampled token and ends the sequence if it was the last one.
    pub(super) fn append(&mut self, idx: SeqIdx, token: i32, states: &mut Vec<i32>) {
        let sequence = self.sequences.get_mut(idx);
        sequence.pending_forks = 0;
        sequence.tokens.push(token.cast_unsigned());
        self.conclude(idx, states);
    }

    /// Says whether a sequence goes on after its last token, and ends it if not.
    pub(super) fn conclude(&mut self, idx: SeqIdx, states: &mut Vec<i32>) {
        let state = self.finish_state(idx);
        states.push(state.map_or(0, |reason| reason as i32));
        if let Some(reason) = state {
            self.end_sequence(idx, reason, false);
        }
    }

    fn finish_state(&self, idx: SeqIdx) -> Option<FinishReason> {
        let sequence = self.sequences.get(idx);
        let rule = sequence.end_rule;
        let token = *sequence.tokens.last().expect("a sequence has tokens");
        let is_stop_token = || {
            let params = &self.requests.of(sequence.request).request.params;
            params.stop_token_ids.contains(&token)
        };
        if (!rule.ignore_eos && self.config.eos_token_ids.contains(&token))
            || (rule.has_stop_tokens && is_stop_token())
        {
            return Some(FinishReason::Stop);
        }
        (sequence.num_generated() >= rule.max_tokens).then_some(FinishReason::Length)
    }
}
