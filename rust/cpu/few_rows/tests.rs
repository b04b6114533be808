//! Few rows and prompts against plain Rust, where there are matrix tiles.

use half::bf16;
use proptest::prelude::*;
use proptest::test_runner::TestRng;

use super::*;
use crate::cpu::amx::Amx;
use crate::cpu::batch::Batch;
use crate::cpu::element::Dtype;
use crate::cpu::plan::{Geometry, Plan, TileToken};
use crate::cpu::prompt_amx;
use crate::cpu::tensor::{CacheView, RowsView};
use crate::cpu::tile_amx;

/// Positions of a block.
const BLOCK_SIZE: usize = 16;

/// Which numbers a test is about.
#[derive(Clone, Copy, Debug)]
enum Numbers {
    /// Of the size of one.
    Usual,
    /// Products around the least normal f32, and operands below it.
    Tiny,
    /// Any bits: huge ones, infinities, NaN.
    Any,
}

impl Numbers {
    fn draw(self, rng: &mut TestRng) -> u16 {
        let [bits, other] = [rng.next_u32() >> 16, rng.next_u32() >> 16];
        let bits = match self {
            Self::Usual => bits & 0x80ff | 0x3f00,
            Self::Tiny if other % 3 == 0 => bits & 0x807f,
            Self::Tiny => bits & 0x807f | (0x1f80 + ((other % 16) << 7)),
            Self::Any if other % 64 == 0 => bits,
            Self::Any => bits & 0x81ff | 0x3e00,
        };
        u16::try_from(bits).unwrap()
    }
}

/// A tile of decodes: so many tokens that see so much of one split, and its memory.
#[derive(Debug)]
struct Case {
    group_size: usize,
    head_dim: usize,
    visible: Vec<TileToken>,
    query: Vec<u16>,
    keys: Vec<u16>,
    values: Vec<u16>,
}

fn cases() -> impl Strategy<Value = Case> {
    let numbers = prop_oneof![Just(Numbers::Usual), Just(Numbers::Tiny), Just(Numbers::Any)];
    let head_dim = prop_oneof![Just(32_usize), Just(64), Just(96), Just(128)];
    let len = prop_oneof![1..=SPLIT_LEN, Just(SPLIT_LEN)];
    (numbers, head_dim, 1..9_usize, len, any::<[u8; 32]>()).prop_map(
        |(numbers, head_dim, group_size, len, seed)| {
            let mut rng = TestRng::from_seed(proptest::test_runner::RngAlgorithm::ChaCha, &seed);
            let mut draw = |count: usize| (0..count).map(|_| numbers.draw(&mut rng)).collect::<Vec<_>>();
            let slots = len.next_multiple_of(BLOCK_SIZE);
            let (query, mut keys, mut values) = (
                draw(group_size * head_dim),
                draw(slots * head_dim),
                draw(slots * head_dim),
            );
            // Nobody may look at slots that hold nothing.
            keys[len * head_dim..].fill(bf16::NAN.to_bits());
            values[len * head_dim..].fill(bf16::NAN.to_bits());
            let visible = vec![TileToken {
                token: 0,
                visible: len,
            }];
            Case {
                group_size,
                head_dim,
                visible,
                query,
                keys,
                values,
            }
        },
    )
}

fn number(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Takes what is too small for a normal number as zero.
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE {
        0.0_f32.copysign(x)
    } else {
        x
    }
}

fn fma(a: f32, b: f32, c: f32) -> f32 {
    flush(flush(a).mul_add(flush(b), flush(c)))
}

fn add(a: f32, b: f32) -> f32 {
    flush(flush(a) + flush(b))
}

/// Adds products, as an instruction on matrix tiles does.
fn dot(sum: f32, a: &[f32], b: &[f32]) -> f32 {
    let half = |parity: usize| {
        let pairs = a.iter().zip(b).skip(parity).step_by(2);
        pairs.fold(0.0, |sum, (&a, &b)| fma(a, b, sum))
    };
    add(sum, add(half(0), half(1)))
}

/// 2^x, rounded to bf16.
fn weight(x: f32) -> f32 {
    let fraction = if x.is_infinite() {
        0.0
    } else {
        flush(x - x.floor())
    };
    let polynomial = [0.227_650_4, 0.695_115_6, 1.0]
        .into_iter()
        .fold(0.077_062_07, |sum, coefficient| fma(sum, fraction, coefficient));
    let power = f64::from(polynomial) * f64::from(x.floor()).exp2();
    #[expect(clippy::cast_possible_truncation, reason = "rounded as the instruction does")]
    flush(bf16::from_f32(flush(power as f32)).to_f32())
}

impl Case {
    fn rows(&self, memory: *const u16) -> RowsView {
        RowsView {
            address: memory.cast_mut().cast(),
            dtype: Dtype::Bf16,
            num_tokens: 1,
            num_heads: self.group_size,
            head_dim: self.head_dim,
            token_stride: self.group_size * self.head_dim,
            head_stride: self.head_dim,
        }
    }

    fn cache(&self, memory: &[u16]) -> CacheView {
        CacheView {
            address: memory.as_ptr().cast_mut().cast(),
            dtype: Dtype::Bf16,
            num_blocks: memory.len() / BLOCK_SIZE / self.head_dim,
            num_kv_heads: 1,
            block_size: BLOCK_SIZE,
            head_dim: self.head_dim,
            block_stride: BLOCK_SIZE * self.head_dim,
            head_stride: BLOCK_SIZE * self.head_dim,
            slot_stride: self.head_dim,
        }
    }

