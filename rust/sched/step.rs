//! The arena: one packed `i32` array that holds everything which forward and sampling read in a step.
//!
//! This file is its only definition. T tokens, S sequences, R rows to sample, C copies, W blocks that move
//! between device and host, E ended sequences.
//!
//! ```text
//! word 0       version
//! word 1       number of sections N
//! word 2..     N pairs (offset, length) in words, in the order below
//!
//! token_ids     T     tokens to compute, sequence after sequence
//! token_source  T     -1, or the row of the step in flight whose sample is this token; token_ids has anything there
//! positions     T     index of each token in its sequence
//! slot_mapping  T     block * block_size + offset where its keys and values go
//! query_start   S+1   where each sequence's tokens begin; the last entry is T
//! seq_lens      S     tokens in the cache after the step
//! table_start   S+1   where each sequence's block table begins in block_ids
//! block_ids     ...   the block tables, one after another, not padded
//! sample_rows   R     index into T of the token whose logits are sampled
//! sampling      R*9   temperature, top_p, min_p (bits of f32), top_k, seed (low, high), sample index,
//!                     position of the token to be sampled, number of log-probabilities (-1: none)
//! copies        C*2   source and destination block; all are copied before anything is written
//! swaps         W*3   direction (0 to the host, 1 from it), device block, host block: those to the host first; they
//!                     are made before the copies, those from the host after them, both before anything is written
//! rows          R*4   request id (low, high), sample index, prompt tokens that were found in the cache
//! ended         E*4   request id (low, high), sample index, reason: sequences that ended outside a commit; some may have
//!                     rows in the step in flight, which are void
//! beams         B*2   row that belongs to a beam, number of candidates that the commit needs of it
//! ```
//!
//! The first sequences are those that decode: one scheduled token, which is sampled. Others may have one token too. A
//! prompt with n samples has n rows that read the same token's logits. A chunk that does not reach the prompt's end has no row.
//!
//! A step may be written while one other is in flight, which is the one that was launched before it. Then a sequence
//! that decodes may have a token which that one samples, and every position and length counts it as known.

use crate::block::BlockTable;
use crate::config::{CoreConfig, MAX_ENDED_PER_STEP};
use crate::error::InvalidConfig;
use crate::ids::{BlockId, RequestId};

use super::request::{FinishReason, SamplingParams};
use super::swap::Swap;

/// Layout number, the arena's first word.
pub const ARENA_VERSION: i32 = 1;

/// The arena's sections, in the order of the directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(usize)]
#[expect(missing_docs, reason = "the table above documents them")]
pub enum Section {
    TokenIds,
    TokenSource,
    Positions,
    SlotMapping,
    QueryStart,
    SeqLens,
    TableStart,
    BlockIds,
    SampleRows,
    Sampling,
    Copies,
    Swaps,
    Rows,
    Ended,
    Beams,
}

const NUM_SECTIONS: usize = 15;
const DIRECTORY_LEN: usize = 2 + 2 * NUM_SECTIONS;
/// Words per row of `sampling`.
pub(super) const SAMPLING_WORDS: usize = 9;
/// Words per entry of `copies`.
const COPY_WORDS: usize = 2;
/// Words per entry of `swaps`.
const SWAP_WORDS: usize = 3;
/// Words per row of `rows`, and per entry of `ended`.
pub(super) const ROW_WORDS: usize = 4;
/// Words per entry of `beams`.
const BEAM_WORDS: usize = 2;

/// What a step holds, as counts.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct StepHeader {
    /// Number of the step, from 1.
    pub step_id: u64,
    /// T.
    pub num_tokens: u32,
    /// S.
    pub num_sequences: u32,
    /// Leading sequences that decode.
    pub num_decodes: u32,
    /// R.
    pub num_rows: u32,
    /// C.
    pub num_copies: u32,
    /// Blocks that move to the host. W is the sum of both.
    pub num_swaps_out: u32,
    /// Blocks that come back from it.
    pub num_swaps_in: u32,
    /// E.
    pub num_ended: u32,
    /// B.
    pub num_beam_rows: u32,
    /// Tokens that the step in flight samples.
    pub num_followers: u32,
    /// The most log-probabilities that a row asks for; -1 if none does.
    pub num_logprobs: i32,
}

/// What the rows of a sequence say in every step, packed once when it begins: a decode step copies these words instead
/// of following pointers to the request, which cost more than all else that it does for a sequence.
#[derive(Clone, Copy, Debug)]
pub(super) struct RowWords {
    /// A row of `sampling` but for the position.
    sampling: [i32; SAMPLING_WORDS],
    /// A row of `rows`; the prompt tokens found in the cache are -1 while they are not known.
    row: [i32; ROW_WORDS],
}

