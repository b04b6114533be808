//! Arithmetic of sampling that every backend computes to the last bit: the noise, and the mass of a token.
//!
//! `python/pagedkv/ops/philox.py` and `exact.py` define both, and their tests hold the two languages together.
//! Logarithm and exponential are polynomials of fused multiply-adds in f32, because no two libraries agree on the last
//! bits of theirs. The functions work on lanes, which the compiler turns into vectors of the caller's instruction set;
//! each operation is rounded as written, on every instruction set. Called by `sample`.

#![expect(
    clippy::inline_always,
    reason = "must be compiled with the instruction set of its caller"
)]

use super::isa::LANES;

/// Tokens whose noise is computed at a time: four words of each of `LANES` counters.
pub(super) const NOISE_LEN: usize = 4 * LANES;

/// The mass of the most likely token. Masses are integers, so that their sums do not depend on an order.
pub(super) const UNIT_MASS: u32 = 1 << 30;

/// The bits of 2^30.
const UNIT_MASS_BITS: u32 = (127 + 30) << 23;

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const NUM_ROUNDS: usize = 10;

/// (ln(1 + f) - f) / f^2, ascending powers, for f in [sqrt(1/2) - 1, sqrt(2) - 1]: least maximum of the relative error
/// of ln(1 + f), 5e-9.
const LN_COEFFICIENTS: [f32; 9] = [
    -0.499_999_88,
    0.333_333_25,
    -0.250_015_85,
    0.200_019_85,
    -0.166_090_56,
    0.141_816_32,
    -0.132_429_84,
    0.129_055_2,
    -0.076_230_77,
];

/// (2^f - 1) / f for f in [-1/2, 1/2], as in `isa`.
const EXP2_COEFFICIENTS: [f32; 6] = [
    std::f32::consts::LN_2,
    0.240_226_48,
    0.055_503_324,
    0.009_618_437,
    0.001_339_887_4,
    0.000_153_533_62,
];

/// Adding 1.5 * 2^23 leaves the nearest integer of a small number in the low bits of the sum.
const ROUND_TO_INTEGER: f32 = 12_582_912.0;

/// Below it 2^x is less than the unit of masses.
const EXP2_MIN: f32 = -100.0;

/// The bits of sqrt(1/2), where the significand of the logarithm's argument begins.
const SQRT_HALF_BITS: u32 = 0x3f35_04f3;

/// What bounds of the noise allow for: more than the error of the logarithms and that of the sums that are compared.
const NOISE_ERROR: f32 = 1e-3;

/// Above all noise: that of the largest word is 24 ln 2.
const MAX_NOISE: f32 = 24.0 * std::f32::consts::LN_2 + NOISE_ERROR;

/// The bits of a word that make no difference to its noise, and half a unit of the others.
const UNUSED_BITS: u32 = (1 << 9) - 1;

/// The part of a draw's counter and key that all of its tokens share.
#[derive(Clone, Copy, Debug)]
pub(super) struct NoiseKey {
    pub(super) seed: [u32; 2],
    pub(super) position: u32,
    pub(super) sample_index: u32,
}

/// Words of `NOISE_LEN` tokens: lane i of row j is that of token 4 i + j.
pub(super) type NoiseWords = [[u32; LANES]; 4];

impl NoiseKey {
    /// Words of the `NOISE_LEN` tokens from `4 * first_counter` on.
    #[inline(always)]
    pub(super) fn words(&self, first_counter: u32) -> NoiseWords {
        let mut words = [[0_u32; LANES]; 4];
        for lane in 0..LANES {
            #[expect(clippy::cast_possible_truncation, reason = "a lane is a small number")]
            let counter = [
                first_counter.wrapping_add(lane as u32),
                self.position,
                self.sample_index,
                0,
            ];
            let block = philox(counter, self.seed);
            for (word, row) in block.into_iter().zip(&mut words) {
                row[lane] = word;
            }
        }
        words
    }

