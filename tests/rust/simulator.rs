//! A stand-in for the model whose every result depends on every cached token before it.
//!
//! A cache slot holds one word: the chain of all tokens up to its position, computed from the slot before it *as it
//! is found through the block table*. A wrong block, a stale slot or a missed copy changes every later word, and
//! with it the sampled tokens. What a request should generate follows from its prompt alone.

use std::collections::{HashMap, HashSet, VecDeque};

use pagedkv::block::BlockState;
use pagedkv::config::CoreConfig;
use pagedkv::ids::{BlockId, RequestId};
use pagedkv::sched::{BeamRows, Hypothesis, SamplingParams, Scheduler, Section, StepHeader, VOID};

pub(crate) const EOS: u32 = 0;
pub(crate) const VOCABULARY: u64 = 40;

pub(crate) fn config(num_blocks: u32, block_size: u32) -> CoreConfig {
    CoreConfig {
        num_blocks,
        block_size,
        max_num_seqs: 8,
        max_num_batched_tokens: 64,
        max_model_len: 256,
        eos_token_ids: vec![EOS],
        prefix_caching: true,
        partial_matching: true,
        eviction: pagedkv::block::Eviction::Turn,
        tenants: Vec::new(),
        max_pinned_blocks: 0,
        max_queued_requests: 64,
    }
}

pub(crate) fn greedy(max_tokens: u32) -> SamplingParams {
    SamplingParams {
        max_tokens,
        ..SamplingParams::default()
    }
}

/// Token ids with much in common between seeds, and no end token.
pub(crate) fn prompt(seed: u32, len: usize) -> Vec<u32> {
    (0..len as u32)
        .map(|position| 1 + (position.wrapping_mul(7) + seed * 13) % 30)
        .collect()
}

