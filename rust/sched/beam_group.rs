//! The beams of a search as one unit of scheduling: computed in the same step or not at all, admitted with the blocks of
//! all of them, preempted and resumed together.
//!
//! A group begins as one sequence, its prompt, and becomes as many as it is wide once that is computed; they stand next to
//! each other among the running ones. After every step the tables are rebuilt from those of the parents: full blocks are
//! shared, and a partial one is copied on the next write. A preempted group is one waiting sequence again, its first beam;
//! the tokens of the others are parked until that one is computed, and then begin as forks of it.

use crate::block::BlockTable;
use crate::error::StepError;
use crate::ids::RequestId;

use super::beam_search::{BeamSearch, Candidates, Continuation, Hypothesis};
use super::request::{FinishReason, SamplingParams};
use super::scheduler::{Budget, Scheduled, Scheduler};
use super::sequence::Sequence;
use super::slab::SeqIdx;

/// The candidates of every row of a beam that a step sampled, `per_row` of each one after another, the likeliest first.
#[derive(Clone, Copy, Default, Debug)]
pub struct BeamRows<'a> {
    /// Token ids.
    pub tokens: &'a [i32],
    /// Their log-probabilities.
    pub logprobs: &'a [f32],
    /// Candidates a row, at least as many as the arena asks of any row.
    pub per_row: usize,
}

impl<'a> BeamRows<'a> {
    fn row(&self, row: usize, num_candidates: usize) -> Candidates<'a> {
        let start = row * self.per_row;
        let wanted = start..start + num_candidates;
        Candidates {
            tokens: &self.tokens[wanted.clone()],
            logprobs: &self.logprobs[wanted],
        }
    }
}

/// The answers of a search that is over, the best first.
#[derive(Clone, Debug)]
pub struct BeamResult {
    /// Who asked.
    pub request: RequestId,
    /// As many as the search was wide.
    pub hypotheses: Vec<Hypothesis>,
}

/// A beam of a preempted group.
#[derive(Debug)]
struct Parked {
    tokens: Vec<u32>,
    num_computed_before: u32,
    /// Leading tokens that it shares with the first beam, but for that one's last token.
    num_shared: u32,
}

/// What a group has beside its sequences.
#[derive(Debug)]
pub(super) struct BeamGroup {
    search: BeamSearch,
    /// The beams but the first, of a group that waits or whose first beam is being computed again.
    parked: Vec<Parked>,
    /// The last step that holds any beam: then none of them is a victim of that step.
    last_step: u64,
}

impl BeamGroup {
    /// The group of a request that asks for one.
    pub(super) fn new(params: &SamplingParams, num_end_tokens: usize) -> Option<Self> {
        let num_end_tokens = if params.ignore_eos { 0 } else { num_end_tokens };
        let num_end_tokens = num_end_tokens + params.stop_token_ids.len();
        Some(Self {
            search: BeamSearch::new(params.beam?, params.max_tokens, num_end_tokens),
            parked: Vec::new(),
            last_step: 0,
        })
    }

    pub(super) const fn width(&self) -> u32 {
        self.search.width()
    }

    pub(super) const fn num_candidates(&self) -> u32 {
        self.search.num_candidates()
    }
}

impl Scheduler {
    /// Sequences that run, and those that running groups will become: each has a place of its own.
    pub(super) fn num_places(&self) -> usize {
        let coming = self.running_groups().map(|(leader, group)| {
            let num_live = self.requests.of(leader.request).sequences.len();
            group.width() as usize - num_live
        });
        self.queues.num_running() + coming.sum::<usize>()
    }

    /// Places that a waiting sequence takes when it starts.
    pub(super) fn places_for(&self, sequence: &Sequence) -> usize {
        self.beams
            .get(&sequence.request)
            .map_or(1, |group| group.width() as usize)
    }

