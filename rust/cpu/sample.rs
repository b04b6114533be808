//! Sampling: one token a row, without a sort of the vocabulary.
//!
//! A row is read once for its largest logit, which is all that a greedy one needs. Where there is a filter, scores, and
//! for top-p or min-p masses, go to the thread's memory, and tokens that it drops get the score of minus infinity. The
//! noise is computed for those of the tokens that can still be the best. `python/pagedkv/ops/__init__.py` says what the
//! result is, and `noise` how every backend gets the same one. The caller is the binding of `sample`.

#![expect(
    clippy::inline_always,
    reason = "a kernel is compiled for an instruction set by being inlined"
)]
#![expect(
    clippy::float_cmp,
    reason = "the largest number of a row is one of them, to the bit"
)]
#![expect(
    clippy::needless_bitwise_bool,
    reason = "without branches the comparisons of a chunk are one instruction"
)]

use std::cell::RefCell;

use super::cut::{Count, Cut, Mass};
use super::isa::{Isa, Kernel, LANES, Simd};
use super::noise::{NOISE_LEN, NoiseKey, NoiseWords, UNIT_MASS, least_word, mass, noise};
use super::pool;

/// Words of a row's parameters in the arena.
pub const NUM_PARAMETERS: usize = 9;

/// Logits a nanosecond and a thread, for the estimate of a call's duration.
const GREEDY_PER_NS: usize = 4;
const DRAWN_PER_NS: usize = 1;

thread_local! {
    /// Grows to twice the vocabulary.
    static SCRATCH: RefCell<Scratch> = RefCell::default();
}

#[derive(Default, Debug)]
struct Scratch {
    scores: Vec<f32>,
    masses: Vec<u32>,
}

/// `[R, V]` logits; rows are dense.
#[derive(Clone, Copy, Debug)]
pub struct Logits<'a> {
    /// Row after row, with gaps of `row_stride - vocab_size` between them.
    pub values: &'a [f32],
    /// Elements of a row.
    pub vocab_size: usize,
    /// Elements from a row to the next.
    pub row_stride: usize,
}

impl Logits<'_> {
    #[inline]
    pub(super) fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.row_stride..][..self.vocab_size]
    }
}

/// How one row is sampled.
#[derive(Clone, Copy, Debug)]
struct Parameters {
    temperature: f32,
    top_p: f32,
    min_p: f32,
    top_k: i32,
    key: NoiseKey,
}

impl Parameters {
    /// Decodes the words of `rust/sched/step.rs`.
    fn from_words(words: &[i32; NUM_PARAMETERS]) -> Self {
        let bits = words.map(i32::cast_unsigned);
        Self {
            temperature: f32::from_bits(bits[0]),
            top_p: f32::from_bits(bits[1]),
            min_p: f32::from_bits(bits[2]),
            top_k: words[3],
            key: NoiseKey {
                seed: [bits[4], bits[5]],
                sample_index: bits[6],
                position: bits[7],
            },
        }
    }
}

/// Draws one token a row into `tokens`; `parameters` has one entry a row. A row that holds NaN, or whose largest logit is
/// infinite while there is a choice, gets a negative number: it must cost the other rows nothing.
pub fn sample(logits: &Logits<'_>, parameters: &[[i32; NUM_PARAMETERS]], tokens: &mut [i64]) {
    sample_on(Isa::best(), logits, parameters, tokens);
}

/// Does so on a given instruction set.
pub fn sample_on(isa: Isa, logits: &Logits<'_>, parameters: &[[i32; NUM_PARAMETERS]], tokens: &mut [i64]) {
    let mut rows: Vec<_> = parameters.iter().zip(tokens).enumerate().collect();
    pool::for_each(
        &mut rows,
        estimated_ns(logits, parameters),
        |(row, (words, token))| {
            SCRATCH.with_borrow_mut(|scratch| {
                isa.run(SampleRow {
                    logits: logits.row(*row),
                    parameters: Parameters::from_words(words),
                    scratch,
                    token,
                });
            });
        },
    );
}

