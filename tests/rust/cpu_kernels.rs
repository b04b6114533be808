//! The CPU kernels on random batches: every instruction set against plain f64, and bits that must not move.

use std::cell::Cell;

use half::{bf16, f16};
use pagedkv::cpu::attention::Attention;
use pagedkv::cpu::batch::Batch;
use pagedkv::cpu::copy_blocks::{self, BlocksView};
use pagedkv::cpu::element::Dtype;
use pagedkv::cpu::isa::Isa;
use pagedkv::cpu::plan::{Geometry, Plan};
use pagedkv::cpu::pool;
use pagedkv::cpu::rope_cache::{AngleTable, RopeCache};
use pagedkv::cpu::tensor::{CacheView, RowsView};
use proptest::prelude::*;
use proptest::test_runner::TestRng;

/// Memory of a tensor: elements of any of the types, aligned for the widest. Cells, because kernels write through
/// addresses.
#[derive(Clone)]
struct Memory {
    dtype: Dtype,
    words: Vec<Cell<u32>>,
}

impl Memory {
    fn filled(dtype: Dtype, len: usize, value: f32) -> Self {
        let memory = Self {
            dtype,
            words: vec![Cell::new(0); len * dtype.size() / 4 + 1],
        };
        for idx in 0..len {
            memory.set(idx, value);
        }
        memory
    }

    /// Standard-sized random numbers, already rounded to the type.
    fn random(dtype: Dtype, len: usize, rng: &mut TestRng) -> Self {
        let memory = Self::filled(dtype, len, 0.0);
        for idx in 0..len {
            let uniform = f32::from(u16::try_from(rng.next_u32() >> 16).unwrap()) / 65_536.0;
            memory.set(idx, (uniform - 0.5) * 4.0);
        }
        memory
    }

    fn address(&self) -> *mut u8 {
        self.words.as_ptr().cast_mut().cast()
    }

    fn set(&self, idx: usize, value: f32) {
        let (bits, mask) = match self.dtype {
            Dtype::F32 => {
                self.words[idx].set(value.to_bits());
                return;
            }
            Dtype::Bf16 => (bf16::from_f32(value).to_bits(), 0xffff_u32),
            Dtype::F16 => (f16::from_f32(value).to_bits(), 0xffff),
        };
        let shift = if cfg!(target_endian = "little") {
            16 * (idx % 2)
        } else {
            16 - 16 * (idx % 2)
        };
        let word = &self.words[idx / 2];
        word.set(word.get() & !(mask << shift) | u32::from(bits) << shift);
    }

    fn get(&self, idx: usize) -> f32 {
        let shift = if cfg!(target_endian = "little") {
            16 * (idx % 2)
        } else {
            16 - 16 * (idx % 2)
        };
        let half = |word: u32| u16::try_from(word >> shift & 0xffff).unwrap();
        match self.dtype {
            Dtype::F32 => f32::from_bits(self.words[idx].get()),
            Dtype::Bf16 => bf16::from_bits(half(self.words[idx / 2].get())).to_f32(),
            Dtype::F16 => f16::from_bits(half(self.words[idx / 2].get())).to_f32(),
        }
    }

    fn rows(&self, [num_tokens, num_heads, head_dim]: [usize; 3]) -> RowsView {
        RowsView {
            address: self.address(),
            dtype: self.dtype,
            num_tokens,
            num_heads,
            head_dim,
            token_stride: num_heads * head_dim,
            head_stride: head_dim,
        }
    }
}

/// The sizes of a random step.
#[derive(Clone, Debug)]
struct Shape {
    dtype: Dtype,
    group_size: usize,
    num_kv_heads: usize,
    head_dim: usize,
    block_size: usize,
    /// Unused elements between a slot and the next.
    gap: usize,
    /// (tokens in the step, tokens before them)
    sequences: Vec<(usize, usize)>,
    seed: [u8; 32],
}