    /// Blocks that running groups need beyond those of their sequences: they are as good as taken.
    pub(super) fn num_blocks_promised_to_beams(&self) -> u32 {
        self.running_groups()
            .map(|(leader, _)| self.num_blocks_of_other_beams(leader))
            .sum()
    }

    /// Sequences that this one stands for: its own and those which it will be forked into.
    pub(super) fn num_branches(&self, sequence: &Sequence) -> u32 {
        match self.beams.get(&sequence.request) {
            Some(group) if !sequence.is_beam || !group.parked.is_empty() => group.width(),
            _ => sequence.num_rows(),
        }
    }

    /// Blocks that the beams which a sequence will be forked into need beside its own, up to their next step.
    pub(super) fn num_blocks_of_other_beams(&self, leader: &Sequence) -> u32 {
        let Some(group) = self.beams.get(&leader.request) else {
            return 0;
        };
        if !leader.is_beam {
            return self.num_blocks_of_first_fork(leader, group.width());
        }
        let private = |beam: &Parked| {
            let num_tokens = u32::try_from(beam.tokens.len()).expect("no longer than max_model_len");
            self.config.blocks_for(num_tokens) - beam.num_shared / self.config.block_size
        };
        group.parked.iter().map(private).sum()
    }

    /// The first token of every beam opens a block or needs a copy of the prompt's last one; the last owner writes in
    /// place. With one token to generate no beam goes on.
    fn num_blocks_of_first_fork(&self, leader: &Sequence, width: u32) -> u32 {
        if self.requests.of(leader.request).request.params.max_tokens == 1 {
            return 0;
        }
        let num_shared = leader.prompt_len / self.config.block_size;
        let num_own = self.config.blocks_for(leader.prompt_len) - num_shared;
        width * (self.config.blocks_for(leader.prompt_len + 1) - num_shared) - num_own
    }

    /// The groups that run, by their first sequences.
    fn running_groups(&self) -> impl Iterator<Item = (&Sequence, &BeamGroup)> {
        self.beams.iter().filter_map(|(&request, group)| {
            let leader = self.sequences.get(self.requests.of(request).sequences[0]);
            leader.table.is_some().then_some((leader, group))
        })
    }

    // Building a step.

    /// Schedules the next token of every beam of a group, or of none.
    pub(super) fn schedule_beams(&mut self, leader: SeqIdx, budget: &mut Budget) -> u32 {
        let request = self.sequences.get(leader).request;
        let beams = &self.requests.of(request).sequences;
        let num_beams = u32::try_from(beams.len()).expect("as many as the group is wide");
        let is_ready = self.beams[&request].parked.is_empty()
            && beams
                .iter()
                .all(|&idx| self.sequences.get(idx).num_remaining() == 1);
        if !is_ready || num_beams > budget.tokens.min(budget.rows) {
            return 0;
        }
        let beams = beams.clone();
        if !self.make_room_for_beams(&beams) {
            return 0;
        }
        for idx in beams {
            let num_computed = self.sequences.get(idx).num_computed;
            let part = Scheduled {
                seq: idx,
                num_computed,
                num_tokens: 1,
                num_rows: 1,
            };
            self.push_part(part, budget);
        }
        num_beams
    }

    /// Gets a writable slot for the next token of every beam, or leaves the group as it was.
    fn make_room_for_beams(&mut self, beams: &[SeqIdx]) -> bool {
        let last = *beams.last().expect("a group has a beam");
        while self.cost_of_beams(beams) > self.pool.num_available() {
            let Some(victim) = self.victim(last) else {
                return false;
            };
            self.preempt(victim);
        }
        for &idx in beams {
            let reserved = self.reserve(idx, 1);
            assert!(reserved, "the cost of all beams was found available");
        }
        true
    }