/// A guess at the duration of `sample` on the present number of threads.
pub fn estimated_ns(logits: &Logits<'_>, parameters: &[[i32; NUM_PARAMETERS]]) -> u64 {
    let row_ns = |words: &[i32; NUM_PARAMETERS]| {
        logits.vocab_size
            / if words[0] == 0 {
                GREEDY_PER_NS
            } else {
                DRAWN_PER_NS
            }
    };
    let ns: usize = parameters.iter().map(row_ns).sum();
    (ns / pool::num_threads()) as u64
}

/// In place of a token: the row holds NaN. `pagedkv.ops` and `cuda/sample.cu` have the same numbers.
const NOT_A_NUMBER: i64 = -1;
/// In place of a token: the largest logit is infinite.
const INFINITE: i64 = -2;

struct SampleRow<'k> {
    logits: &'k [f32],
    parameters: Parameters,
    scratch: &'k mut Scratch,
    token: &'k mut i64,
}

impl Kernel for SampleRow<'_> {
    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let Self {
            logits,
            parameters,
            scratch,
            token,
        } = self;
        let Some(largest) = largest(simd, logits) else {
            *token = NOT_A_NUMBER;
            return;
        };
        let drawn = parameters.temperature > 0.0;
        *token = if drawn && largest.is_infinite() {
            INFINITE
        } else if drawn && parameters.top_k != 1 {
            draw(simd, logits, largest, &parameters, scratch)
        } else {
            first_equal(logits, largest)
        };
    }
}

/// The largest number of a row; None if there is a NaN.
#[inline(always)]
pub(super) fn largest<S: Simd>(simd: S, row: &[f32]) -> Option<f32> {
    let (vectors, tail) = row.as_chunks::<LANES>();
    let mut best = [simd.splat(f32::NEG_INFINITY); 4];
    // Zero times a number is zero, times NaN it is NaN, and all of it can be added up.
    let mut check = [simd.splat(0.0); 4];
    let zero = simd.splat(0.0);
    let (groups, rest) = vectors.as_chunks::<4>();
    for group in groups {
        for idx in 0..4 {
            let vector = simd.load(&group[idx]);
            best[idx] = simd.max(best[idx], vector);
            check[idx] = simd.mul_add(vector, zero, check[idx]);
        }
    }
    for vector in rest {
        let vector = simd.load(vector);
        best[0] = simd.max(best[0], vector);
        check[0] = simd.mul_add(vector, zero, check[0]);
    }
    let check = simd.add(simd.add(check[0], check[1]), simd.add(check[2], check[3]));
    // Zero times infinity is NaN too: such a row is looked at number by number.
    if simd.sum_lanes(check).is_nan() || tail.iter().any(|x| x.is_nan()) {
        let has_nan = row.iter().any(|x| x.is_nan());
        let scalar = || row.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        return (!has_nan).then(scalar);
    }
    let best = simd.max(simd.max(best[0], best[1]), simd.max(best[2], best[3]));
    let best = simd.max_lane(best);
    Some(tail.iter().copied().fold(best, f32::max))
}

/// Index of the first number that equals `value`, which is among them.
#[expect(clippy::cast_possible_wrap, reason = "a vocabulary is small")]
#[inline(always)]
fn first_equal(row: &[f32], value: f32) -> i64 {
    for (chunk, start) in row.chunks(NOISE_LEN).zip((0..).step_by(NOISE_LEN)) {
        if chunk.iter().fold(false, |any, &x| any | (x == value)) {
            let offset = chunk.iter().position(|&x| x == value);
            return (start + offset.expect("seen in the chunk")) as i64;
        }
    }
    0
}

/// From logits to scores: what they are of the largest one, at a temperature. Ascending.
#[derive(Clone, Copy)]
struct Scale {
    largest: f32,
    temperature: f32,
}

impl Scale {
    /// Of scores.
    const NONE: Self = Self {
        largest: 0.0,
        temperature: 1.0,
    };

    #[inline(always)]
    fn score(self, logit: f32) -> f32 {
        // Adding zero turns a negative zero into a positive one, so that equal scores have equal bits.
        (logit - self.largest) / self.temperature + 0.0
    }
}