fn shapes() -> impl Strategy<Value = Shape> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::Bf16), Just(Dtype::F16)];
    let head_dim = prop_oneof![
        Just(64_usize),
        Just(80),
        Just(96),
        Just(128),
        Just(256),
        1..100_usize
    ];
    let block_size = prop_oneof![Just(1_usize), Just(8), Just(16), Just(64), Just(256)];
    let sequence = prop_oneof![
        (Just(1_usize), 0..600_usize),
        (0..40_usize, 0..300_usize),
        (60..90_usize, Just(0))
    ];
    let sequences = proptest::collection::vec(sequence, 0..4);
    let heads = (1..9_usize, 1..4_usize);
    (
        dtype,
        heads,
        head_dim,
        block_size,
        0..3_usize,
        sequences,
        any::<[u8; 32]>(),
    )
        .prop_map(
            |(dtype, (group_size, num_kv_heads), head_dim, block_size, gap, sequences, seed)| Shape {
                dtype,
                group_size,
                num_kv_heads,
                head_dim,
                block_size,
                gap,
                sequences,
                seed,
            },
        )
}

/// A step in memory. Slots that hold no token, the gaps and the null block are NaN.
struct Step {
    shape: Shape,
    query: Memory,
    keys: Memory,
    values: Memory,
    num_blocks: usize,
    query_start: Vec<i32>,
    seq_lens: Vec<i32>,
    table_start: Vec<i32>,
    block_ids: Vec<i32>,
}

fn int(value: usize) -> i32 {
    i32::try_from(value).unwrap()
}