    /// Blocks that the next tokens of all beams take. Of those that share a partial block the last one writes in place.
    fn cost_of_beams(&self, beams: &[SeqIdx]) -> u32 {
        let mut tails: Vec<(crate::ids::BlockId, u32)> = Vec::new();
        let mut cost = 0;
        for &idx in beams {
            let sequence = self.sequences.get(idx);
            cost += sequence
                .table()
                .cost(&self.pool, sequence.num_computed, sequence.num_tokens());
            let at = (sequence.num_computed / self.config.block_size) as usize;
            if let Some(&tail) = sequence.table().blocks().get(at)
                && !self.pool.is_writable(tail)
            {
                match tails.iter_mut().find(|(other, _)| *other == tail) {
                    Some((_, num_holders)) => *num_holders += 1,
                    None => tails.push((tail, 1)),
                }
            }
        }
        let in_place = |&&(tail, num_holders): &&(crate::ids::BlockId, u32)| {
            !self.pool.is_published(tail)
                && self.pool.ref_count(tail) - self.pool.num_leases(tail) == num_holders
        };
        cost - u32::try_from(tails.iter().filter(in_place).count()).expect("no more than beams")
    }

    /// Notes that a step holds a beam.
    pub(super) fn note_beam_step(&mut self, request: RequestId) {
        if let Some(group) = self.beams.get_mut(&request) {
            group.last_step = self.step_id;
        }
    }

    /// Whether a beam of the request's group is part of the step that is being built.
    pub(super) fn has_beam_in_step(&self, request: RequestId) -> bool {
        self.beams
            .get(&request)
            .is_some_and(|group| group.last_step == self.step_id)
    }

    // Preempting and resuming.

    /// Takes the blocks of all beams but the first, and parks their tokens. Returns the first one.
    pub(super) fn park_beams(&mut self, request: RequestId) -> SeqIdx {
        let live = self.requests.of_mut(request);
        let others = live.sequences.split_off(1);
        let leader = live.sequences[0];
        let parked: Vec<Parked> = others.into_iter().map(|idx| self.park(leader, idx)).collect();
        if !parked.is_empty() {
            let group = self.beams.get_mut(&request).expect("a beam has a group");
            group.parked = parked;
        }
        leader
    }

    fn park(&mut self, leader: SeqIdx, idx: SeqIdx) -> Parked {
        let mut beam = self.sequences.remove(idx);
        self.queues.remove(beam.tenant, beam.key);
        let table = beam.table.as_mut().expect("the beams of a group run together");
        table.release(&mut self.pool);
        let leading = &self.sequences.get(leader).tokens;
        let pairs = leading[..leading.len() - 1]
            .iter()
            .zip(&beam.tokens[..beam.tokens.len() - 1]);
        let num_shared = pairs.take_while(|(one, other)| one == other).count();
        Parked {
            num_computed_before: beam.num_computed_before.max(beam.num_computed),
            num_shared: u32::try_from(num_shared).expect("no longer than max_model_len"),
            tokens: beam.tokens,
        }
    }

    /// Lets the parked beams go on whose first beam is computed up to its last token.
    pub(super) fn resume_beams(&mut self) {
        let ready: Vec<RequestId> = self
            .running_groups()
            .filter(|(leader, group)| !group.parked.is_empty() && leader.num_remaining() == 1)
            .map(|(leader, _)| leader.request)
            .collect();
        for request in ready {
            let group = self.beams.get_mut(&request).expect("it was just seen");
            let parked = std::mem::take(&mut group.parked);
            for (sample_index, beam) in (1..).zip(parked) {
                let leader = self.requests.of(request).sequences[0];
                let table = self
                    .sequences
                    .get(leader)
                    .table()
                    .fork_prefix(&mut self.pool, beam.num_shared);
                let idx = self.add_beam(leader, sample_index, beam.tokens, table, beam.num_shared);
                self.sequences.get_mut(idx).num_computed_before = beam.num_computed_before;
            }
        }
    }