/// Places within the rows of what changes, and of what the header sums up.
const SAMPLE_INDEX: usize = 6;
const POSITION: usize = 7;
const NUM_LOGPROBS: usize = 8;
const ROW_SAMPLE_INDEX: usize = 2;
const ROW_CACHED: usize = 3;

impl RowWords {
    /// The rows of a request's first sample.
    pub(super) const fn new(request: RequestId, params: &SamplingParams) -> Self {
        Self {
            sampling: [
                params.temperature.to_bits().cast_signed(),
                params.top_p.to_bits().cast_signed(),
                params.min_p.to_bits().cast_signed(),
                params.top_k.cast_signed(),
                low(params.seed),
                high(params.seed),
                0,
                0,
                params.num_logprobs,
            ],
            row: [low(request.0), high(request.0), 0, -1],
        }
    }

    /// Log-probabilities that the rows ask for; -1 for none.
    pub(super) const fn num_logprobs(&self) -> i32 {
        self.sampling[NUM_LOGPROBS]
    }

    /// The same rows for another sample.
    pub(super) const fn of_sample(mut self, sample_index: u32) -> Self {
        self.sampling[SAMPLE_INDEX] = sample_index.cast_signed();
        self.row[ROW_SAMPLE_INDEX] = sample_index.cast_signed();
        self
    }

    /// Prompt tokens that the first admission found in the cache. None before it.
    pub(super) const fn num_cached_tokens(&self) -> Option<u32> {
        match self.row[ROW_CACHED] {
            ..0 => None,
            known => Some(known.cast_unsigned()),
        }
    }

    pub(super) const fn set_num_cached_tokens(&mut self, num_tokens: u32) {
        self.row[ROW_CACHED] = num_tokens.cast_signed();
    }
}

/// A sequence's part of a step that decodes: one token, which is sampled.
pub(super) struct Decode<'a> {
    /// The token; anything where `source` says where it comes from.
    pub(super) token: u32,
    /// The row of the step in flight that samples the token, or -1.
    pub(super) source: i32,
    pub(super) position: u32,
    pub(super) table: &'a BlockTable,
    pub(super) words: &'a RowWords,
}

/// A sequence's part of a step.
pub(super) struct Part<'a> {
    /// The tokens that are scheduled; anything where `source` says where the only one comes from.
    pub(super) tokens: &'a [u32],
    /// The row of the step in flight that samples the token, or -1.
    pub(super) source: i32,
    /// Position of the first of them.
    pub(super) start: u32,
    pub(super) table: &'a BlockTable,
    /// Sample index of the first row, and how many rows read the last token's logits.
    pub(super) sample_index: u32,
    pub(super) num_rows: u32,
    /// The first row.
    pub(super) words: &'a RowWords,
}

/// A sequence that ended outside a commit.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ended {
    pub(super) request: RequestId,
    pub(super) sample_index: u32,
    pub(super) reason: FinishReason,
}

/// Words that the largest step of this configuration needs.
pub(super) fn arena_len(config: &CoreConfig) -> usize {
    let tokens = config.max_num_batched_tokens as usize;
    let sequences = (config.max_num_seqs as usize).min(tokens);
    let rows = config.max_rows() as usize;
    let tables = sequences * config.blocks_for(config.max_model_len) as usize;
    // A step names no host block twice.
    let swaps = config.host.num_blocks as usize;
    DIRECTORY_LEN
        + 4 * tokens
        + 2 * (sequences + 1)
        + sequences
        + tables
        + rows * (1 + SAMPLING_WORDS + ROW_WORDS + BEAM_WORDS)
        + COPY_WORDS * sequences
        + SWAP_WORDS * swaps
        + ROW_WORDS * MAX_ENDED_PER_STEP
}

/// Refuses sizes whose arena would be too long for the offsets in its directory.
pub(super) fn check_arena_len(config: &CoreConfig) -> Result<(), InvalidConfig> {
    let len = arena_len(config);
    if i32::try_from(len).is_ok() {
        return Ok(());
    }
    let allowed = format!(
        "fewer, where {len} words are needed to describe a step and at most {} can be",
        i32::MAX
    );
    Err(InvalidConfig {
        field: "max_num_seqs",
        value: config.max_num_seqs.into(),
        allowed,
    })
}

/// Writes a step into an arena, sequence by sequence. The sections were measured before.
pub(super) struct Writer<'a> {
    token_ids: &'a mut [i32],
    token_source: &'a mut [i32],
    positions: &'a mut [i32],
    slot_mapping: &'a mut [i32],
    query_start: &'a mut [i32],
    seq_lens: &'a mut [i32],
    table_start: &'a mut [i32],
    block_ids: &'a mut [i32],
    sample_rows: &'a mut [i32],
    sampling: &'a mut [[i32; SAMPLING_WORDS]],
    copies: &'a mut [[i32; COPY_WORDS]],
    swaps: &'a mut [[i32; SWAP_WORDS]],
    rows: &'a mut [[i32; ROW_WORDS]],
    ended: &'a mut [[i32; ROW_WORDS]],
    beams: &'a mut [[i32; BEAM_WORDS]],
    /// Tokens, sequences, blocks of tables and rows written so far.
    num_tokens: usize,
    num_sequences: usize,
    num_table_blocks: usize,
    num_rows: usize,
    /// log2 of the block size.
    shift: u32,
}