impl Step {
    fn new(shape: Shape) -> Self {
        let mut rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &shape.seed);
        let table_lens: Vec<usize> = shape
            .sequences
            .iter()
            .map(|(query_len, before)| (query_len + before).div_ceil(shape.block_size))
            .collect();
        let num_blocks = table_lens.iter().sum::<usize>() + 2;
        // Blocks in descending order are as scattered as any for code that never looks at two of them.
        let block_ids: Vec<i32> = (2..num_blocks).rev().map(int).collect();
        let sums = |lens: &mut dyn Iterator<Item = usize>| -> Vec<i32> {
            std::iter::once(0)
                .chain(lens.scan(0, |sum, len| {
                    *sum += len;
                    Some(int(*sum))
                }))
                .collect()
        };
        let num_tokens: usize = shape.sequences.iter().map(|(query_len, _)| query_len).sum();
        let num_heads = shape.group_size * shape.num_kv_heads;
        let elements = num_blocks * shape.num_kv_heads * shape.block_size * (shape.head_dim + shape.gap);
        let step = Self {
            query: Memory::random(shape.dtype, num_tokens * num_heads * shape.head_dim, &mut rng),
            keys: Memory::random(shape.dtype, elements, &mut rng),
            values: Memory::random(shape.dtype, elements, &mut rng),
            num_blocks,
            query_start: sums(&mut shape.sequences.iter().map(|(query_len, _)| *query_len)),
            seq_lens: shape
                .sequences
                .iter()
                .map(|(query_len, before)| int(query_len + before))
                .collect(),
            table_start: sums(&mut table_lens.iter().copied()),
            block_ids,
            shape,
        };
        step.poison();
        step
    }

    /// Overwrites whatever is no token's with NaN.
    fn poison(&self) {
        let mut used = vec![false; self.keys.words.len() * 4 / self.shape.dtype.size()];
        for (sequence, (query_len, before)) in self.shape.sequences.clone().into_iter().enumerate() {
            for position in 0..query_len + before {
                for kv_head in 0..self.shape.num_kv_heads {
                    let start = self.element(sequence, position, kv_head);
                    used[start..start + self.shape.head_dim].fill(true);
                }
            }
        }
        let elements = self.num_blocks
            * self.shape.num_kv_heads
            * self.shape.block_size
            * (self.shape.head_dim + self.shape.gap);
        for idx in (0..elements).filter(|&idx| !used[idx]) {
            self.keys.set(idx, f32::NAN);
            self.values.set(idx, f32::NAN);
        }
    }

    /// Index of the first element of a position.
    fn element(&self, sequence: usize, position: usize, kv_head: usize) -> usize {
        let Shape {
            num_kv_heads,
            head_dim,
            block_size,
            gap,
            ..
        } = self.shape;
        let first = usize::try_from(self.table_start[sequence]).unwrap();
        let block = usize::try_from(self.block_ids[first + position / block_size]).unwrap();
        ((block * num_kv_heads + kv_head) * block_size + position % block_size) * (head_dim + gap)
    }

    fn cache(&self, memory: &Memory) -> CacheView {
        let Shape {
            num_kv_heads,
            head_dim,
            block_size,
            gap,
            ..
        } = self.shape;
        CacheView {
            address: memory.address(),
            dtype: memory.dtype,
            num_blocks: self.num_blocks,
            num_kv_heads,
            block_size,
            head_dim,
            block_stride: num_kv_heads * block_size * (head_dim + gap),
            head_stride: block_size * (head_dim + gap),
            slot_stride: head_dim + gap,
        }
    }

    fn scale(&self) -> f32 {
        1.0 / f32::from(u16::try_from(self.shape.head_dim).unwrap()).sqrt()
    }

    /// Runs the kernel on the tokens of one sequence from `first` on, or on the whole step.
    fn attend(&self, isa: Isa, only: Option<(usize, std::ops::Range<usize>)>) -> Vec<f32> {
        let num_heads = self.shape.group_size * self.shape.num_kv_heads;
        let row = num_heads * self.shape.head_dim;
        let index = |starts: &[i32], idx: usize| usize::try_from(starts[idx]).unwrap();
        let (first, num_tokens) = match &only {
            None => (0, index(&self.query_start, self.shape.sequences.len())),
            Some((sequence, tokens)) => (index(&self.query_start, *sequence) + tokens.start, tokens.len()),
        };
        let out = Memory::filled(self.shape.dtype, num_tokens * row, 0.0);
        let mut query = self.query.rows([num_tokens, num_heads, self.shape.head_dim]);
        query.address = query.address.wrapping_add(first * row * self.shape.dtype.size());
        let (query_start, seq_lens, table_start);
        let mut batch = Batch {
            query_start: &self.query_start,
            seq_lens: &self.seq_lens,
            table_start: &self.table_start,
            block_ids: &self.block_ids,
        };
        if let Some((sequence, tokens)) = only {
            let table = index(&self.table_start, sequence)..index(&self.table_start, sequence + 1);
            query_start = [0, int(tokens.len())];
            seq_lens = [int(self.shape.sequences[sequence].1 + tokens.end)];
            table_start = [0, int(table.len())];
            batch = Batch {
                query_start: &query_start,
                seq_lens: &seq_lens,
                table_start: &table_start,
                block_ids: &self.block_ids[table],
            };
        }
        let geometry = Geometry {
            num_tokens,
            num_heads,
            num_kv_heads: self.shape.num_kv_heads,
            num_blocks: self.num_blocks,
            block_size: self.shape.block_size,
        };
        let call = Attention {
            out: out.rows([num_tokens, num_heads, self.shape.head_dim]),
            query,
            key_cache: self.cache(&self.keys),
            value_cache: self.cache(&self.values),
            plan: &Plan::new(&batch, geometry).unwrap(),
            scale: self.scale(),
        };
        call.check().unwrap();
        // SAFETY: checked, and all of the memory is owned here.
        unsafe { call.run_on(isa) };
        (0..num_tokens * row).map(|idx| out.get(idx)).collect()
    }

    /// Attention in f64, one number after the other.
    fn exact(&self) -> Vec<f64> {
        let Shape {
            group_size,
            num_kv_heads,
            head_dim,
            ..
        } = self.shape;
        let mut out = Vec::new();
        for (sequence, (query_len, before)) in self.shape.sequences.iter().enumerate() {
            for token in 0..*query_len {
                for head in 0..group_size * num_kv_heads {
                    let place = usize::try_from(self.query_start[sequence]).unwrap() + token;
                    let query = (place * group_size * num_kv_heads + head) * head_dim;
                    let rows: Vec<usize> = (0..=before + token)
                        .map(|position| self.element(sequence, position, head / group_size))
                        .collect();
                    let score = |row: &usize| -> f64 {
                        let product =
                            |d| f64::from(self.query.get(query + d)) * f64::from(self.keys.get(row + d));
                        (0..head_dim).map(product).sum::<f64>() * f64::from(self.scale())
                    };
                    let scores: Vec<f64> = rows.iter().map(score).collect();
                    let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                    let weights: Vec<f64> = scores.iter().map(|score| (score - largest).exp()).collect();
                    let total: f64 = weights.iter().sum();
                    out.extend((0..head_dim).map(|d| {
                        let weighed =
                            |(row, weight): (&usize, &f64)| f64::from(self.values.get(row + d)) * weight;
                        rows.iter().zip(&weights).map(weighed).sum::<f64>() / total
                    }));
                }
            }
        }
        out
    }
}