    /// Adds a running beam to the group of `leader`.
    fn add_beam(
        &mut self,
        leader: SeqIdx,
        sample_index: u32,
        tokens: Vec<u32>,
        table: BlockTable,
        num_computed: u32,
    ) -> SeqIdx {
        let first = self.sequences.get(leader);
        let request = first.request;
        let mut beam = first.sibling(sample_index, tokens, num_computed, Some(table));
        beam.is_beam = true;
        beam.num_preemptions = first.num_preemptions;
        let key = beam.key;
        let idx = self.sequences.insert(beam);
        self.queues.run(key, idx);
        self.requests.of_mut(request).sequences.push(idx);
        idx
    }

    // Taking a step's result.

    /// Refuses candidates that are not those which the step in flight asked for.
    pub(super) fn check_candidates(&self, given: &BeamRows<'_>) -> Result<(), StepError> {
        let wanted = || {
            self.scheduled
                .iter()
                .filter_map(|part| self.beam_candidates(part))
        };
        let num_rows = wanted().count();
        let per_row = wanted().max().unwrap_or(0) as usize;
        let is_right = given.per_row >= per_row
            && given.tokens.len() == num_rows * given.per_row
            && given.logprobs.len() == given.tokens.len();
        if is_right || num_rows == 0 {
            return Ok(());
        }
        Err(StepError::CandidateCount {
            given: given.tokens.len().min(given.logprobs.len()),
            rows: num_rows,
            per_row,
        })
    }

    /// Candidates that a part of the step asks for. None where it samples nothing, or no beam.
    pub(super) fn beam_candidates(&self, part: &Scheduled) -> Option<u32> {
        if self.beams.is_empty() || part.num_rows == 0 {
            return None;
        }
        let request = self.sequences.get(part.seq).request;
        self.beams.get(&request).map(BeamGroup::num_candidates)
    }

    /// The rows of the step that is being built which belong to beams, and the candidates wanted of each.
    pub(super) fn beam_rows(&self) -> Vec<(u32, u32)> {
        if self.beams.is_empty() {
            return Vec::new();
        }
        let mut row = 0;
        let mut rows = Vec::new();
        for part in &self.scheduled {
            rows.extend(
                self.beam_candidates(part)
                    .map(|num_candidates| (row, num_candidates)),
            );
            row += part.num_rows;
        }
        rows
    }

    /// Takes the candidates of all beams of the step. `rows`: the sequence and the row of each, group after group.
    pub(super) fn commit_beams(
        &mut self,
        rows: &[(SeqIdx, usize)],
        candidates: &BeamRows<'_>,
        states: &mut [i32],
    ) {
        let mut at = 0;
        while at < rows.len() {
            let request = self.sequences.get(rows[at].0).request;
            let num_beams = self.requests.of(request).sequences.len();
            let state = self.advance_beams(request, at, candidates);
            for &(_, row) in &rows[at..at + num_beams] {
                states[row] = state;
            }
            at += num_beams;
        }
    }

    /// Takes a group one token further, or ends it. Returns the state of its rows; the first one is `row`.
    fn advance_beams(&mut self, request: RequestId, row: usize, candidates: &BeamRows<'_>) -> i32 {
        let live = self.requests.of(request);
        let params = &live.request.params;
        let beams = live.sequences.clone();
        let generated: Vec<&[u32]> = beams
            .iter()
            .map(|&idx| self.sequences.get(idx))
            .map(|beam| &beam.tokens[beam.prompt_len as usize..])
            .collect();
        let eos_token_ids = &self.config.eos_token_ids;
        let is_end = |token: u32| {
            (!params.ignore_eos && eos_token_ids.contains(&token)) || params.stop_token_ids.contains(&token)
        };
        let group = self.beams.get_mut(&request).expect("a beam has a group");
        let num_candidates = group.num_candidates() as usize;
        let rows: Vec<Candidates<'_>> = (0..beams.len())
            .map(|beam| candidates.row(row + beam, num_candidates))
            .collect();
        let next = group.search.advance(&generated, &rows, is_end);
        if next.is_empty() {
            return self.finish_beams(request) as i32;
        }
        self.rebuild_beams(&beams, &next);
        0
    }

