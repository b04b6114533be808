// Arithmetic of sampling that every backend computes to the last bit: the noise, and the mass of a token.
//
// pagedkv.ops.philox and pagedkv.ops.exact define both; rust/cpu/noise.rs is the same for the CPU. The intrinsics keep
// the compiler from fusing a product and a sum where the definition has two roundings, or the other way round.
#pragma once

#include "ptx.cuh"

constexpr float LN_2 = 0.6931472f, LOG2_E = 1.442695f;
constexpr int UNIT_MASS = 1 << 30;

// Natural logarithm of a normal number above zero.
INLINE float ln(float x) {
  constexpr float COEFFICIENTS[] = {-0.49999988f, 0.33333325f,  -0.25001585f, 0.20001985f, -0.16609056f,
                                    0.14181632f,  -0.13242984f, 0.1290552f,   -0.07623077f};
  constexpr int SQRT_HALF_BITS = 0x3f3504f3;
  int shifted = __float_as_int(x) - SQRT_HALF_BITS;
  float exponent = float(shifted >> 23);
  float f = __fsub_rn(__int_as_float((shifted & 0x007fffff) + SQRT_HALF_BITS), 1.0f);
  float sum = COEFFICIENTS[8];
#pragma unroll
  for (int i = 7; i >= 0; i--) sum = __fmaf_rn(sum, f, COEFFICIENTS[i]);
  return __fmaf_rn(exponent, LN_2, __fmaf_rn(__fmul_rn(f, f), sum, f));
}

// e^score in units of 2^-30, rounded down, for scores of at most zero.
INLINE uint32_t mass_of(float score) {
  constexpr float COEFFICIENTS[] = {0.6931472f,   0.24022648f,   0.055503324f,
                                    0.009618437f, 0.0013398874f, 0.00015353362f};
  constexpr float ROUND_TO_INTEGER = 12582912.0f;  // 1.5 * 2^23
  constexpr float EXP2_MIN = -100.0f;              // Far below the unit of masses.
  float x = fmaxf(__fmul_rn(score, LOG2_E), EXP2_MIN);
  float shifted = __fadd_rn(x, ROUND_TO_INTEGER);
  float f = __fsub_rn(x, __fsub_rn(shifted, ROUND_TO_INTEGER));
  float sum = COEFFICIENTS[5];
#pragma unroll
  for (int i = 4; i >= 0; i--) sum = __fmaf_rn(sum, f, COEFFICIENTS[i]);
  float power = __fmaf_rn(sum, f, 1.0f);
  // The low bits of `shifted` are the integer, which becomes the exponent of a power of two: an exact product.
  uint32_t scale = (__float_as_uint(shifted) << 23) + ((127u + 30u) << 23);
  return uint32_t(__fmul_rn(power, __uint_as_float(scale)));
}

// Ten rounds of Philox4x32.
INLINE uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < 10; round++) {
    uint32_t high_0 = __umulhi(0xD2511F53u, counter.x), low_0 = 0xD2511F53u * counter.x;
    uint32_t high_1 = __umulhi(0xCD9E8D57u, counter.z), low_1 = 0xCD9E8D57u * counter.z;
    counter = make_uint4(high_1 ^ counter.y ^ key.x, low_1, high_0 ^ counter.w ^ key.y, low_0);
    key = make_uint2(key.x + 0x9E3779B9u, key.y + 0xBB67AE85u);
  }
  return counter;
}

INLINE float gumbel(uint32_t word) {
  float u = (float(word >> 9) + 0.5f) * 1.1920929e-07f;  // 2^-23: exact, and neither 0 nor 1.
  return -ln(-ln(u));
}

// No less than gumbel(word): -ln(-ln(u)) <= -ln(1 - u), here with room for the approximate logarithms.
INLINE float gumbel_bound(uint32_t word) {
  float rest = 8388607.5f - float(word >> 9);  // (1 - u) * 2^23
  return (23.0f - log2_fast(rest)) * LN_2 + 0.001f;
}
