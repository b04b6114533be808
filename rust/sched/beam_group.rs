//! The beams of a search as one unit of scheduling: computed in the same step or not at all, admitted with the blocks of
//! all of them, preempted and resumed together.
//!
//! A group begins as one sequence, its prompt, and becomes as many as it is wide once that is computed; they stand next to
//! each other among the running ones. A preempted group is one waiting sequence again, its first beam;
//! the tokens of the others are parked until that one is computed, and then begin as forks of it.

use crate::block::BlockTable;
use crate::ids::{BlockId, RequestId};

use super::beam_search::BeamSearch;
use super::budget::{Budget, Scheduled};
use super::request::SamplingParams;
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;

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
    pub(super) search: BeamSearch,
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
    pub(super) fn num_blocks_due_to_beams(&self) -> u32 {
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
    /// place. A single beam is never forked, and with one token to generate none goes on.
    fn num_blocks_of_first_fork(&self, leader: &Sequence, width: u32) -> u32 {
        if width == 1 || leader.end_rule.max_tokens == 1 {
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
                .map(|&idx| self.sequences.get(idx))
                .all(|beam| beam.num_scheduled + 1 == beam.num_tokens());
        if !is_ready || num_beams > budget.tokens.min(budget.rows) {
            return 0;
        }
        let beams = beams.clone();
        if !self.make_room_for_beams(&beams) {
            return 0;
        }
        for idx in beams {
            let part = Scheduled {
                seq: idx,
                num_computed: self.sequences.get(idx).num_scheduled,
                num_tokens: 1,
                num_rows: 1,
                source: -1,
            };
            self.push_part(part, budget);
        }
        num_beams
    }

    /// Gets a writable slot for the next token of every beam, or leaves the group as it was.
    fn make_room_for_beams(&mut self, beams: &[SeqIdx]) -> bool {
        let last = *beams.last().expect("a group has a beam");
        loop {
            let cost = self.cost_of_beams(beams);
            if cost <= self.pool.num_available() {
                break;
            }
            if !self.take_room(last, cost) {
                return false;
            }
        }
        for &idx in beams {
            let reserved = self.reserve(idx, 1);
            assert!(reserved.is_ok(), "the cost of all beams was found available");
        }
        true
    }

    /// Blocks that the next tokens of all beams take. Of those that share a partial block the last one writes in place.
    fn cost_of_beams(&self, beams: &[SeqIdx]) -> u32 {
        let mut tails: Vec<(BlockId, u32)> = Vec::new();
        let mut cost = 0;
        for &idx in beams {
            let sequence = self.sequences.get(idx);
            cost += sequence
                .table()
                .cost(&self.pool, sequence.num_scheduled, sequence.num_tokens());
            let at = (sequence.num_scheduled / self.config.block_size) as usize;
            if let Some(&tail) = sequence.table().blocks().get(at)
                && !self.pool.is_writable(tail)
            {
                match tails.iter_mut().find(|(other, _)| *other == tail) {
                    Some((_, num_holders)) => *num_holders += 1,
                    None => tails.push((tail, 1)),
                }
            }
        }
        let in_place = |&&(tail, num_holders): &&(BlockId, u32)| {
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

    /// Whether a beam of the request's group is part of a step from `step_id` on.
    pub(super) fn has_beam_since(&self, request: RequestId, step_id: u64) -> bool {
        self.beams
            .get(&request)
            .is_some_and(|group| group.last_step >= step_id)
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
        self.sequences.vacate(idx);
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
    pub(super) fn add_beam(
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
