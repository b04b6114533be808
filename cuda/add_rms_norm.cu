// Adds what a layer computed to the residual, in place, and scales the rows of the sum to a root mean square of 1.
//
// grid (rows), block up to 256 threads, which divide the row's chunks of 8 elements; the row waits in shared memory
// (2 * size bytes, then a float a warp) between the two uses, so it is read once.
//
//   residual = round(x + residual);  out = round(residual / sqrt(mean(residual^2) + eps)) * weight
//
// The rounding in the middle is the models' own: they were trained with it.
#include "common.cuh"

struct NormParams {
  Element* out;              // [rows, size], without gaps
  const Element* x;          // [rows, size], rows x_stride apart
  Element* residual;         // likewise, residual_stride apart; becomes the sum. Null: x alone is scaled
  const Element* weight;     // [size]
  int64_t x_stride;          // in elements
  int64_t residual_stride;   // in elements
  float eps;
  int size;                  // a multiple of 8
};

extern "C" __global__ void __launch_bounds__(256) add_rms_norm(const __grid_constant__ NormParams p) {
  int64_t row = blockIdx.x;
  int num_chunks = p.size / 8, num_warps = blockDim.x / 32;
  uint8_t* kept = shared_memory;
  float* warp_sums = reinterpret_cast<float*>(kept + p.size * sizeof(Element));

  float squares = 0.0f;
  for (int i = threadIdx.x; i < num_chunks; i += blockDim.x) {
    Chunk chunk = read_chunk(p.x + row * p.x_stride + i * 8);
    if (p.residual) {
      Element* place = p.residual + row * p.residual_stride + i * 8;
      Chunk other = read_chunk(place);
#pragma unroll
      for (int j = 0; j < 4; j++) {
        float2 a = Numbers::widen(chunk.pairs[j]), b = Numbers::widen(other.pairs[j]);
        chunk.pairs[j] = Numbers::narrow(a.x + b.x, a.y + b.y);
      }
      write_chunk(place, chunk);  // No other thread reads it.
    }
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 value = Numbers::widen(chunk.pairs[j]);
      squares += value.x * value.x + value.y * value.y;
    }
    write_chunk(kept + i * sizeof(Chunk), chunk);  // Read by this thread alone.
  }
  squares = warp_sum(squares);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = squares;
  __syncthreads();
  squares = 0.0f;
  for (int w = 0; w < num_warps; w++) squares += warp_sums[w];
  float factor = 1.0f / sqrtf(squares / p.size + p.eps);

  for (int i = threadIdx.x; i < num_chunks; i += blockDim.x) {
    Chunk chunk = read_chunk(kept + i * sizeof(Chunk)), weight = read_chunk(p.weight + i * 8);
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float2 value = Numbers::widen(chunk.pairs[j]), scale = Numbers::widen(weight.pairs[j]);
      float2 normal = Numbers::widen(Numbers::narrow(value.x * factor, value.y * factor));
      chunk.pairs[j] = Numbers::narrow(normal.x * scale.x, normal.y * scale.y);
    }
    write_chunk(p.out + row * p.size + i * 8, chunk);
  }
}