    /// Hands the tile, and reads that are all asked for, to a kernel, which writes the partial results.
    fn compute(&self, kernel: impl FnOnce(&Tile<'_>, &mut Prefetch<'_>, &mut [f32])) -> Vec<f32> {
        let (key_cache, value_cache) = (self.cache(&self.keys), self.cache(&self.values));
        let table: Vec<i32> = (0..i32::try_from(key_cache.num_blocks).unwrap()).collect();
        let tile = Tile {
            query: self.rows(self.query.as_ptr()),
            out: self.rows(std::ptr::null()),
            key_cache,
            value_cache,
            tokens: &self.visible,
            table: &table,
            kv_head: 0,
            group_size: self.group_size,
            scale: 0.125,
        };
        let batch = Batch {
            query_start: &[0],
            seq_lens: &[],
            table_start: &[0],
            block_ids: &[],
        };
        let geometry = Geometry {
            num_tokens: 0,
            num_heads: self.group_size,
            num_kv_heads: 1,
            num_blocks: key_cache.num_blocks,
            block_size: BLOCK_SIZE,
        };
        let plan = Plan::new(&batch, geometry).unwrap();
        let simd = Avx512::detect().unwrap();
        let mut prefetch = Prefetch::new(simd, &plan, [&key_cache, &value_cache], &[], 0);
        let mut partial = vec![f32::NAN; tile.partial_len()];
        kernel(&tile, &mut prefetch, &mut partial);
        partial
    }

    /// As few rows.
    fn as_few_rows(&self, amx: Amx) -> Vec<f32> {
        self.compute(|tile, prefetch, partial| {
            let mut buffers = Buffers::default();
            let _configured = tile_amx::Configured::new(amx);
            // SAFETY: all of the memory is owned by the case, and the processor has the instructions.
            unsafe {
                load_queries(tile, &mut buffers);
                Split {
                    amx,
                    tile,
                    buffers: &mut buffers,
                    prefetch,
                    idx: 0,
                }
                .compute(partial);
            }
        })
    }

    /// As a prompt.
    fn as_prompt(&self, amx: Amx) -> Vec<f32> {
        self.compute(|tile, prefetch, partial| {
            let mut matrices = tile_amx::Matrices::default();
            let _configured = tile_amx::Configured::new(amx);
            // SAFETY: as above.
            unsafe {
                prompt_amx::load_queries(tile, &mut matrices);
                let (matrices, num_keys) = (&mut matrices, tile.tokens[0].visible);
                let mut split = tile_amx::Split {
                    amx,
                    tile,
                    matrices,
                    prefetch,
                    idx: 0,
                    num_keys,
                };
                split.compute(partial);
            }
        })
    }

    /// One number after the other.
    fn plainly(&self) -> Vec<f32> {
        let (len, width) = (self.visible[0].visible, self.head_dim);
        let numbers = |memory: &[u16]| memory.iter().map(|&bits| number(bits)).collect::<Vec<_>>();
        let (query, keys, values) = (numbers(&self.query), numbers(&self.keys), numbers(&self.values));
        let mut partial = Vec::new();
        for query in query.chunks(width) {
            let score = |key: &[f32]| {
                let chunks = query.chunks(DEPTH).zip(key.chunks(DEPTH));
                chunks.fold(0.0, |sum, (query, key)| dot(sum, query, key))
            };
            let scores: Vec<f32> = keys.chunks(width).take(len).map(score).collect();
            let factor = 0.125 * std::f32::consts::LOG2_E;
            let largest = scores.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let largest = flush(largest * factor).max(f32::MIN);
            let weights: Vec<f32> = scores
                .iter()
                .map(|&score| weight(fma(score, factor, -largest)))
                .collect();
            let sum = |column: &dyn Fn(usize) -> f32| {
                let positions: Vec<usize> = (0..len).collect();
                positions.chunks(DEPTH).fold(0.0, |sum, positions| {
                    let column: Vec<f32> = positions.iter().map(|&position| column(position)).collect();
                    dot(sum, &weights[positions[0]..][..positions.len()], &column)
                })
            };
            partial.extend((0..width).map(|column| sum(&|position| values[position * width + column])));
            partial.extend([largest, sum(&|_| 1.0)]);
        }
        partial
    }

    /// The numbers of a partial result that mean something: values, largest score, total.
    fn meaning(&self, partial: &[f32]) -> Vec<f32> {
        let rows = partial.chunks_exact(partial_row_len(self.head_dim));
        rows.flat_map(|row| row[..self.head_dim + 2].to_vec()).collect()
    }
}

/// Equal bits, or NaN twice. A row with a NaN among its scores or weights is NaN in all of its values; its largest score
/// is then of no use.
fn assert_alike(case: &Case, got: &[f32], wanted: &[f32]) {
    let rows = got
        .chunks(case.head_dim + 2)
        .zip(wanted.chunks(case.head_dim + 2));
    for (row, (got, wanted)) in rows.enumerate() {
        let total_is_nan = wanted[case.head_dim + 1].is_nan();
        for (idx, (a, b)) in got.iter().zip(wanted).enumerate() {
            let alike = a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan();
            let is_useless = total_is_nan && idx == case.head_dim;
            assert!(alike || is_useless, "row {row}, number {idx}: {a:e}, not {b:e}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn few_rows_and_prompts_compute_the_bits_of_plain_rust(case in cases()) {
        let wanted = case.plainly();
        if let Some(amx) = Amx::detect() {
            assert_alike(&case, &case.meaning(&case.as_few_rows(amx)), &wanted);
            assert_alike(&case, &case.meaning(&case.as_prompt(amx)), &wanted);
        }
    }
}