/// Whose a row of `rows` is.
pub(super) const fn row_request(row: &[i32; ROW_WORDS]) -> RequestId {
    RequestId::new(row[0].cast_unsigned(), row[1].cast_unsigned())
}

/// What is left of the arena.
struct Rest<'a>(&'a mut [i32]);

impl<'a> Rest<'a> {
    /// Cuts the next section off, of `len` rows of `N` words.
    fn cut<const N: usize>(&mut self, len: usize) -> &'a mut [[i32; N]] {
        let (section, after) = std::mem::take(&mut self.0).split_at_mut(len * N);
        self.0 = after;
        section.as_chunks_mut().0
    }
}

impl<'a> Writer<'a> {
    /// Lays the sections out one after another. `num_table_blocks` is the sum of the tables' lengths.
    pub(super) fn new(
        arena: &'a mut [i32],
        header: &StepHeader,
        num_table_blocks: usize,
        block_size: u32,
    ) -> Self {
        let [tokens, sequences, rows, copies, swaps, ended, beams] = [
            header.num_tokens,
            header.num_sequences,
            header.num_rows,
            header.num_copies,
            header.num_swaps_out + header.num_swaps_in,
            header.num_ended,
            header.num_beam_rows,
        ]
        .map(|count| count as usize);
        let (directory, rest) = arena.split_at_mut(DIRECTORY_LEN);
        directory[0] = ARENA_VERSION;
        directory[1] = word(NUM_SECTIONS);
        let lengths: [usize; NUM_SECTIONS] = [
            tokens,
            tokens,
            tokens,
            tokens,
            sequences + 1,
            sequences,
            sequences + 1,
            num_table_blocks,
            rows,
            rows * SAMPLING_WORDS,
            copies * COPY_WORDS,
            swaps * SWAP_WORDS,
            rows * ROW_WORDS,
            ended * ROW_WORDS,
            beams * BEAM_WORDS,
        ];
        let mut end = DIRECTORY_LEN;
        for (entry, &len) in directory[2..].as_chunks_mut::<2>().0.iter_mut().zip(&lengths) {
            *entry = [word(end), word(len)];
            end += len;
        }
        // In the order of the sections.
        let mut rest = Rest(rest);
        let mut words = |len| rest.cut::<1>(len).as_flattened_mut();
        let writer = Self {
            token_ids: words(tokens),
            token_source: words(tokens),
            positions: words(tokens),
            slot_mapping: words(tokens),
            query_start: words(sequences + 1),
            seq_lens: words(sequences),
            table_start: words(sequences + 1),
            block_ids: words(num_table_blocks),
            sample_rows: words(rows),
            sampling: rest.cut(rows),
            copies: rest.cut(copies),
            swaps: rest.cut(swaps),
            rows: rest.cut(rows),
            ended: rest.cut(ended),
            beams: rest.cut(beams),
            num_tokens: 0,
            num_sequences: 0,
            num_table_blocks: 0,
            num_rows: 0,
            shift: block_size.trailing_zeros(),
        };
        (writer.query_start[0], writer.table_start[0]) = (0, 0);
        writer
    }

