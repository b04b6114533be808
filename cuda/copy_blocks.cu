// Copies whole blocks before anything is written in a step: within each cache, or between it and one in pinned host
// memory, which a GPU addresses like its own.
//
// grid (copies, caches), block 256. The scheduler never hands out a block that a copy of the same step reads, so within
// a cache no block is a source and a destination, and the copies may run in any order.
#include "common.cuh"

struct CopyParams {
  const int64_t* sources;       // [grid.y]: address of each layer's keys and values
  const int64_t* destinations;  // [grid.y]: the same addresses, or those of the other memory
  const int* copies;            // [grid.x, 2]: source and destination block
  int64_t block_bytes;          // from one block to the next, and how much is copied; a multiple of 16
};

extern "C" __global__ void __launch_bounds__(256) copy_blocks(const __grid_constant__ CopyParams p) {
  const uint8_t* source = reinterpret_cast<const uint8_t*>(p.sources[blockIdx.y]);
  source += p.copies[2 * blockIdx.x] * p.block_bytes;
  uint8_t* destination = reinterpret_cast<uint8_t*>(p.destinations[blockIdx.y]);
  destination += p.copies[2 * blockIdx.x + 1] * p.block_bytes;
  for (int64_t i = threadIdx.x * 16; i < p.block_bytes; i += blockDim.x * 16) {
    write_chunk(destination + i, read_chunk(source + i));
  }
}