    /// Noise of one token.
    #[expect(clippy::cast_possible_truncation, reason = "a vocabulary is small")]
    #[inline(always)]
    pub(super) fn noise_of(&self, token: usize) -> f32 {
        let counter = [(token / 4) as u32, self.position, self.sample_index, 0];
        gumbel(philox(counter, self.seed)[token % 4])
    }
}

/// The noise that words stand for, token by token.
#[inline(always)]
pub(super) fn noise(words: &NoiseWords) -> [f32; NOISE_LEN] {
    let mut out = [0.0; NOISE_LEN];
    for (idx, row) in words.iter().enumerate() {
        let mut noise = [0.0; LANES];
        for (noise, &word) in noise.iter_mut().zip(row) {
            *noise = gumbel(word);
        }
        for (lane, noise) in noise.into_iter().enumerate() {
            out[4 * lane + idx] = noise;
        }
    }
    out
}

/// A word such that the noise of all smaller ones is below `gap`; None if that of every word is.
///
/// Noise of at least `gap` takes 1 - u <= -ln(u) <= e^-gap, and 1 - u is the complement of the word, as a fraction of
/// 2^32 but for the nine bits that are not used. The power is replaced by the chord between the powers of two on both
/// sides, which is above it and costs no exponential: the number whose bits are those of its exponent, as a fraction.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "neither is negative, and the error allows for what truncation takes away"
)]
#[inline(always)]
pub(super) fn least_word(gap: f32) -> Option<u32> {
    if gap > MAX_NOISE {
        return None;
    }
    // At least one half would be all words, and the chord is not needed for it.
    let exponent = ((gap - NOISE_ERROR) * std::f32::consts::LOG2_E).max(0.0);
    let power = f32::from_bits(((127.0 - exponent) * 8_388_608.0) as u32);
    let complement = (power * 4_294_967_296.0) as u32;
    Some(!complement.saturating_add(UNUSED_BITS))
}

/// Ten rounds of Philox4x32 (Salmon et al., SC 2011).
#[inline(always)]
fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..NUM_ROUNDS {
        let [high_0, low_0] = multiply(MULTIPLIERS[0], counter[0]);
        let [high_1, low_1] = multiply(MULTIPLIERS[1], counter[2]);
        counter = [
            high_1 ^ counter[1] ^ key[0],
            low_1,
            high_0 ^ counter[3] ^ key[1],
            low_0,
        ];
        key = [key[0].wrapping_add(WEYL[0]), key[1].wrapping_add(WEYL[1])];
    }
    counter
}

/// High and low word of a product.
#[expect(clippy::cast_possible_truncation, reason = "the words of a product")]
#[inline(always)]
fn multiply(a: u32, b: u32) -> [u32; 2] {
    let product = u64::from(a) * u64::from(b);
    [(product >> 32) as u32, product as u32]
}

/// The Gumbel noise that a word stands for.
#[expect(clippy::cast_precision_loss, reason = "a number of 23 bits is exact")]
#[inline(always)]
fn gumbel(word: u32) -> f32 {
    // 2^-23 times an odd half is exact in f32, and neither 0 nor 1.
    let u = ((word >> 9) as f32 + 0.5) * (1.0 / 8_388_608.0);
    -ln(-ln(u))
}

/// Natural logarithm of a normal number above zero.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_wrap,
    reason = "an exponent is a small number"
)]
#[inline(always)]
fn ln(x: f32) -> f32 {
    let shifted = x.to_bits().wrapping_sub(SQRT_HALF_BITS);
    let exponent = ((shifted as i32) >> 23) as f32;
    let f = f32::from_bits((shifted & 0x007f_ffff) + SQRT_HALF_BITS) - 1.0;
    let mut sum = LN_COEFFICIENTS[8];
    for idx in (0..8).rev() {
        sum = sum.mul_add(f, LN_COEFFICIENTS[idx]);
    }
    exponent.mul_add(std::f32::consts::LN_2, (f * f).mul_add(sum, f))
}

