//! The rows of beams: what a step asks of them, and what a commit makes of their candidates.
//!
//! A search is taken further by one token of every beam. Then the tables are rebuilt from those of the parents, or the
//! search is over and its answers wait for [`Scheduler::take_beams`]; only their tokens do, no block is held any more.

use crate::block::BlockTable;
use crate::error::StepError;
use crate::ids::RequestId;

use super::beam_group::BeamGroup;
use super::beam_search::{Candidates, Continuation, Hypothesis};
use super::budget::Scheduled;
use super::request::FinishReason;
use super::scheduler::Scheduler;
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

impl Scheduler {
    /// Refuses candidates that are not those which a step asked for in its section `beams`.
    pub(super) fn check_candidates(beams: &[(u32, u32)], given: &BeamRows<'_>) -> Result<(), StepError> {
        let num_rows = beams.len();
        let per_row = beams.iter().map(|&(_, wanted)| wanted).max().unwrap_or(0) as usize;
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

    /// Candidates that a part of the step being built asks for. None where it samples nothing, or no beam.
    fn beam_candidates(&self, part: &Scheduled) -> Option<u32> {
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
        for part in &self.building.parts {
            rows.extend(
                self.beam_candidates(part)
                    .map(|num_candidates| (row, num_candidates)),
            );
            row += part.num_rows;
        }
        rows
    }

    /// Takes the candidates of all beams of the step. `rows`: the sequence and the row of each, group after group; None
    /// where the group has ended.
    pub(super) fn commit_beams(
        &mut self,
        rows: &[(Option<SeqIdx>, usize)],
        candidates: &BeamRows<'_>,
        states: &mut [i32],
    ) {
        let mut at = 0;
        while at < rows.len() {
            let Some(beam) = rows[at].0 else {
                at += 1;
                continue;
            };
            let request = self.sequences.get(beam).request;
            let num_beams = self.requests.of(request).sequences.len();
            let state = self.advance_beams(request, at, candidates);
            for &(_, row) in &rows[at..at + num_beams] {
                states[row] = state;
            }
            at += num_beams;
        }
    }

    /// Takes a group one token further, or ends it. Returns the state of its rows. `row`: that of its first candidates.
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
        // As many candidates were ranked as that takes, whichever of them end.
        assert!(
            next.len() >= beams.len(),
            "the candidates of a step repeat a token"
        );
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
}