fn bits(numbers: &[f32]) -> Vec<u32> {
    numbers.iter().map(|number| number.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    #[test]
    fn attention_is_exact_on_every_instruction_set(shape in shapes()) {
        let step = Step::new(shape);
        let exact = step.exact();
        let tolerance = match step.shape.dtype {
            Dtype::F32 => 1e-5,
            Dtype::Bf16 => 8e-3,
            Dtype::F16 => 1e-3,
        };
        for isa in Isa::available() {
            let out = step.attend(isa, None);
            prop_assert_eq!(out.len(), exact.len());
            for (idx, (got, wanted)) in out.iter().zip(&exact).enumerate() {
                // Values are up to 2, so an error relative to the scale of the result has this size.
                let error = (f64::from(*got) - wanted).abs();
                prop_assert!(error <= 2.0 * tolerance, "{}: element {idx} is {got}, not {wanted}", isa.name());
            }
        }
    }

    #[test]
    fn bits_do_not_depend_on_chunks_company_or_threads(shape in shapes(), chunk in 1..20_usize) {
        let step = Step::new(shape);
        let row = step.shape.group_size * step.shape.num_kv_heads * step.shape.head_dim;
        for isa in Isa::available() {
            pool::set_num_threads(1).unwrap();
            let whole = bits(&step.attend(isa, None));
            for num_threads in [2, 5] {
                pool::set_num_threads(num_threads).unwrap();
                prop_assert_eq!(&bits(&step.attend(isa, None)), &whole);
            }
            for (sequence, &(query_len, _)) in step.shape.sequences.iter().enumerate() {
                let start = usize::try_from(step.query_start[sequence]).unwrap();
                for first in (0..query_len).step_by(chunk) {
                    let end = query_len.min(first + chunk);
                    let part = bits(&step.attend(isa, Some((sequence, first..end))));
                    prop_assert_eq!(&part[..], &whole[(start + first) * row..(start + end) * row]);
                }
            }
        }
    }

    #[test]
    fn rotation_is_exact_and_writes_only_its_slots(shape in shapes(), half_rot in 1..20_usize) {
        let step = Step::new(shape);
        let Shape { dtype, num_kv_heads, block_size, gap, head_dim, .. } = step.shape;
        prop_assume!(2 * half_rot <= head_dim);
        let mut rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &step.shape.seed);
        let num_tokens = usize::try_from(*step.query_start.last().unwrap()).unwrap();
        let num_heads = step.shape.group_size * num_kv_heads;
        let rot = 2 * half_rot;
        let angle = |idx: usize| f32::from(u16::try_from(idx).unwrap()).sin();
        let angles: Vec<f32> = (0..50 * rot).map(angle).collect();
        let table = AngleTable { values: &angles, rot };
        let key = Memory::random(dtype, num_tokens * num_kv_heads * head_dim, &mut rng);
        let value = Memory::random(dtype, num_tokens * num_kv_heads * head_dim, &mut rng);
        let out = Memory::filled(dtype, num_tokens * num_heads * head_dim, 0.0);
        let num_slots = step.num_blocks * block_size;
        prop_assume!(num_tokens <= num_slots);
        let slots: Vec<i32> = (0..num_slots).rev().take(num_tokens).map(int).collect();
        let positions: Vec<i32> = (0..num_tokens).map(|token| int(token * 7 % 50)).collect();
        let (keys, values) = (step.keys.clone(), step.values.clone());
        let call = RopeCache {
            out: out.rows([num_tokens, num_heads, head_dim]),
            query: step.query.rows([num_tokens, num_heads, head_dim]),
            key: key.rows([num_tokens, num_kv_heads, head_dim]),
            value: value.rows([num_tokens, num_kv_heads, head_dim]),
            cos: table,
            sin: table,
            positions: &positions,
            key_cache: step.cache(&keys),
            value_cache: step.cache(&values),
            slot_mapping: &slots,
        };
        call.check().unwrap();
        // SAFETY: checked, all of the memory is owned here, and the slots differ.
        unsafe { call.run() };

        let rotated = |memory: &Memory, start: usize, token: usize| -> Vec<f32> {
            let expected = Memory::filled(dtype, head_dim, 0.0);
            for d in 0..head_dim {
                let own = memory.get(start + d);
                let angle = angles[usize::try_from(positions[token]).unwrap() * rot + d.min(rot - 1)];
                expected.set(d, match d {
                    d if d < half_rot => own * angle + -memory.get(start + d + half_rot) * angle,
                    d if d < rot => own * angle + memory.get(start + d - half_rot) * angle,
                    _ => own,
                });
            }
            (0..head_dim).map(|d| expected.get(d)).collect()
        };
        let read = |memory: &Memory, start: usize| -> Vec<f32> { (0..head_dim).map(|d| memory.get(start + d)).collect() };
        for (token, &slot) in slots.iter().enumerate() {
            for head in 0..num_heads {
                let start = (token * num_heads + head) * head_dim;
                prop_assert_eq!(read(&out, start), rotated(&step.query, start, token));
            }
            for kv_head in 0..num_kv_heads {
                let slot = usize::try_from(slot).unwrap();
                let element = ((slot / block_size * num_kv_heads + kv_head) * block_size + slot % block_size) * (head_dim + gap);
                let start = (token * num_kv_heads + kv_head) * head_dim;
                prop_assert_eq!(read(&keys, element), rotated(&key, start, token));
                prop_assert_eq!(read(&values, element), read(&value, start));
            }
        }
        let changed = (0..keys.words.len()).filter(|&idx| keys.words[idx] != step.keys.words[idx]).count();
        prop_assert!(changed <= num_tokens * num_kv_heads * (head_dim + 1));
    }

    #[test]
    fn copies_read_their_sources_first(pairs in proptest::collection::vec([0..12_i32, 0..12], 0..12)) {
        let mut copies: Vec<[i32; 2]> = Vec::new();
        for pair in pairs {
            if copies.iter().all(|copy| copy[1] != pair[1]) {
                copies.push(pair);
            }
        }
        // Blocks of three bytes, four bytes apart.
        let before: Vec<u8> = (0..48).collect();
        let mut after = before.clone();
        let view = BlocksView { address: after.as_mut_ptr(), num_blocks: 12, block_stride_bytes: 4, block_bytes: 3 };
        copy_blocks::check(&[view], &[view], &copies).unwrap();
        // SAFETY: checked, and the memory is owned here.
        unsafe { copy_blocks::copy_blocks(&[view], &copies) };
        let mut expected = before.clone();
        for [source, destination] in copies {
            let (from, to) = (usize::try_from(source).unwrap() * 4, usize::try_from(destination).unwrap() * 4);
            expected[to..to + 3].copy_from_slice(&before[from..from + 3]);
        }
        prop_assert_eq!(after, expected);
    }
}
