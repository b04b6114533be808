//! Steps between their schedule and their commit: what they may touch, when the device computes them, and from what.

use std::collections::{HashMap, HashSet};

use pagedkv::ids::BlockId;
use pagedkv::sched::{BeamRows, Section, StepHeader};

use super::{FROM_HOST, SampleId, Simulator, TO_HOST, id, mix, sample, section};

/// What the model makes of a step: a token a row, and for rows of beams their candidates.
#[derive(Clone, Default)]
pub(super) struct Computed {
    pub(super) tokens: Vec<i32>,
    per_row: usize,
    candidates: (Vec<i32>, Vec<f32>),
}

/// A step that the scheduler gave out and that is not committed yet.
pub(super) struct Launched {
    pub(super) header: StepHeader,
    pub(super) arena: Vec<i32>,
    /// The blocks that it reads or writes, and whose they were.
    pub(super) holders: HashMap<BlockId, Vec<SampleId>>,
    /// None while the device has not come to it.
    pub(super) computed: Option<Computed>,
}

impl Simulator {
    /// Has the next step scheduled, once there is room for it.
    pub(crate) fn schedule_soon(&mut self) {
        if self.launched.len() > usize::from(self.overlap) {
            self.finish();
        }
        self.step();
    }

    /// Has the next step scheduled and launched.
    pub(super) fn schedule(&mut self) -> Option<StepHeader> {
        let header = self.scheduler.schedule(&mut self.arena).unwrap();
        self.check();
        let header = header?;
        self.note_ended();
        if header.num_tokens > 0 {
            let mut step = Launched {
                header,
                arena: self.arena.clone(),
                holders: self.holders(),
                computed: None,
            };
            self.assert_writable(&step);
            // The device may come to a step at any time, but to one after the other.
            let is_next = self.launched.back().is_none_or(|last| last.computed.is_some());
            if is_next && header.step_id % 3 != 0 {
                step.computed = Some(self.compute(&step));
            }
            self.launched.push_back(step);
            self.check();
        }
        Some(header)
    }

    /// Has the oldest step committed. None if there is none.
    pub(super) fn finish(&mut self) -> Option<StepHeader> {
        let mut step = self.launched.pop_front()?;
        let mut computed = step.computed.take().unwrap_or_else(|| self.compute(&step));
        let rows = section(&step.arena, Section::Rows).chunks(4);
        for (token, words) in computed.tokens.iter_mut().zip(rows) {
            if self.broken.contains(&id(words[0], words[1])) {
                *token = -1;
            }
        }
        let candidates = BeamRows {
            tokens: &computed.candidates.0,
            logprobs: &computed.candidates.1,
            per_row: computed.per_row,
        };
        let mut states = Vec::new();
        self.scheduler
            .commit(step.header.step_id, &computed.tokens, &candidates, &mut states)
            .unwrap();
        self.note_rows(&step.arena, &computed.tokens, &states);
        self.check();
        self.note_answers();
        Some(step.header)
    }

    /// The blocks of the step in the arena, and whose they are.
    fn holders(&self) -> HashMap<BlockId, Vec<SampleId>> {
        let words = section(&self.arena, Section::BlockIds).iter();
        let copied = section(&self.arena, Section::Copies).iter();
        let mut holders: HashMap<BlockId, Vec<SampleId>> = words
            .chain(copied)
            .map(|word| (BlockId(word.cast_unsigned()), Vec::new()))
            .collect();
        for sequence in self.scheduler.sequences() {
            for block in sequence.blocks {
                if let Some(holders) = holders.get_mut(&block) {
                    holders.push((sequence.request, sequence.sample_index));
                }
            }
        }
        holders
    }

    /// Asserts that a step writes only what is its sequences' own, and nothing that another sequence has in a step before.
    fn assert_writable(&self, step: &Launched) {
        for &slot in section(&step.arena, Section::SlotMapping) {
            let block = BlockId(slot.cast_unsigned() / self.block_size as u32);
            assert!(
                self.scheduler.pool().is_writable(block),
                "{block:?} is written, but shared or published"
            );
            let [holder] = step.holders[&block][..] else {
                panic!("{block:?} is written and held by {:?}", step.holders[&block]);
            };
            let before = self.launched.iter().find_map(|step| step.holders.get(&block));
            assert!(
                before.is_none_or(|before| before.contains(&holder)),
                "{block:?} is in a step in flight and written by {holder:?}"
            );
        }
    }

    pub(super) fn compute(&mut self, step: &Launched) -> Computed {
        if let Some(computed) = &step.computed {
            return computed.clone();
        }
        let (header, arena) = (&step.header, &step.arena);
        self.swap_blocks(arena, TO_HOST);
        self.copy_blocks(arena);
        self.swap_blocks(arena, FROM_HOST);
        let view = |wanted| section(arena, wanted);
        let (tokens, positions, slots) = (
            view(Section::TokenIds),
            view(Section::Positions),
            view(Section::SlotMapping),
        );
        assert_eq!(tokens.len(), header.num_tokens as usize);
        assert_eq!(
            slots.iter().collect::<HashSet<_>>().len(),
            slots.len(),
            "a slot is written once"
        );
        let (starts, table_starts) = (view(Section::QueryStart), view(Section::TableStart));
        for sequence in 0..header.num_sequences as usize {
            let table = &view(Section::BlockIds)
                [table_starts[sequence] as usize..table_starts[sequence + 1] as usize];
            for at in starts[sequence] as usize..starts[sequence + 1] as usize {
                let (position, slot) = (positions[at] as usize, slots[at] as usize);
                let block = table[position / self.block_size];
                assert_eq!(
                    slot,
                    block as usize * self.block_size + position % self.block_size
                );
                let before = if position == 0 {
                    1
                } else {
                    self.cell(table, position - 1)
                };
                let source = view(Section::TokenSource)[at];
                let token = if source < 0 {
                    tokens[at]
                } else {
                    self.num_ahead += 1;
                    self.sampled[source as usize]
                };
                self.cells[slot] = mix(before, token.cast_unsigned());
            }
        }
        let sampling = view(Section::Sampling).chunks(9);
        let sampled = view(Section::SampleRows)
            .iter()
            .zip(sampling)
            .map(|(&row, words)| {
                let seed = id(words[4], words[5]).0;
                let chain = self.cells[slots[row as usize] as usize];
                sample(chain, seed, words[6].cast_unsigned()).cast_signed()
            });
        let tokens: Vec<i32> = sampled.collect();
        self.sampled.clone_from(&tokens);
        let (per_row, ids, logprobs) = self.candidates_of(arena);
        Computed {
            tokens,
            per_row,
            candidates: (ids, logprobs),
        }
    }
}