/// Draws a token by the largest sum of score and noise.
#[inline(always)]
fn draw<S: Simd>(
    simd: S,
    logits: &[f32],
    largest: f32,
    parameters: &Parameters,
    scratch: &mut Scratch,
) -> i64 {
    let scale = Scale {
        largest,
        temperature: parameters.temperature,
    };
    let top_k = usize::try_from(parameters.top_k)
        .ok()
        .filter(|top_k| (1..logits.len()).contains(top_k));
    let cuts_mass = parameters.top_p < 1.0 || parameters.min_p > 0.0;
    if top_k.is_none() && !cuts_mass {
        return best_with_noise(simd, logits, scale, parameters.key);
    }
    let Scratch { scores, masses } = scratch;
    // Loops, not closures, which would be compiled without the instructions of the kernel.
    scores.resize(logits.len(), 0.0);
    for (place, &logit) in scores.iter_mut().zip(logits) {
        *place = scale.score(logit);
    }
    if let Some(top_k) = top_k
        && let Some(cut) = Cut::find(scores, &Count, top_k as u64)
    {
        keep(scores, cut);
    }
    if cuts_mass {
        masses.resize(scores.len(), 0);
        for (place, &score) in masses.iter_mut().zip(&*scores) {
            *place = mass(score);
        }
        keep_by_mass(scores, masses, parameters);
    }
    best_with_noise(simd, scores, Scale::NONE, parameters.key)
}

/// Drops the tokens behind a cut.
#[inline(always)]
fn keep(scores: &mut [f32], cut: Cut) {
    for (id, score) in scores.iter_mut().enumerate() {
        *score = if cut.keeps(*score, id) {
            *score
        } else {
            f32::NEG_INFINITY
        };
    }
}

/// Drops the tokens that top-p or min-p do not keep.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "a sum of masses is below 2^53"
)]
#[inline(always)]
fn keep_by_mass(scores: &mut [f32], masses: &[u32], parameters: &Parameters) {
    if parameters.top_p < 1.0 {
        let total: u64 = masses.iter().map(|&mass| u64::from(mass)).sum();
        let target = (f64::from(parameters.top_p) * total as f64).ceil().max(1.0) as u64;
        if let Some(cut) = Cut::find(scores, &Mass(masses), target) {
            keep(scores, cut);
        }
    }
    if parameters.min_p > 0.0 {
        // The largest mass is the unit. A comparison with the next integer is one with the product.
        let least = (f64::from(parameters.min_p) * f64::from(UNIT_MASS)).ceil();
        let least = least.min(f64::from(UNIT_MASS)) as u32;
        for (score, &mass) in scores.iter_mut().zip(masses) {
            *score = if mass >= least { *score } else { f32::NEG_INFINITY };
        }
    }
}

/// The token with the largest sum of score and noise, the first one among equal sums.
///
/// Few tokens can have it. The best sum so far, to begin with that of the largest score, says what noise a group of
/// tokens needs, and the words say which do not have it, before a logarithm is taken.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    clippy::cast_sign_loss,
    reason = "a vocabulary is small"
)]
#[inline(always)]
fn best_with_noise<S: Simd>(simd: S, logits: &[f32], scale: Scale, key: NoiseKey) -> i64 {
    let mut token = first_equal(logits, scale.largest) as usize;
    let mut best = key.noise_of(token) + scale.score(logits[token]);
    let (groups, rest) = logits.as_chunks::<NOISE_LEN>();
    let mut last = [f32::NEG_INFINITY; NOISE_LEN];
    last[..rest.len()].copy_from_slice(rest);
    for (idx, group) in groups.iter().chain(std::iter::once(&last)).enumerate() {
        let Some(least) = least_word(best - scale.score(largest_of_group(simd, group))) else {
            continue;
        };
        let words = key.words((idx * LANES) as u32);
        if !reaches(&words, least) {
            continue;
        }
        let mut sums = noise(&words);
        for (sum, &logit) in sums.iter_mut().zip(group) {
            *sum += scale.score(logit);
        }
        let largest = largest_of_group(simd, &sums);
        if largest >= best {
            let offset = sums.iter().position(|&sum| sum == largest);
            let first = idx * NOISE_LEN + offset.expect("it is one of them");
            if largest > best || first < token {
                (best, token) = (largest, first);
            }
        }
    }
    token as i64
}

