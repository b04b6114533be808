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
use super::in_flight::{MAX_STEPS, StepInFlight, StepsInFlight};
use super::live::LiveRequests;
use super::observe::TenantCounts;
use super::queues::Queues;
use super::request::FinishReason;
use super::sequence::Sequence;
use super::slab::{SeqIdx, Slab};
use super::step::{self, Decode, Ended, Part, StepHeader, Writer};
use super::swap::Swap;

/// The state that a commit gives to a row whose sequence had ended before: nothing was sampled for anybody.
pub const VOID: i32 = -1;
/// Stands in the arena for a token that a step in flight samples.
const UNKNOWN: [u32; 1] = [0];

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
    /// Steps that were given out and not committed yet.
    pub(super) steps: StepsInFlight,
    /// The step being built, empty between two calls.
    pub(super) building: StepInFlight,
    /// Sequences that sit out the step being built; see `room`.
    pub(super) held_out: Vec<SeqIdx>,
    pub(super) copies: Vec<(BlockId, BlockId)>,
    /// Blocks that move between device and host in the step that is being built.
    pub(super) swaps: Vec<Swap>,
    pub(super) ended: VecDeque<Ended>,
    /// Where events go, if anybody reads them.
    pub(super) events: Option<EventQueue>,
    /// The number given last.
    pub(super) step_id: u64,
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
        let holds = Holds::new(&config);
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
            steps: StepsInFlight::default(),
            building: StepInFlight::default(),
            held_out: Vec::new(),
            copies: Vec::new(),
            swaps: Vec::new(),
            ended: VecDeque::new(),
            events: None,
            step_id: 0,
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

    /// Decides the next step and writes it into `arena`.
    ///
    /// It may be called while one step is in flight: the next one goes on from what that one is going to compute, and
    /// takes from it the tokens that it samples, as the arena's section `token_source` says. Then None says only that
    /// nothing can be computed before that step is committed. While none is in flight, None says that nothing runs and
    /// nothing ended.
    ///
    /// # Errors
    /// `InFlight` while two steps are neither committed nor failed, `ArenaTooSmall`.
    pub fn schedule(&mut self, arena: &mut [i32]) -> Result<Option<StepHeader>, StepError> {
        if let Some(oldest) = self.steps.oldest().filter(|_| self.steps.len() == MAX_STEPS) {
            return Err(StepError::InFlight { step_id: oldest.id });
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
        self.copies.clear();
        self.swaps.clear();
        self.held_out.clear();
        if !self.steps.is_empty() {
            self.pool.begin_step();
        }
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
        if self.stats.preemptions == preemptions && self.held_out.is_empty() {
            self.admit_waiting(&mut budget);
        }
        let header = self.write(arena, num_decodes);
        self.count_wasted_slots();
        let is_step = self.give_out(&header) || header.num_ended > 0;
        if !is_step {
            self.step_id -= 1;
        }
        self.publish_stats();
        Ok(is_step.then_some(header))
    }

    /// Takes the sampled token of every row of the oldest step in flight, or where that belongs to a beam its candidates;
    /// `states` gets 0 or the finish reason of each, or [`VOID`]. All rows of a search get the same one:
    /// [`Self::take_beams`] has the answers of those that ended.
    ///
    /// A negative number in place of a token is a row that could not be sampled. It ends its request, which the next
    /// `schedule` reports, and no other.
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
        let oldest = self.steps.oldest().filter(|oldest| oldest.id == step_id);
        let oldest = oldest.ok_or(StepError::NotInFlight { step_id })?;
        let rows = oldest.rows.len();
        if tokens.len() != rows {
            return Err(StepError::RowCount {
                given: tokens.len(),
                rows,
            });
        }
        Self::check_candidates(&oldest.beams, candidates)?;
        let num_changes = self.queues.num_changes();
        self.end_unsampled(tokens);
        let Some(step) = self.steps.pop() else {
            return Err(StepError::NotInFlight { step_id });
        };
        states.clear();
        states.reserve(rows);
        self.take_rows(&step, tokens, candidates, states);
        self.report_rows(&step, tokens, states);
        let has_beams = !step.beams.is_empty();
        step.moves.count(&mut self.stats);
        self.end_step(step);
        self.stats.steps += 1;
        let num_void = states.iter().filter(|&&state| state == VOID).count();
        self.stats.void_rows += num_void as u64;
        self.stats.generation_tokens += (rows - num_void) as u64;
        if self.queues.num_changes() != num_changes || has_beams {
            self.count_wasted_slots();
        }
        self.publish_stats();
        Ok(())
    }

    /// Ends every request that the oldest step in flight was computing; the next `schedule` reports them. What a later
    /// step computes of them is void.
    ///
    /// # Errors
    /// `NotInFlight`.
    pub fn fail_step(&mut self) -> Result<(), StepError> {
        let step = self.steps.pop().ok_or(StepError::NotInFlight {
            step_id: self.step_id,
        })?;
        let failed: Vec<RequestId> = (step.parts.iter())
            .filter_map(|part| self.sequences.find(part.seq))
            .map(|sequence| sequence.request)
            .collect();
        for request in failed {
            self.end_request(request, FinishReason::Error);
        }
        self.forget_swaps(step.id);
        self.end_step(step);
        self.count_wasted_slots();
        self.publish_stats();
        Ok(())
    }

    /// Whether any request is waiting or running.
    pub fn has_work(&self) -> bool {
        self.sequences.len() > 0 || !self.ended.is_empty()
    }

    // Building a step.

    /// Schedules the running sequences that decode, or those that compute more than one token. Returns how many.
    fn schedule_running(&mut self, budget: &mut Budget, decodes: bool) -> u32 {
        let mut num_scheduled = 0;
        let mut at = 0;
        loop {
            if decodes {
                let num_ready = self.schedule_ready(at, budget);
                at += num_ready as usize;
                num_scheduled += num_ready;
            }
            // Whoever is preempted on the way stands behind `at`.
            let Some(idx) = self.queues.running_at(at).filter(|_| budget.tokens > 0) else {
                return num_scheduled;
            };
            at += 1;
            let sequence = self.sequences.get(idx);
            if sequence.last_step == self.step_id || self.is_held_out(idx) {
                continue;
            }
            if decodes && sequence.leads_beams() {
                num_scheduled += self.schedule_beams(idx, budget);
                continue;
            }
            if sequence.decodes() != decodes {
                continue;
            }
            let Some(part) = budget.part_of(idx, sequence) else {
                continue;
            };
            if self.make_room(idx, part.num_tokens) {
                self.push_part(part, budget);
                num_scheduled += 1;
            }
        }
    }

    pub(super) fn push_part(&mut self, part: Scheduled, budget: &mut Budget) {
        let row = self.config.max_rows() - budget.rows;
        budget.tokens -= part.num_tokens;
        budget.rows -= part.num_rows;
        let sequence = self.sequences.get_mut(part.seq);
        sequence.last_step = self.step_id;
        sequence.num_scheduled = part.num_computed + part.num_tokens;
        sequence.row = row;
        if sequence.is_beam {
            let request = sequence.request;
            self.note_beam_step(request);
        }
        self.building.parts.push(part);
    }

    fn write(&mut self, arena: &mut [i32], num_decodes: u32) -> StepHeader {
        let num_ended = self.ended.len().min(MAX_ENDED_PER_STEP);
        let count = |len: usize| u32::try_from(len).expect("step counts fit");
        let block_size = self.config.block_size;
        let beam_rows = self.beam_rows();
        let num_swaps_out = self.order_swaps();
        let sampled = self.building.parts.iter().filter(|part| part.num_rows > 0);
        let num_logprobs = sampled.map(|part| self.sequences.get(part.seq).words.num_logprobs());
        let header = StepHeader {
            step_id: self.step_id,
            num_tokens: self.building.num_tokens(),
            num_sequences: count(self.building.parts.len()),
            num_decodes,
            num_rows: self.building.num_rows(),
            num_copies: count(self.copies.len()),
            num_swaps_out: count(num_swaps_out),
            num_swaps_in: count(self.swaps.len() - num_swaps_out),
            num_ended: count(num_ended),
            num_beam_rows: count(beam_rows.len()),
            num_followers: count(self.building.num_followers()),
            num_logprobs: num_logprobs.max().unwrap_or(-1),
        };
        let num_table_blocks = (self.building.parts.iter())
            .map(|part| self.config.blocks_for(part.num_computed + part.num_tokens) as usize)
            .sum();
        let mut writer = Writer::new(arena, &header, num_table_blocks, block_size);
        let (decodes, others) = self.building.parts.split_at(num_decodes as usize);
        let sequences = &self.sequences;
        writer.decodes(decodes.iter().map(|part| {
            let sequence = sequences.get(part.seq);
            Decode {
                token: sequence.tokens.newest(),
                source: part.source,
                position: part.num_computed,
                table: sequence.table(),
                words: &sequence.words,
            }
        }));
        for part in others {
            let sequence = sequences.get(part.seq);
            let (start, end) = (part.num_computed, part.num_computed + part.num_tokens);
            writer.part(&Part {
                tokens: if part.source < 0 {
                    &sequence.tokens[start as usize..end as usize]
                } else {
                    &UNKNOWN
                },
                source: part.source,
                start,
                table: sequence.table(),
                sample_index: sequence.key.sample_index,
                num_rows: part.num_rows,
                words: &sequence.words,
            });
        }
        self.report_ended(num_ended);
        let rows = writer.finish(
            &self.copies,
            &self.swaps,
            self.ended.drain(..num_ended),
            &beam_rows,
        );
        self.building.rows.extend_from_slice(rows);
        self.building.beams = beam_rows;
        header
    }

    // Taking a step's result.

    /// Takes what every part of a step computed and sampled.
    fn take_rows(
        &mut self,
        step: &StepInFlight,
        tokens: &[i32],
        candidates: &BeamRows<'_>,
        states: &mut Vec<i32>,
    ) {
        let mut rows_of_beams = Vec::new();
        let mut beams = step.beams.iter().map(|&(row, _)| row as usize).peekable();
        let (mut parts, mut left) = (step.parts.as_slice(), tokens);
        loop {
            if step.beams.is_empty() {
                let num_ready = self.commit_ready(parts, left);
                states.resize(states.len() + num_ready, 0);
                (parts, left) = (&parts[num_ready..], &left[num_ready..]);
            }
            let Some((part, rest)) = parts.split_first() else {
                break;
            };
            let (sampled, rest_of_tokens) = left.split_at(part.num_rows as usize);
            (parts, left) = (rest, rest_of_tokens);
            let is_live = self.sequences.find(part.seq).is_some();
            if is_live {
                self.advance(*part);
            }
            match *sampled {
                [] => {}
                [_] if beams.next_if_eq(&states.len()).is_some() => {
                    rows_of_beams.push((is_live.then_some(part.seq), states.len()));
                    states.push(if is_live { 0 } else { VOID });
                }
                _ if !is_live => states.extend(sampled.iter().map(|_| VOID)),
                [token] => self.append(part.seq, token, states),
                _ => self.append_forks(part.seq, sampled, states),
            }
        }
        self.stats.scheduled_tokens += u64::from(step.num_tokens());
        self.commit_beams(&rows_of_beams, candidates, states);
    }

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
        if sequence.is_in_flight() {
            self.keep_full_blocks(part.seq);
        }
        let sequence = self.sequences.get_mut(part.seq);
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
        let sequence = self.sequences.get(idx);
        let token = sequence.tokens.newest();
        let reason = if sequence.stops_at(token, &self.config.eos_token_ids, &self.requests) {
            FinishReason::Stop
        } else if sequence.num_generated() >= sequence.end_rule.max_tokens {
            FinishReason::Length
        } else {
            states.push(0);
            return;
        };
        states.push(reason as i32);
        self.end_sequence(idx, reason, false);
    }
}
