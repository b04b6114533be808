// Conversions of e4m3, the 8-bit float with 4 bits of exponent and 3 of mantissa; its largest number is 448.
//
// sm_89 and newer convert in hardware. Before, the bits are moved, which gives the same numbers.
#pragma once

#include "common.cuh"

#if __CUDA_ARCH__ < 890
// To nearest, ties to even, saturating; NaN becomes 0x7f.
INLINE uint32_t to_e4m3_bits(float value) {
  uint32_t sign = __float_as_uint(value) >> 24 & 0x80;
  float size = fabsf(value);
  if (!(size < 448.0f)) return sign | (size >= 448.0f ? 0x7e : 0x7f);
  // Below 2^-6 numbers are multiples of 2^-9.
  if (size < 0.015625f) return sign | uint32_t(__float2int_rn(size * 512.0f));
  // Above, 3 of float32's 23 bits of mantissa are kept, and its exponent is less by the difference of the biases.
  uint32_t bits = __float_as_uint(size);
  bits += 0x7ffff + (bits >> 20 & 1);
  return sign | ((bits >> 20) - ((127 - 7) << 3));
}
#endif

// Two numbers, the first in the lower byte.
INLINE uint16_t to_e4m3(float first, float second) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
  return pair;
#else
  return uint16_t(to_e4m3_bits(first) | to_e4m3_bits(second) << 8);
#endif
}

// The two numbers in the lower 16 bits as a pair of half. Exact: half has more of both exponent and mantissa.
INLINE uint32_t half_of_e4m3(uint32_t pair) {
  uint32_t result;
#if __CUDA_ARCH__ >= 890
  asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; cvt.rn.f16x2.e4m3x2 %0, low; }" : "=r"(result) : "r"(pair));
#else
  // With the bits moved to where half has its own, the number is too small by the difference of the biases, 2^8.
  uint32_t bytes = permute_bytes(pair, 0x1404);
  uint32_t moved = (bytes & 0x80008000u) | (bytes & 0x7f007f00u) >> 1;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(moved), "r"(0x5c005c00));
#endif
  return result;
}
