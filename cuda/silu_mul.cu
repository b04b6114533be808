// The gate of a feed-forward layer: out = round(gate / (1 + e^-gate)) * up.
//
// grid (rows, chunks of 8 elements / block), block up to 256 threads; a thread computes one chunk.
#include "common.cuh"

struct SiluParams {
  Element* out;          // [rows, size], without gaps
  const Element* gate;   // [rows, size], rows gate_stride apart
  const Element* up;     // likewise, up_stride apart
  int64_t gate_stride;   // in elements
  int64_t up_stride;     // in elements
  int size;              // a multiple of 8
};

INLINE float silu(float x) { return __fdividef(x, 1.0f + __expf(-x)); }

extern "C" __global__ void __launch_bounds__(256) silu_mul(const __grid_constant__ SiluParams p) {
  int64_t row = blockIdx.x;
  int first = (blockIdx.y * blockDim.x + threadIdx.x) * 8;
  if (first >= p.size) return;
  Chunk gate = read_chunk(p.gate + row * p.gate_stride + first), up = read_chunk(p.up + row * p.up_stride + first);
#pragma unroll
  for (int j = 0; j < 4; j++) {
    float2 x = Numbers::widen(gate.pairs[j]), factor = Numbers::widen(up.pairs[j]);
    float2 opened = Numbers::widen(Numbers::narrow(silu(x.x), silu(x.y)));
    gate.pairs[j] = Numbers::narrow(opened.x * factor.x, opened.y * factor.y);
  }
  write_chunk(p.out + row * p.size + first, gate);
}
