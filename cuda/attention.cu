// Attention over a paged cache of 16-bit elements, on tensor cores: prompts, chunks and decodes (sm_80 and newer).
//
// grid (work items, key/value heads), block NUM_THREADS. See attention.cuh for the item and the constants, and
// README.md for the versions before this one.
//
//   scores  S[row, kv]  = sum over d of Q[row, d] * K[kv, d]
//   weights P[row, kv]  = 2^(scale_log2 * S - max), kept in registers: the result of the first product has the layout
//                         that the second one wants of its left operand
//   result  O[row, d]   = sum over kv of P[row, kv] * V[kv, d]
//
// A tile of keys and values is copied by cp.async while the one before it is multiplied.
#include "attention.cuh"

// Query fragments stay in registers where they fit beside the accumulator; else they are read again for every tile.
constexpr bool QUERY_IN_REGISTERS = HEAD_DIM <= 128;
constexpr int STORED_ROW = STORED_ROW_BYTES / 2;  // in elements

using Fragment = uint32_t[4];

INLINE void copy_query(const AttentionParams& p, const WorkItem& item, int kv_head, Element* target) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += NUM_THREADS) {
    int row = i / CHUNKS, dim = i % CHUNKS * 8;
    bool valid = row < item.num_rows;
    int source = item.first_row + (valid ? row : 0);
    copy_async(target + row * QUERY_ROW + dim,
               p.query + row_offset(source, p.group_size, kv_head, p.query_stride) + dim, valid);
  }
}

// Rows 0..15, dimensions 16 * step .. of a warp's part of the query.
INLINE void read_query(Fragment& fragment, const Element* query, int step) {
  int lane = threadIdx.x % 32;
  load_matrices<false>(fragment, query + lane % 16 * QUERY_ROW + step * 16 + lane / 16 * 8);
}

INLINE void multiply_keys(float (&scores)[WARP_TILE / 8][4], const Fragment (&query)[DIM_STEPS],
                          const Element* query_rows, const Element* keys) {
  int lane = threadIdx.x % 32;
  // The matrices of a load are tokens 0..7 and 8..15, each with dimensions 0..7 and 8..15: two right operands.
  const Element* lane_row = keys + (lane % 8 + lane / 16 * 8) * STORED_ROW + lane / 8 % 2 * 8;
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++) {
    Fragment left;
    if constexpr (QUERY_IN_REGISTERS) {
#pragma unroll
      for (int j = 0; j < 4; j++) left[j] = query[step][j];
    } else {
      read_query(left, query_rows, step);
    }
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; i++) {
      Fragment right;
      load_matrices<false>(right, lane_row + i * 16 * STORED_ROW + step * 16);
      Numbers::mma(scores[2 * i], left, right[0], right[1]);
      Numbers::mma(scores[2 * i + 1], left, right[2], right[3]);
    }
  }
}

INLINE void multiply_values(Accumulator& acc, const float (&weights)[WARP_TILE / 8][4], const Element* values) {
  int lane = threadIdx.x % 32;
  const Element* lane_row = values + lane % 16 * STORED_ROW + lane / 16 * 8;
#pragma unroll
  for (int i = 0; i < WARP_TILE / 16; i++) {
    const float(&first)[4] = weights[2 * i];
    const float(&second)[4] = weights[2 * i + 1];
    Fragment left = {Numbers::narrow(first[0], first[1]), Numbers::narrow(first[2], first[3]),
                     Numbers::narrow(second[0], second[1]), Numbers::narrow(second[2], second[3])};
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
      Fragment right;
      load_matrices<true>(right, lane_row + i * 16 * STORED_ROW + step * 16);
      Numbers::mma(acc.out[2 * step], left, right[0], right[1]);
      Numbers::mma(acc.out[2 * step + 1], left, right[2], right[3]);
    }
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) attention(const __grid_constant__ AttentionParams p) {
  WorkItem item = read_item(p.items, blockIdx.x);
  if (item.num_rows == 0) return;
  int kv_head = blockIdx.y, warp = threadIdx.x / 32, row_warp = warp % ROW_WARPS, kv_warp = warp / ROW_WARPS;
  uint8_t* ring = shared_memory;
  Element* query_rows = reinterpret_cast<Element*>(ring + 2 * STAGES * STAGE_BYTES);
  copy_query(p, item, kv_head, query_rows);
  query_rows += row_warp * 16 * QUERY_ROW;

  TileLoader loader(p, item, kv_head);
  int num_tiles = (item.kv_end - item.kv_begin + TILE - 1) / TILE;
#pragma unroll
  for (int tile = 0; tile < STAGES - 1; tile++) {
    if (tile < num_tiles) loader.load(item.kv_begin + tile * TILE, ring + tile * STAGE_BYTES);
    copy_async_commit();  // A group a tile, empty ones too, so that the count to wait for is constant.
  }

  Accumulator acc;
  RowLimits limits(p, item, row_warp);
  Fragment query[DIM_STEPS];
  int stage = 0, next_stage = STAGES - 1;
  for (int tile = 0; tile < num_tiles; tile++) {
    copy_async_wait<STAGES - 2>();
    // After this all threads' copies of the tile are visible, and nobody reads the stage that is filled next.
    __syncthreads();
    int next = tile + STAGES - 1;
    if (next < num_tiles) loader.load(item.kv_begin + next * TILE, ring + next_stage * STAGE_BYTES);
    copy_async_commit();
    if (QUERY_IN_REGISTERS && tile == 0) {
#pragma unroll
      for (int step = 0; step < DIM_STEPS; step++) read_query(query[step], query_rows, step);
    }
    int first_kv = item.kv_begin + tile * TILE + kv_warp * WARP_TILE;
    const uint8_t* keys = ring + stage * STAGE_BYTES + kv_warp * WARP_TILE * STORED_ROW_BYTES;
    float scores[WARP_TILE / 8][4] = {};
    multiply_keys(scores, query, query_rows, reinterpret_cast<const Element*>(keys));
    softmax_step(scores, acc, limits, first_kv, p.scale_log2);
    multiply_values(acc, scores, reinterpret_cast<const Element*>(keys + STAGES * STAGE_BYTES));
    next_stage = stage;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  copy_async_wait<0>();
  __syncthreads();
  WarpResults results;
  results.put_rows(acc, warp);
  results.put_sums(acc, warp);
  __syncthreads();
  write_rows(p, item, results, kv_head);
}