    /// Writes the first sequences, which decode: the number of a sequence is that of its token and of its row.
    pub(super) fn decodes<'p>(&mut self, decodes: impl ExactSizeIterator<Item = Decode<'p>>) {
        let num = decodes.len();
        for (out, number) in self.sample_rows[..num].iter_mut().zip(0..) {
            *out = number;
        }
        for (out, number) in self.query_start[1..=num].iter_mut().zip(1..) {
            *out = number;
        }
        // Zipped, all columns share one check of the bounds.
        let columns = (self.token_ids[..num].iter_mut())
            .zip(&mut self.token_source[..num])
            .zip(&mut self.positions[..num])
            .zip(&mut self.slot_mapping[..num])
            .zip(&mut self.seq_lens[..num])
            .zip(&mut self.table_start[1..=num])
            .zip(&mut self.sampling[..num])
            .zip(&mut self.rows[..num]);
        let mask = (1 << self.shift) - 1;
        let mut num_blocks = 0;
        for (decode, columns) in decodes.zip(columns) {
            let (((((((token, source), position), slot), seq_len), table_end), sampling), row) = columns;
            *token = decode.token.cast_signed();
            *source = decode.source;
            *position = decode.position.cast_signed();
            *seq_len = (decode.position + 1).cast_signed();
            // A table may reach further than this step does; forward reads no block past seq_len.
            let last = (decode.position >> self.shift) as usize;
            let blocks = &decode.table.words()[..=last];
            *slot = (blocks[last] << self.shift) + (decode.position & mask).cast_signed();
            self.block_ids[num_blocks..][..blocks.len()].copy_from_slice(blocks);
            num_blocks += blocks.len();
            *table_end = word(num_blocks);
            *sampling = decode.words.sampling;
            sampling[POSITION] = *seq_len;
            *row = decode.words.row;
        }
        (self.num_tokens, self.num_sequences, self.num_rows) = (num, num, num);
        self.num_table_blocks = num_blocks;
    }

    /// Appends one sequence.
    pub(super) fn part(&mut self, part: &Part<'_>) {
        let num_tokens = part.tokens.len();
        let tokens = self.num_tokens..self.num_tokens + num_tokens;
        for (out, &token) in self.token_ids[tokens.clone()].iter_mut().zip(part.tokens) {
            *out = token.cast_signed();
        }
        self.token_source[tokens.clone()].fill(part.source);
        for (out, position) in self.positions[tokens.clone()].iter_mut().zip(part.start..) {
            *out = position.cast_signed();
        }
        for (out, position) in self.slot_mapping[tokens.clone()].iter_mut().zip(part.start..) {
            *out = part.table.slot(position);
        }
        self.num_tokens = tokens.end;
        let seq_len = part.start as usize + num_tokens;
        // A table may reach further than this step does; forward reads no block past seq_len.
        let blocks = &part.table.words()[..(seq_len + (1 << self.shift) - 1) >> self.shift];
        self.block_ids[self.num_table_blocks..][..blocks.len()].copy_from_slice(blocks);
        self.num_table_blocks += blocks.len();
        self.seq_lens[self.num_sequences] = word(seq_len);
        self.num_sequences += 1;
        self.query_start[self.num_sequences] = word(self.num_tokens);
        self.table_start[self.num_sequences] = word(self.num_table_blocks);
        if part.num_rows > 0 {
            self.row(part.words, word(seq_len));
        }
        for sample_index in part.sample_index + 1..part.sample_index + part.num_rows {
            self.row(&part.words.of_sample(sample_index), word(seq_len));
        }
    }

    #[inline]
    fn row(&mut self, words: &RowWords, position: i32) {
        self.sample_rows[self.num_rows] = word(self.num_tokens - 1);
        let sampling = &mut self.sampling[self.num_rows];
        *sampling = words.sampling;
        sampling[POSITION] = position;
        self.rows[self.num_rows] = words.row;
        self.num_rows += 1;
    }

    /// Writes the copies, the swaps, the sequences that ended and the rows of beams with the candidates that are wanted of them, and
    /// checks that every section is full. Returns `rows`.
    pub(super) fn finish(
        self,
        copies: &[(BlockId, BlockId)],
        swaps: &[Swap],
        ended: impl ExactSizeIterator<Item = Ended>,
        beams: &[(u32, u32)],
    ) -> &'a [[i32; ROW_WORDS]] {
        let written = [
            (self.num_tokens, self.token_ids.len()),
            (self.num_sequences, self.seq_lens.len()),
            (self.num_table_blocks, self.block_ids.len()),
            (self.num_rows, self.rows.len()),
            (beams.len(), self.beams.len()),
            (copies.len(), self.copies.len()),
            (swaps.len(), self.swaps.len()),
            (ended.len(), self.ended.len()),
        ];
        for (written, len) in written {
            assert_eq!(written, len, "a section is full");
        }
        for (out, (src, dst)) in self.copies.iter_mut().zip(copies) {
            *out = [src.0.cast_signed(), dst.0.cast_signed()];
        }
        for (out, swap) in self.swaps.iter_mut().zip(swaps) {
            *out = [
                swap.direction as i32,
                swap.device.0.cast_signed(),
                swap.host.0.cast_signed(),
            ];
        }
        for (out, (row, num_candidates)) in self.beams.iter_mut().zip(beams) {
            *out = [row.cast_signed(), num_candidates.cast_signed()];
        }
        for (out, entry) in self.ended.iter_mut().zip(ended) {
            *out = [
                low(entry.request.0),
                high(entry.request.0),
                entry.sample_index.cast_signed(),
                entry.reason as i32,
            ];
        }
        self.rows
    }
}

fn word(value: usize) -> i32 {
    i32::try_from(value).expect("arena offsets and lengths fit an int32")
}

const fn low(value: u64) -> i32 {
    ((value & 0xffff_ffff) as u32).cast_signed()
}

const fn high(value: u64) -> i32 {
    ((value >> 32) as u32).cast_signed()
}