fn mix(chain: u64, token: u32) -> u64 {
    let mut word =
        (chain ^ u64::from(token).wrapping_add(0x9e37_79b9_7f4a_7c15)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    word ^= word >> 29;
    word.wrapping_mul(0x94d0_49bb_1331_11eb) ^ (word >> 32)
}

fn sample(chain: u64, seed: u64, sample_index: u32) -> u32 {
    u32::try_from(mix(chain ^ seed, sample_index) % VOCABULARY).unwrap()
}

/// What a lone run generates, and whether it ends with an end token (1) or by length (2).
pub(crate) fn expected(prompt: &[u32], params: &SamplingParams, sample_index: u32) -> (Vec<u32>, i32) {
    let mut chain = prompt.iter().fold(1, |chain, &token| mix(chain, token));
    let mut generated = Vec::new();
    loop {
        let token = sample(chain, params.seed, sample_index);
        generated.push(token);
        if (token == EOS && !params.ignore_eos) || params.stop_token_ids.contains(&token) {
            return (generated, 1);
        }
        if generated.len() == params.max_tokens as usize {
            return (generated, 2);
        }
        chain = mix(chain, token);
    }
}

/// What stands for the chain of a beginning, and of a beginning that is one token longer.
pub(crate) fn chain_of(tokens: &[u32]) -> u64 {
    tokens.iter().fold(1, |chain, &token| mix(chain, token))
}

/// The log-probability of a token after a chain. Sums of so few bits are exact, and often equal.
pub(crate) fn logprob(chain: u64, token: u32) -> f32 {
    -f32::from((mix(chain ^ 0x55, token) % 1024) as u16) / 128.0
}

/// Reads an arena as a client would: through its directory alone.
pub(crate) fn section(arena: &[i32], section: Section) -> &[i32] {
    let entry = 2 + 2 * section as usize;
    let (offset, len) = (arena[entry] as usize, arena[entry + 1] as usize);
    &arena[offset..offset + len]
}

fn id(low: i32, high: i32) -> RequestId {
    RequestId::new(low.cast_unsigned(), high.cast_unsigned())
}

pub(crate) type SampleId = (RequestId, u32);

/// What the model makes of a step: a token a row, and for rows of beams their candidates.
#[derive(Clone, Default)]
struct Computed {
    tokens: Vec<i32>,
    per_row: usize,
    candidates: (Vec<i32>, Vec<f32>),
}

/// A step that the scheduler gave out and that is not committed yet.
struct Launched {
    header: StepHeader,
    arena: Vec<i32>,
    /// The blocks that it reads or writes, and whose they were.
    holders: HashMap<BlockId, Vec<SampleId>>,
    /// None while the device has not come to it.
    computed: Option<Computed>,
}

pub(crate) struct Simulator {
    pub(crate) scheduler: Scheduler,
    pub(crate) arena: Vec<i32>,
    cells: Vec<u64>,
    block_size: usize,
    pub(crate) generated: HashMap<SampleId, Vec<u32>>,
    pub(crate) ended: HashMap<SampleId, i32>,
    /// Of beam searches.
    pub(crate) answers: HashMap<RequestId, Vec<Hypothesis>>,
    /// The same, in the order of the ends.
    pub(crate) ends: Vec<SampleId>,
    pub(crate) cached: HashMap<RequestId, u32>,
    /// Whether a step is scheduled before the last one is committed.
    overlap: bool,
    launched: VecDeque<Launched>,
    /// What the step computed last has sampled.
    sampled: Vec<i32>,
    /// Tokens that were scheduled before they were known, and rows whose sequence had ended.
    pub(crate) num_ahead: usize,
    pub(crate) num_void: u64,
}

impl Simulator {
    /// A simulator that runs a step while the one before it is in flight: `step` schedules one or commits one.
    pub(crate) fn overlapped(config: CoreConfig) -> Self {
        Self {
            overlap: true,
            ..Self::new(config)
        }
    }

    pub(crate) fn with_overlap(config: CoreConfig, overlap: bool) -> Self {
        Self {
            overlap,
            ..Self::new(config)
        }
    }

    pub(crate) fn new(config: CoreConfig) -> Self {
        let block_size = config.block_size as usize;
        let cells = vec![u64::MAX; (config.num_blocks as usize + 1) * block_size];
        let scheduler = Scheduler::new(config, [1, 2, 3, 4]).unwrap();
        let arena = vec![-7; scheduler.arena_len()];
        let (generated, ended, cached) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self {
            scheduler,
            arena,
            cells,
            block_size,
            generated,
            ended,
            answers: HashMap::new(),
            ends: Vec::new(),
            cached,
            overlap: false,
            launched: VecDeque::new(),
            sampled: Vec::new(),
            num_ahead: 0,
            num_void: 0,
        }
    }

    /// Schedules a step, if there is room for one, and reports the oldest one as failed, as if forward had raised. None
    /// when there was nothing to do.
    pub(crate) fn fail(&mut self) -> Option<StepHeader> {
        let mut header = None;
        if self.launched.len() < 1 + usize::from(self.overlap) {
            header = self.schedule();
        }
        if let Some(failed) = self.launched.pop_front() {
            // Forward may have written anything before it raised.
            self.compute(&failed);
            self.scheduler.fail_step().unwrap();
            header = Some(failed.header);
        }
        self.check();
        header
    }

    pub(crate) fn submit(&self, prompt: &[u32], params: &SamplingParams) -> RequestId {
        self.scheduler
            .edge()
            .submit(prompt.to_vec(), params.clone(), Vec::new())
            .unwrap()
    }

    pub(crate) fn check(&self) {
        if let Err(broken) = self.scheduler.check_invariants() {
            panic!("{broken}");
        }
        let stats = self.scheduler.edge().stats();
        let bound = (self.block_size as u64 - 1) * stats.num_running;
        assert!(
            stats.wasted_slots <= bound,
            "more than one partly filled block a sequence"
        );
        assert_eq!(stats.void_rows, self.num_void);
        let pool = self.scheduler.pool();
        let touched = self.launched.iter().flat_map(|step| step.holders.keys());
        for &block in touched {
            let state = pool.state(block);
            assert!(
                matches!(state, BlockState::Owned | BlockState::Fenced),
                "{block:?} of a step in flight is {state:?}"
            );
        }
    }

    /// One step with every check between its parts; with overlap, half of one: a step is scheduled if that can be, or else
    /// the oldest one is committed. None when there was nothing to do.
    pub(crate) fn step(&mut self) -> Option<StepHeader> {
        let most = 1 + usize::from(self.overlap);
        let mut header = None;
        if self.launched.len() < most {
            header = self.schedule();
        }
        if header.is_none() || !self.overlap {
            header = self.finish().or(header);
        }
        header
    }

    /// Has the next step scheduled, once there is room for it.
    pub(crate) fn schedule_soon(&mut self) {
        if self.launched.len() > usize::from(self.overlap) {
            self.finish();
        }
        self.step();
    }

    /// Has the next step scheduled and launched.
    fn schedule(&mut self) -> Option<StepHeader> {
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
    fn finish(&mut self) -> Option<StepHeader> {
        let mut step = self.launched.pop_front()?;
        let computed = step.computed.take().unwrap_or_else(|| self.compute(&step));
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

    /// Runs until nothing is left; panics if that takes more than `bound` steps.
    pub(crate) fn run(&mut self, bound: usize) -> usize {
        for steps in 0..bound {
            if self.step().is_none() {
                return steps;
            }
        }
        panic!("still busy after {bound} steps: {:?}", self.scheduler.sequences());
    }

    /// What the slots of a block hold.
    pub(crate) fn block_cells(&self, block: BlockId) -> &[u64] {
        &self.cells[block.index() * self.block_size..][..self.block_size]
    }

    fn cell(&self, table: &[i32], position: usize) -> u64 {
        self.cells[table[position / self.block_size] as usize * self.block_size + position % self.block_size]
    }

    /// Computes the step in the arena, whose tokens are all known.
    pub(crate) fn forward(&mut self, header: &StepHeader) -> Vec<i32> {
        let step = Launched {
            header: *header,
            arena: self.arena.clone(),
            holders: HashMap::new(),
            computed: None,
        };
        self.compute(&step).tokens
    }

    fn compute(&mut self, step: &Launched) -> Computed {
        if let Some(computed) = &step.computed {
            return computed.clone();
        }
        let (header, arena) = (&step.header, &step.arena);
        self.copy_blocks(arena);
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

    /// What the step asks of the rows of beams: the likeliest tokens, of equal ones the lowest first.
    pub(crate) fn candidates(&self) -> (usize, Vec<i32>, Vec<f32>) {
        self.candidates_of(&self.arena)
    }

    fn candidates_of(&self, arena: &[i32]) -> (usize, Vec<i32>, Vec<f32>) {
        let view = |wanted| section(arena, wanted);
        let beams = view(Section::Beams).as_chunks::<2>().0;
        let per_row = beams
            .iter()
            .map(|&[_, wanted]| wanted as usize)
            .max()
            .unwrap_or(0);
        let (mut ids, mut logprobs) = (Vec::new(), Vec::new());
        for &[row, _] in beams {
            let token = view(Section::SampleRows)[row as usize] as usize;
            let chain = self.cells[view(Section::SlotMapping)[token] as usize];
            let mut ranked: Vec<(i32, f32)> = (0..VOCABULARY as u32)
                .map(|token| (token.cast_signed(), logprob(chain, token)))
                .collect();
            ranked.sort_by(|a, b| b.1.total_cmp(&a.1));
            ids.extend(ranked[..per_row].iter().map(|one| one.0));
            logprobs.extend(ranked[..per_row].iter().map(|one| one.1));
        }
        (per_row, ids, logprobs)
    }

    fn note_answers(&mut self) {
        for result in self.scheduler.take_beams() {
            for (index, one) in (0..).zip(&result.hypotheses) {
                self.end((result.request, index), one.reason as i32);
            }
            self.answers.insert(result.request, result.hypotheses);
        }
    }

    /// All sources are read before any destination is written: a kernel may copy in any order.
    fn copy_blocks(&mut self, arena: &[i32]) {
        let copies: Vec<(usize, usize)> = section(arena, Section::Copies)
            .chunks(2)
            .map(|pair| {
                (
                    pair[0] as usize * self.block_size,
                    pair[1] as usize * self.block_size,
                )
            })
            .collect();
        let before = self.cells.clone();
        for (src, dst) in copies {
            self.cells[dst..dst + self.block_size].copy_from_slice(&before[src..src + self.block_size]);
        }
    }

    fn end(&mut self, sample: SampleId, reason: i32) {
        let twice = self.ended.insert(sample, reason);
        assert_eq!(twice, None, "{sample:?} ended twice");
        self.ends.push(sample);
    }

    fn note_rows(&mut self, arena: &[i32], tokens: &[i32], states: &[i32]) {
        assert_eq!(tokens.len(), states.len());
        let rows: Vec<i32> = section(arena, Section::Rows).to_vec();
        let live = self.scheduler.sequences();
        let of_beams: HashSet<i32> = section(arena, Section::Beams)
            .chunks(2)
            .map(|entry| entry[0])
            .collect();
        for (row, ((words, &token), &state)) in (0..).zip(rows.chunks(4).zip(tokens).zip(states)) {
            let sample = (id(words[0], words[1]), words[2].cast_unsigned());
            if state == VOID {
                self.num_void += 1;
                let lives = live.iter().any(|one| (one.request, one.sample_index) == sample);
                assert!(!lives, "a row of {sample:?} was void while it lives");
                continue;
            }
            if of_beams.contains(&row) {
                self.cached.insert(sample.0, words[3].cast_unsigned());
                continue;
            }
            self.generated
                .entry(sample)
                .or_default()
                .push(token.cast_unsigned());
            self.cached.insert(sample.0, words[3].cast_unsigned());
            if state != 0 {
                self.end(sample, state);
            }
        }
    }

    fn note_ended(&mut self) {
        let entries: Vec<i32> = section(&self.arena, Section::Ended).to_vec();
        for words in entries.chunks(4) {
            self.end((id(words[0], words[1]), words[2].cast_unsigned()), words[3]);
        }
    }

    /// Asserts that a sample ran to its own end with the tokens of a lone run.
    pub(crate) fn assert_complete(&self, sample: SampleId, prompt: &[u32], params: &SamplingParams) {
        let (tokens, state) = expected(prompt, params, sample.1);
        assert_eq!(self.generated[&sample], tokens, "tokens of {sample:?}");
        assert_eq!(self.ended[&sample], state, "finish state of {sample:?}");
    }

    /// Asserts that nothing is held any more.
    pub(crate) fn assert_empty(&self) {
        let pool = self.scheduler.pool();
        assert_eq!((pool.num_owned(), pool.num_fenced()), (0, 0));
        assert_eq!(pool.num_free() + pool.num_idle(), pool.num_blocks());
        let stats = self.scheduler.edge().stats();
        assert_eq!(
            (stats.num_running, stats.num_waiting, stats.wasted_slots),
            (0, 0, 0)
        );
    }
}
