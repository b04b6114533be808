//! Steps that were given out and are not committed yet: one, or two, where a step is built while the one before it is
//! computed.
//!
//! A sequence whose next token that earlier step samples is scheduled with a token that nobody knows yet; the device
//! fills it in. If the commit then finds that the sequence has ended, its part of the later step is void: what was
//! sampled for it is dropped, and the blocks that the part reads and writes stay fenced until that step is committed
//! too. Tables that do this are the step's own; what else a step must not lose is leased to it in the pool.

use std::collections::VecDeque;

use crate::block::BlockTable;
use crate::ids::BlockId;
use crate::sync::Stats;

use super::budget::Scheduled;
use super::request::CachePriority;
use super::scheduler::Scheduler;
use super::sequence::Sequence;
use super::slab::SeqIdx;
use super::step::{ROW_WORDS, StepHeader};
use super::swap::Direction;

/// Steps that may be in flight at once.
pub(super) const MAX_STEPS: usize = 2;

/// What a commit has to know of its step.
#[derive(Debug, Default)]
pub(super) struct StepInFlight {
    pub(super) id: u64,
    pub(super) parts: Vec<Scheduled>,
    /// The arena's section `rows`.
    pub(super) rows: Vec<[i32; ROW_WORDS]>,
    /// The arena's section `beams`.
    pub(super) beams: Vec<(u32, u32)>,
    /// Blocks that its copies and its moves from host memory fill: before that, nobody may find them.
    filled: Vec<BlockId>,
    /// What it moves, which is counted when it was.
    pub(super) moves: Moves,
    fences: Vec<Fence>,
    /// Places of sequences that ended meanwhile: a part that names one is void, so nobody else may be there yet.
    vacated: Vec<SeqIdx>,
}

/// How much a step moves.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct Moves {
    copies: u32,
    swapped_out_blocks: u32,
    swapped_in_blocks: u32,
    pub(super) swapped_in_tokens: u32,
}

impl Moves {
    /// Counts them as made.
    pub(super) fn count(self, stats: &mut Stats) {
        stats.copies += u64::from(self.copies);
        stats.swapped_out_blocks += u64::from(self.swapped_out_blocks);
        stats.swapped_in_blocks += u64::from(self.swapped_in_blocks);
        stats.swapped_in_tokens += u64::from(self.swapped_in_tokens);
    }
}

/// A table of a sequence that has ended, held for a step that may still touch its blocks.
#[derive(Debug)]
struct Fence {
    table: BlockTable,
    /// For [`BlockTable::release_first_out`].
    first_out: Option<u32>,
}

impl StepInFlight {
    /// Rows to sample from.
    pub(super) fn num_rows(&self) -> u32 {
        self.parts.iter().map(|part| part.num_rows).sum()
    }

    /// Tokens that the step before samples.
    pub(super) fn num_followers(&self) -> usize {
        self.parts.iter().filter(|part| part.source >= 0).count()
    }

    pub(super) fn num_tokens(&self) -> u32 {
        self.parts.iter().map(|part| part.num_tokens).sum()
    }

    fn clear(&mut self) {
        self.parts.clear();
        self.rows.clear();
        self.beams.clear();
        self.filled.clear();
        self.moves = Moves::default();
    }
}

/// The steps in flight, the oldest first.
#[derive(Debug, Default)]
pub(super) struct StepsInFlight {
    steps: VecDeque<StepInFlight>,
    /// Kept to be filled again.
    spare: Vec<StepInFlight>,
}

impl StepsInFlight {
    pub(super) fn len(&self) -> usize {
        self.steps.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.steps.is_empty()
    }

    pub(super) fn oldest(&self) -> Option<&StepInFlight> {
        self.steps.front()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &StepInFlight> {
        self.steps.iter()
    }

    /// Takes a step that is complete, and gives an empty one to build the next in.
    pub(super) fn push(&mut self, step: StepInFlight) -> StepInFlight {
        self.steps.push_back(step);
        self.spare.pop().unwrap_or_default()
    }

    /// Takes the oldest one out. It has to come back by [`Self::recycle`].
    pub(super) fn pop(&mut self) -> Option<StepInFlight> {
        self.steps.pop_front()
    }

    fn recycle(&mut self, mut step: StepInFlight) {
        step.clear();
        self.spare.push(step);
    }

    /// Tables that steps hold.
    pub(super) fn fenced_tables(&self) -> impl Iterator<Item = &BlockTable> {
        let fences = self.steps.iter().flat_map(|step| &step.fences);
        fences.map(|fence| &fence.table)
    }
}

impl Scheduler {
    /// Steps that were scheduled and neither committed nor failed.
    pub fn num_in_flight(&self) -> usize {
        self.steps.len()
    }

    /// The number of the oldest step in flight, or of the one that is being built.
    pub(super) fn oldest_step(&self) -> u64 {
        self.steps.oldest().map_or(self.step_id, |step| step.id)
    }