/// The mass of a token by its score, which is at most zero: e^score in units of 2^-30, rounded down.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "0 to 2^30"
)]
#[inline(always)]
pub(super) fn mass(score: f32) -> u32 {
    let product = score * std::f32::consts::LOG2_E;
    let x = if product > EXP2_MIN { product } else { EXP2_MIN };
    let shifted = x + ROUND_TO_INTEGER;
    let f = x - (shifted - ROUND_TO_INTEGER);
    let mut sum = EXP2_COEFFICIENTS[5];
    for idx in (0..5).rev() {
        sum = sum.mul_add(f, EXP2_COEFFICIENTS[idx]);
    }
    let power = sum.mul_add(f, 1.0);
    let scale = (shifted.to_bits() << 23).wrapping_add(UNIT_MASS_BITS);
    (power * f32::from_bits(scale)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn philox_gives_the_published_words() {
        let published = [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8];
        assert_eq!(philox([0; 4], [0; 2]), published);
        let published = [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1];
        let counter = [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344];
        assert_eq!(philox(counter, [0xa409_3822, 0x299f_31d0]), published);
    }

    #[test]
    fn the_ends_of_the_noise_are_finite() {
        for word in [0, 511, 512, u32::MAX - 512, u32::MAX] {
            let u = (f64::from(word >> 9) + 0.5) / 8_388_608.0;
            let exact = -(-u.ln()).ln();
            assert!((f64::from(gumbel(word)) - exact).abs() < 4e-6, "{word}");
        }
    }

    #[test]
    fn masses_are_powers() {
        assert_eq!(mass(0.0), UNIT_MASS);
        assert_eq!(mass(-0.0), UNIT_MASS);
        assert_eq!(mass(f32::NEG_INFINITY), 0);
        assert_eq!(mass(-22.0), 0);
        assert!(mass(-1e-8) <= UNIT_MASS);
    }

    proptest! {
        #[test]
        fn no_noise_below_the_least_word_reaches_the_gap(word: u32, gap in -4.0_f32..18.0, near in 0_u32..2000) {
            let near_end = u32::MAX - near * 100;
            for word in [word, near_end, least_word(gap).unwrap_or(0).wrapping_sub(1)] {
                let reaches = gumbel(word) >= gap - NOISE_ERROR / 2.0;
                prop_assert!(!reaches || least_word(gap).is_some_and(|least| word >= least), "{word} {gap}");
            }
            // Not many words more than it takes: its own noise is near the gap.
            if let Some(least) = least_word(gap).filter(|_| (2.0..13.0).contains(&gap)) {
                prop_assert!(gumbel(least) > gap - 0.2, "{least} {gap}");
            }
        }

        #[test]
        fn tokens_have_the_noise_of_their_words(seed: [u32; 2], position: u32, sample_index: u32, group in 0..100_u32) {
            let key = NoiseKey { seed, position, sample_index };
            let all = noise(&key.words(group * 16));
            for (idx, noise) in all.into_iter().enumerate() {
                let alone = key.noise_of(group as usize * NOISE_LEN + idx);
                prop_assert_eq!(alone.to_bits(), noise.to_bits());
            }
        }

        #[test]
        fn noise_and_mass_are_accurate(word: u32, score in -20.0_f32..0.0) {
            let u = (f64::from(word >> 9) + 0.5) / 8_388_608.0;
            let exact = -(-u.ln()).ln();
            prop_assert!((f64::from(gumbel(word)) - exact).abs() < 1e-6 * exact.abs().max(1.0));
            let exact = f64::from(score).exp() * f64::from(UNIT_MASS);
            prop_assert!((f64::from(mass(score)) - exact).abs() < 1.0 + 4e-6 * exact);
        }
    }
}
