// Attention over a paged cache of e4m3 (8-bit) elements, on tensor cores (sm_80 and newer).
//
// As attention.cu, at half the bytes. Tiles hold bytes; keys and values become half (exactly) on their way to the
// tensor cores, and so do queries and weights, rounded. Two permutations make the bytes of a register the operands
// that its lane needs, so nothing is shuffled between lanes:
//
// - Dimensions 4c .. 4c + 3 of a 16-dimension step stand where an mma has k = 2c, 2c + 1, 2c + 8, 2c + 9. A lane has
//   four consecutive bytes of a key. The query is laid out likewise, and a sum does not depend on the order.
// - Of a step's two result fragments the first has the even dimensions, the second the odd ones, because the matrix
//   load transposes pairs of bytes.
#include "attention.cuh"
#include "fp8.cuh"

using Half = Numeric<half>;
using Fragment = uint32_t[4];

INLINE void convert_query(const AttentionParams& p, const WorkItem& item, int kv_head, half* target) {
  constexpr int PAIRS = HEAD_DIM / 2;
  for (int i = threadIdx.x; i < ROWS * PAIRS; i += NUM_THREADS) {
    int row = i / PAIRS, dim = i % PAIRS * 2;
    uint32_t pair = 0;
    if (row < item.num_rows) {
      const Element* source = p.query + row_offset(item.first_row + row, p.group_size, kv_head, p.query_stride) + dim;
      float2 value = Numbers::widen(*reinterpret_cast<const uint32_t*>(source));
      pair = Half::narrow(value.x, value.y);
    }
    *reinterpret_cast<uint32_t*>(target + row * QUERY_ROW + dim) = pair;
  }
}

// Rows lane / 4 and lane / 4 + 8, four consecutive dimensions of each.
INLINE void read_query(Fragment& fragment, const half* query, int step) {
  int lane = threadIdx.x % 32;
  const half* row = query + lane / 4 * QUERY_ROW + step * 16 + lane % 4 * 4;
  uint2 upper = *reinterpret_cast<const uint2*>(row), lower = *reinterpret_cast<const uint2*>(row + 8 * QUERY_ROW);
  fragment[0] = upper.x, fragment[1] = lower.x, fragment[2] = upper.y, fragment[3] = lower.y;
}

INLINE void multiply_keys(float (&scores)[WARP_TILE / 8][4], const half* query, const uint8_t* keys) {
  const uint8_t* lane_row = keys + threadIdx.x % 16 * STORED_ROW_BYTES;
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++) {
    Fragment left;
    read_query(left, query, step);
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; i++) {
      uint32_t bytes[2];
      load_matrices<false>(bytes, lane_row + i * 16 * STORED_ROW_BYTES + step * 16);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        Half::mma(scores[2 * i + j], left, half_of_e4m3(bytes[j]), half_of_e4m3(bytes[j] >> 16));
      }
    }
  }
}

INLINE void multiply_values(Accumulator& acc, const float (&weights)[WARP_TILE / 8][4], const uint8_t* values) {
  const uint8_t* lane_row = values + threadIdx.x % 16 * STORED_ROW_BYTES;
#pragma unroll
  for (int i = 0; i < WARP_TILE / 16; i++) {
    const float(&first)[4] = weights[2 * i];
    const float(&second)[4] = weights[2 * i + 1];
    Fragment left = {Half::narrow(first[0], first[1]), Half::narrow(first[2], first[3]),
                     Half::narrow(second[0], second[1]), Half::narrow(second[2], second[3])};
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
      uint32_t bytes[2];
      load_matrices<true>(bytes, lane_row + i * 16 * STORED_ROW_BYTES + step * 16);
      // Of two tokens: the even dimension of both, then the odd one of both.
      uint32_t upper = permute_bytes(bytes[0], 0x3120), lower = permute_bytes(bytes[1], 0x3120);
      Half::mma(acc.out[2 * step], left, half_of_e4m3(upper), half_of_e4m3(lower));
      Half::mma(acc.out[2 * step + 1], left, half_of_e4m3(upper >> 16), half_of_e4m3(lower >> 16));
    }
  }
}

// The two fragments of a step together are four consecutive dimensions of a row.
INLINE void put_results(const Accumulator& acc, const WarpResults& results, int warp) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++)
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float* target = results.out + (warp * 16 + lane / 4 + r * 8) * RESULT_ROW + step * 16 + lane % 4 * 4;
      const float(&even)[4] = acc.out[2 * step];
      const float(&odd)[4] = acc.out[2 * step + 1];
      *reinterpret_cast<float4*>(target) = make_float4(even[2 * r], odd[2 * r], even[2 * r + 1], odd[2 * r + 1]);
    }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) attention_fp8(const __grid_constant__ AttentionParams p) {
  WorkItem item = read_item(p.items, blockIdx.x);
  if (item.num_rows == 0) return;
  int kv_head = blockIdx.y, warp = threadIdx.x / 32, row_warp = warp % ROW_WARPS, kv_warp = warp / ROW_WARPS;
  uint8_t* ring = shared_memory;
  half* query = reinterpret_cast<half*>(ring + 2 * STAGES * STAGE_BYTES);

  TileLoader loader(p, item, kv_head);
  int num_tiles = (item.kv_end - item.kv_begin + TILE - 1) / TILE;
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (tile < num_tiles) loader.load(item.kv_begin + tile * TILE, ring + tile * STAGE_BYTES);
    copy_async_commit();
  }
  convert_query(p, item, kv_head, query);
  query += row_warp * 16 * QUERY_ROW;

  Accumulator acc;
  RowLimits limits(p, item, row_warp);
  int stage = 0, next_stage = STAGES - 1;
  for (int tile = 0; tile < num_tiles; tile++) {
    copy_async_wait<STAGES - 2>();
    // After this all threads' copies of the tile are visible, and nobody reads the stage that is filled next.
    __syncthreads();
    int next = tile + STAGES - 1;
    if (next < num_tiles) loader.load(item.kv_begin + next * TILE, ring + next_stage * STAGE_BYTES);
    copy_async_commit();
    int first_kv = item.kv_begin + tile * TILE + kv_warp * WARP_TILE;
    const uint8_t* keys = ring + stage * STAGE_BYTES + kv_warp * WARP_TILE * STORED_ROW_BYTES;
    float scores[WARP_TILE / 8][4] = {};
    multiply_keys(scores, query, keys);
    softmax_step(scores, acc, limits, first_kv, p.scale_log2);
    multiply_values(acc, scores, keys + STAGES * STAGE_BYTES);
    next_stage = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  copy_async_wait<0>();
  __syncthreads();
  WarpResults results;
  put_results(acc, results, warp);
  results.put_sums(acc, warp);
  __syncthreads();
  write_rows(p, item, results, kv_head);
}