/// Whether one of the words is `least` or larger.
#[inline(always)]
fn reaches(words: &NoiseWords, least: u32) -> bool {
    let [a, b, c, d] = words;
    let mut any = false;
    for lane in 0..LANES {
        any |= a[lane].max(b[lane]).max(c[lane].max(d[lane])) >= least;
    }
    any
}

/// The largest of some numbers.
#[inline(always)]
fn largest_of_group<S: Simd>(simd: S, group: &[f32; NOISE_LEN]) -> f32 {
    let vectors = group.as_chunks::<LANES>().0;
    let halves = [
        simd.max(simd.load(&vectors[0]), simd.load(&vectors[1])),
        simd.max(simd.load(&vectors[2]), simd.load(&vectors[3])),
    ];
    let mut lanes = [0.0; LANES];
    simd.store(simd.max(halves[0], halves[1]), &mut lanes);
    // Halves against halves: one number after another would take longer than all the rest.
    keep_larger_half::<8>(&mut lanes);
    keep_larger_half::<4>(&mut lanes);
    keep_larger_half::<2>(&mut lanes);
    keep_larger_half::<1>(&mut lanes);
    lanes[0]
}

/// Leaves the larger one of lanes i and i + N in lane i.
#[inline(always)]
fn keep_larger_half<const N: usize>(lanes: &mut [f32; LANES]) {
    for idx in 0..N {
        let (a, b) = (lanes[idx], lanes[idx + N]);
        lanes[idx] = if a > b { a } else { b };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    struct Best<'a> {
        logits: &'a [f32],
        scale: Scale,
        key: NoiseKey,
        token: &'a mut i64,
    }

    impl Kernel for Best<'_> {
        #[inline(always)]
        fn run<S: Simd>(self, simd: S) {
            *self.token = best_with_noise(simd, self.logits, self.scale, self.key);
        }
    }

    /// The noise of every token, without a bound.
    fn plain_scan(logits: &[f32], scale: Scale, key: NoiseKey) -> usize {
        let mut best = (f32::NEG_INFINITY, 0);
        for (idx, group) in logits.chunks(NOISE_LEN).enumerate() {
            let noise = noise(&key.words(u32::try_from(idx * LANES).unwrap()));
            for (offset, (logit, noise)) in group.iter().zip(noise).enumerate() {
                let sum = noise + scale.score(*logit);
                if sum > best.0 {
                    best = (sum, idx * NOISE_LEN + offset);
                }
            }
        }
        best.1
    }

    proptest! {
        #[test]
        fn bounds_change_no_draw(
            // Few distinct logits and many: what is left out depends on how far the best one is ahead.
            picks in proptest::collection::vec((0..9_usize, -20.0_f32..5.0), 1..2000),
            is_mixed: bool,
            temperature in prop_oneof![Just(1.0_f32), 1e-6..1e-3_f32, 0.1..3.0_f32, Just(1e6)],
            seed: [u32; 2],
        ) {
            let values = [5.0, 5.0, 4.999, -3.0, -7.0, -11.6, -12.0, -3e38, f32::NEG_INFINITY];
            let mut logits: Vec<f32> =
                picks.iter().map(|&(pick, value)| if is_mixed { value } else { values[pick] }).collect();
            // Something is finite.
            logits[0] = logits[0].max(-1.0);
            let largest = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            let scale = Scale { largest, temperature };
            let key = NoiseKey { seed, position: 3, sample_index: 1 };
            let expected = plain_scan(&logits, scale, key);
            for isa in Isa::available() {
                let mut token = -1;
                isa.run(Best { logits: &logits, scale, key, token: &mut token });
                prop_assert_eq!(usize::try_from(token).unwrap(), expected, "{}", isa.name());
            }
        }
    }
}
