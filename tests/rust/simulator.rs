//! A stand-in for the model whose every result depends on every cached token before it.
//!
//! A cache slot holds one word: the chain of all tokens up to its position, computed from the slot before it *as it
//! is found through the block table*. A wrong block, a stale slot or a missed copy changes every later word, and
//! with it the sampled tokens. What a request should generate follows from its prompt alone.

mod launched;

use std::collections::{HashMap, HashSet, VecDeque};

use pagedkv::block::BlockState;
use pagedkv::config::{CoreConfig, HostTier};
use pagedkv::ids::{BlockId, RequestId};
use pagedkv::sched::{Hypothesis, SamplingParams, Scheduler, Section, StepHeader, VOID};

use launched::Launched;

pub(crate) const EOS: u32 = 0;
pub(crate) const VOCABULARY: u64 = 40;
/// Directions of the section `swaps`.
const TO_HOST: i32 = 0;
const FROM_HOST: i32 = 1;

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
        max_pinned_blocks_per_tenant: None,
        max_queued_requests: 64,
        host: HostTier::default(),
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

pub(crate) struct Simulator {
    pub(crate) scheduler: Scheduler,
    pub(crate) arena: Vec<i32>,
    cells: Vec<u64>,
    /// The same in host memory.
    host_cells: Vec<u64>,
    block_size: usize,
    pub(crate) generated: HashMap<SampleId, Vec<u32>>,
    pub(crate) ended: HashMap<SampleId, i32>,
    /// Of beam searches.
    pub(crate) answers: HashMap<RequestId, Vec<Hypothesis>>,
    /// The same, in the order of the ends.
    pub(crate) ends: Vec<SampleId>,
    pub(crate) cached: HashMap<RequestId, u32>,
    /// Requests whose rows cannot be sampled.
    pub(crate) broken: HashSet<RequestId>,
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
        let host_cells = vec![u64::MAX; config.host.num_blocks as usize * block_size];
        let scheduler = Scheduler::new(config, [1, 2, 3, 4]).unwrap();
        let arena = vec![-7; scheduler.arena_len()];
        let (generated, ended, cached) = (HashMap::new(), HashMap::new(), HashMap::new());
        Self {
            scheduler,
            arena,
            cells,
            host_cells,
            block_size,
            generated,
            ended,
            answers: HashMap::new(),
            ends: Vec::new(),
            cached,
            broken: HashSet::new(),
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

    /// Makes the moves of one direction. In which order, a device is free to choose: no block is written twice.
    fn swap_blocks(&mut self, arena: &[i32], wanted: i32) {
        let swaps: Vec<[i32; 3]> = section(arena, Section::Swaps).as_chunks().0.to_vec();
        assert!(
            swaps.is_sorted_by_key(|swap| swap[0]),
            "moves to the host come first"
        );
        let filled = || swaps.iter().filter(|swap| swap[0] == FROM_HOST);
        let distinct: HashSet<i32> = filled().map(|swap| swap[1]).collect();
        assert_eq!(distinct.len(), filled().count(), "a block is filled once");
        let hosts: HashSet<i32> = swaps.iter().map(|swap| swap[2]).collect();
        assert_eq!(
            hosts.len(),
            swaps.len(),
            "a host block is read or written, not both"
        );
        for [_, device, host] in swaps.into_iter().filter(|swap| swap[0] == wanted) {
            let size = self.block_size;
            assert_ne!(device, 0, "the null block stays where it is");
            let device = &mut self.cells[device as usize * size..][..size];
            let host = &mut self.host_cells[host as usize * size..][..size];
            if wanted == TO_HOST {
                host.copy_from_slice(device);
            } else {
                device.copy_from_slice(host);
            }
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
        assert_eq!((stats.num_swapped, stats.host_blocks_used), (0, 0));
    }
}