    /// Puts the step that was built in flight, if it computes anything.
    pub(super) fn give_out(&mut self, header: &StepHeader) -> bool {
        if header.num_tokens == 0 {
            self.forget_swaps(header.step_id);
            self.pool.cancel_step();
            return false;
        }
        let mut step = std::mem::take(&mut self.building);
        step.id = header.step_id;
        step.moves.copies = header.num_copies;
        step.moves.swapped_out_blocks = header.num_swaps_out;
        step.moves.swapped_in_blocks = header.num_swaps_in;
        step.filled.extend(self.copies.iter().map(|&(_, copy)| copy));
        let incoming = self
            .swaps
            .iter()
            .filter(|swap| swap.direction == Direction::FromHost);
        step.filled.extend(incoming.map(|swap| swap.device));
        self.building = self.steps.push(step);
        true
    }

    /// Whether a step in flight has yet to fill the block that a sequence's computed tokens end in. If that step fails,
    /// the block does not hold them.
    pub(super) fn is_tail_awaited(&self, sequence: &Sequence) -> bool {
        let table = sequence.table.as_ref().map_or(&[][..], BlockTable::blocks);
        let tail = table.get((sequence.num_computed / self.config.block_size) as usize);
        tail.is_some_and(|tail| self.steps.iter().any(|step| step.filled.contains(tail)))
    }

    /// Ends a step whose result was taken, or that failed: what only it still held is free.
    pub(super) fn end_step(&mut self, mut step: StepInFlight) {
        self.pool.end_step();
        self.host.end_step(step.id);
        for Fence { mut table, first_out } in step.fences.drain(..) {
            match first_out {
                None => table.release(&mut self.pool),
                Some(num_found) => table.release_first_out(&mut self.pool, num_found),
            }
        }
        for idx in step.vacated.drain(..) {
            self.sequences.vacate(idx);
        }
        self.steps.recycle(step);
    }

    /// Has the steps in flight keep every block of a sequence that is about to end, and takes from its table what is not
    /// computed.
    pub(super) fn fence(&mut self, sequence: &mut Sequence) {
        let Some(table) = sequence.table.as_mut().filter(|_| !self.steps.is_empty()) else {
            return;
        };
        let priority = self.requests.of(sequence.request).request.params.cache_priority;
        let num_found = sequence.words.num_cached_tokens().unwrap_or(0);
        let first_out = (priority == CachePriority::Low).then_some(num_found / self.config.block_size);
        let fence = Fence {
            table: table.fork(&mut self.pool),
            first_out,
        };
        table.release_tail(&mut self.pool, self.config.blocks_for(sequence.num_computed));
        self.newest().fences.push(fence);
    }

    /// Releases what was cut off a sequence's table, or has the steps in flight keep it.
    pub(super) fn drop_blocks(&mut self, idx: SeqIdx, mut table: BlockTable) {
        if self.steps.is_empty() || !self.sequences.get(idx).is_in_flight() {
            table.release(&mut self.pool);
            return;
        }
        self.newest().fences.push(Fence {
            table,
            first_out: None,
        });
    }

    /// Frees the place of a sequence that was taken out, once no part of a step in flight can name it.
    pub(super) fn vacate(&mut self, idx: SeqIdx, was_in_flight: bool) {
        if was_in_flight && !self.steps.is_empty() {
            self.newest().vacated.push(idx);
        } else {
            self.sequences.vacate(idx);
        }
    }

    fn newest(&mut self) -> &mut StepInFlight {
        self.steps.steps.back_mut().expect("a step is in flight")
    }

    /// Keeps what of a sequence's blocks becomes full for the step in flight that goes on reading them: publishing may
    /// exchange them for equal ones.
    pub(super) fn keep_full_blocks(&mut self, idx: SeqIdx) {
        let sequence = self.sequences.get(idx);
        let table = sequence.table();
        let from = table.num_published() as usize;
        let to = (sequence.num_computed / self.config.block_size) as usize;
        for &block in table.blocks().get(from..to).unwrap_or_default() {
            self.pool.lease(block);
        }
    }

    /// Blocks that nobody holds but a step, or a copy, in flight.
    pub fn num_fenced_blocks(&self) -> u32 {
        self.pool.num_fenced() + self.num_blocks_of_fences()
    }

    /// Blocks that sequences, pins and sessions hold.
    pub fn num_owned_blocks(&self) -> u32 {
        self.pool.num_owned() - self.num_blocks_of_fences()
    }

    /// Blocks that only fences hold.
    pub(super) fn num_blocks_of_fences(&self) -> u32 {
        let mut blocks: Vec<BlockId> = self
            .steps
            .fenced_tables()
            .flat_map(BlockTable::blocks)
            .copied()
            .collect();
        blocks.sort_unstable();
        let alone = blocks
            .chunk_by(PartialEq::eq)
            .filter(|same| self.pool.num_tables(same[0]) as usize == same.len());
        u32::try_from(alone.count()).expect("no more than the pool has")
    }
}
