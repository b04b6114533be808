// What all kernels share: the element type, 16-byte accesses, where a slot of the paged cache lies, reductions.
//
// PKV_ELEMENT is defined on the command line: bf16 or half. A kernel takes one packed struct of parameters, whose
// members pagedkv.ops.cuda_kernels reads from these sources: one member a line, 8-byte ones first, so there are no gaps.
#pragma once

#include "ptx.cuh"

#ifdef PKV_ELEMENT
using Element = PKV_ELEMENT;
using Numbers = Numeric<Element>;
#endif

constexpr uint32_t ALL_LANES = 0xffffffffu;
#define MINUS_INFINITY __int_as_float(0xff800000)

// The only shared memory of a kernel is what the launch asks for.
extern __shared__ __align__(1024) uint8_t shared_memory[];

// Eight elements of 2 bytes, the unit in which rows are read and written.
union Chunk {
  uint4 words;
  uint32_t pairs[4];
};

INLINE Chunk read_chunk(const void* pointer) {
  Chunk chunk;
  chunk.words = *static_cast<const uint4*>(pointer);
  return chunk;
}

INLINE void write_chunk(void* pointer, Chunk chunk) { *static_cast<uint4*>(pointer) = chunk.words; }

// Keys and values of a layer are [num_blocks + 1, num_kv_heads, block_size, head_dim] with any strides, in elements:
//
//   offset(slot, head) = slot / block_size * block_stride + head * head_stride + slot % block_size * slot_stride
//
// 64 bits throughout: a large cache has more than 2^31 elements.
template <class Params>
INLINE int64_t cache_offset(const Params& p, int block_id, int slot_in_block, int head) {
  return block_id * p.block_stride + head * p.head_stride + slot_in_block * p.slot_stride;
}

// Where a 16-byte chunk of a slot's row lies within the row. A swizzled cache has the chunks of eight neighbouring slots
// in different places: whole blocks, copied to shared memory as they are, are then read without bank conflicts.
#ifndef PKV_SWIZZLED
#define PKV_SWIZZLED 0
#endif
INLINE int place_of_chunk(int chunk, int slot) { return PKV_SWIZZLED ? chunk ^ (slot & 7) : chunk; }

INLINE float warp_sum(float value) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) value += __shfl_xor_sync(ALL_LANES, value, distance);
  return value;
}