    /// Gives every beam the tokens and the table of its parent, and its new token. References are added before any is
    /// dropped: the last child of a parent takes its table over, the others share it, and what has no child is released.
    fn rebuild_beams(&mut self, beams: &[SeqIdx], next: &[Continuation]) {
        let leader = beams[0];
        let num_computed = self.sequences.get(leader).num_computed;
        let mut parents: Vec<(Vec<u32>, Option<BlockTable>)> = Vec::with_capacity(beams.len());
        for &idx in beams {
            let beam = self.sequences.get_mut(idx);
            parents.push((std::mem::take(&mut beam.tokens), beam.table.take()));
        }
        let mut children: Vec<(Vec<u32>, BlockTable)> = Vec::with_capacity(next.len());
        for (at, one) in next.iter().enumerate() {
            let is_last = next[at + 1..].iter().all(|other| other.parent != one.parent);
            let (tokens, table) = &mut parents[one.parent];
            let mut child = if is_last {
                (
                    std::mem::take(tokens),
                    table.take().expect("it is taken over once"),
                )
            } else {
                let table = table.as_ref().expect("it is taken over by the last child");
                (tokens.clone(), table.fork(&mut self.pool))
            };
            child.0.push(one.token);
            children.push(child);
        }
        for mut table in parents.into_iter().filter_map(|(_, table)| table) {
            table.release(&mut self.pool);
        }
        let is_beam = next.len() > 1;
        for (place, (tokens, table)) in children.into_iter().enumerate() {
            if let Some(&idx) = beams.get(place) {
                let beam = self.sequences.get_mut(idx);
                (beam.tokens, beam.table, beam.is_beam) = (tokens, Some(table), is_beam);
                // Hashes of blocks beyond the prompt were those of other tokens.
                beam.hashes
                    .truncate((beam.prompt_len / self.config.block_size) as usize);
            } else {
                let sample_index = u32::try_from(place).expect("as many as the group is wide");
                self.add_beam(leader, sample_index, tokens, table, num_computed);
            }
        }
    }

    /// Ends a group whose search is over.
    fn finish_beams(&mut self, request: RequestId) -> FinishReason {
        let group = self.beams.get_mut(&request).expect("a beam has a group");
        let hypotheses = group.search.take_hypotheses();
        let reason = hypotheses
            .first()
            .map_or(FinishReason::Length, |best| best.reason);
        self.beam_results.push(BeamResult { request, hypotheses });
        for idx in self.requests.of(request).sequences.clone() {
            self.end_sequence(idx, reason, false);
        }
        reason
    }

    /// The answers of the searches that ended since the last call.
    pub fn take_beams(&mut self) -> Vec<BeamResult> {
        std::mem::take(&mut self.beam_results)
    }

    /// The invariants of groups: the beams of one run together, stand together, and are as many as it is wide.
    pub(super) fn check_beams(&self) -> Result<(), String> {
        for (&request, group) in &self.beams {
            let beams = &self
                .requests
                .find(request)
                .ok_or("a group outlived its request")?
                .sequences;
            let all: Vec<&Sequence> = beams.iter().map(|&idx| self.sequences.get(idx)).collect();
            let num_beams = all.len() + group.parked.len();
            let is_whole = num_beams == group.width() as usize || (num_beams == 1 && !all[0].is_beam);
            let is_parked = !group.parked.is_empty();
            if !is_whole || (is_parked && all.len() > 1) {
                return Err(format!(
                    "{num_beams} beams of {} in the group of {request:?}",
                    group.width()
                ));
            }
            for (place, beam) in (0..).zip(&all) {
                if beam.key.sample_index != place || beam.is_beam != (num_beams > 1) {
                    return Err(format!("{:?} is not beam {place}", beam.key));
                }
                if all.len() > 1 && beam.table.is_none() {
                    return Err(format!("{:?} waits apart from its group", beam.key));
                }
            }
        }
        Ok(())
    }
}
