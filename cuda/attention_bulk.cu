// Attention of decodes over a swizzled cache: whole blocks of a head arrive by one bulk copy each (sm_90 and newer).
//
// grid (work items, key/value heads), block NUM_THREADS + 32: the last warp produces, one lane of it asks for copies; the
// others consume as in attention.cu. A stage has two barriers: `full` ends a phase when its bytes have arrived, `empty`
// when all consumers are done with it. Nobody computes addresses of rows, so a tile costs fewer instructions.
//
// The cache has PKV_SWIZZLED 1 (see place_of_chunk), memory order [block, head, slot, dimension] without gaps within a
// head of a block, and a head size that is a multiple of 64. The keys of an item begin at a multiple of the smaller of
// block size and PKV_TILE, and end there too, or at the sequence's last key.
#include "attention.cuh"

constexpr int TILE_BYTES = TILE * HEAD_DIM * 2;
static_assert(ROW_WARPS == 1 && HEAD_DIM % 64 == 0 && STORED_BYTES == 2 && PKV_SWIZZLED == 1, "see above");

using Fragment = uint32_t[4];

struct Pipeline {
  uint8_t *keys, *values;  // [STAGES, TILE, HEAD_DIM]
  Element* query;          // [16, QUERY_ROW]
  uint64_t *full, *empty;  // [STAGES]

  __device__ __forceinline__ Pipeline() {
    keys = shared_memory;
    values = keys + STAGES * TILE_BYTES;
    query = reinterpret_cast<Element*>(values + STAGES * TILE_BYTES);
    full = reinterpret_cast<uint64_t*>(query + ROWS * QUERY_ROW);
    empty = full + STAGES;
  }
};

INLINE void copy_query(const AttentionParams& p, const WorkItem& item, int kv_head, Element* target) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < ROWS * CHUNKS; i += blockDim.x) {
    int row = i / CHUNKS, dim = i % CHUNKS * 8;
    Chunk chunk = {};
    if (row < item.num_rows) {
      chunk = read_chunk(p.query + row_offset(item.first_row + row, p.group_size, kv_head, p.query_stride) + dim);
    }
    write_chunk(target + row * QUERY_ROW + dim, chunk);
  }
}

INLINE void produce(const AttentionParams& p, const WorkItem& item, int kv_head, const Pipeline& pipeline) {
  const int* table = p.block_ids + p.table_start[item.sequence];
  int block_size = 1 << p.block_size_log2, page = min(block_size, TILE);  // tokens of a copy
  uint32_t parity = 1;  // Before their first use stages are empty: the phase before the first one has ended.
  int stage = 0;
  for (int first_kv = item.kv_begin; first_kv < item.kv_end; first_kv += TILE) {
    mbarrier_wait(pipeline.empty + stage, parity);
    // Pages are copied whole; what lies behind the last key is dealt with by the consumers.
    int num_tokens = min(TILE, (item.kv_end - first_kv + page - 1) / page * page);
    mbarrier_arrive_and_expect(pipeline.full + stage, 2 * num_tokens * HEAD_DIM * 2);
    for (int token = 0; token < num_tokens; token += page) {
      int kv = first_kv + token;
      int64_t offset = cache_offset(p, table[kv >> p.block_size_log2], kv & (block_size - 1), kv_head) * 2;
      int target = stage * TILE_BYTES + token * HEAD_DIM * 2;
      copy_bulk(pipeline.keys + target, static_cast<const uint8_t*>(p.key_cache) + offset, page * HEAD_DIM * 2,
                pipeline.full + stage);
      copy_bulk(pipeline.values + target, static_cast<const uint8_t*>(p.value_cache) + offset, page * HEAD_DIM * 2,
                pipeline.full + stage);
    }
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

// Rows begin at multiples of eight, so a row's number tells where its chunks are.
INLINE const Element* chunk_at(const Element* rows, int row, int chunk) {
  return rows + row * HEAD_DIM + place_of_chunk(chunk, row) * 8;
}

INLINE void multiply_keys(float (&scores)[WARP_TILE / 8][4], const Fragment (&query)[DIM_STEPS], const Element* keys) {
  int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++)
#pragma unroll
    for (int i = 0; i < WARP_TILE / 16; i++) {
      Fragment right;
      load_matrices<false>(right, chunk_at(keys, i * 16 + row, step * 2 + lane / 8 % 2));
      Numbers::mma(scores[2 * i], query[step], right[0], right[1]);
      Numbers::mma(scores[2 * i + 1], query[step], right[2], right[3]);
    }
}

INLINE void multiply_values(Accumulator& acc, const float (&weights)[WARP_TILE / 8][4], const Element* values) {
  int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < WARP_TILE / 16; i++) {
    const float(&first)[4] = weights[2 * i];
    const float(&second)[4] = weights[2 * i + 1];
    Fragment left = {Numbers::narrow(first[0], first[1]), Numbers::narrow(first[2], first[3]),
                     Numbers::narrow(second[0], second[1]), Numbers::narrow(second[2], second[3])};
#pragma unroll
    for (int step = 0; step < DIM_STEPS; step++) {
      Fragment right;
      load_matrices<true>(right, chunk_at(values, i * 16 + lane % 16, step * 2 + lane / 16));
      Numbers::mma(acc.out[2 * step], left, right[0], right[1]);
      Numbers::mma(acc.out[2 * step + 1], left, right[2], right[3]);
    }
  }
}

// Slots behind the last key may hold NaN, and 0 * NaN is NaN. (Scores of such keys are replaced, not multiplied.)
INLINE void clear_values(Element* values, int num_valid) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = threadIdx.x % 32; i < WARP_TILE * CHUNKS; i += 32) {
    if (i / CHUNKS >= num_valid) write_chunk(values + i * 8, Chunk{});
  }
  __syncwarp();
}

INLINE void consume(const AttentionParams& p, const WorkItem& item, const Pipeline& pipeline, Accumulator& acc) {
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32, stage = 0;
  RowLimits limits(p, item, 0);
  Fragment query[DIM_STEPS];
#pragma unroll
  for (int step = 0; step < DIM_STEPS; step++) {
    load_matrices<false>(query[step], pipeline.query + lane % 16 * QUERY_ROW + step * 16 + lane / 16 * 8);
  }
  uint32_t parity = 0;
  for (int tile_kv = item.kv_begin; tile_kv < item.kv_end; tile_kv += TILE) {
    mbarrier_wait(pipeline.full + stage, parity);
    int first_kv = tile_kv + warp * WARP_TILE, offset = stage * TILE_BYTES + warp * WARP_TILE * HEAD_DIM * 2;
    if (first_kv < item.kv_end) {
      Element* values = reinterpret_cast<Element*>(pipeline.values + offset);
      float scores[WARP_TILE / 8][4] = {};
      multiply_keys(scores, query, reinterpret_cast<const Element*>(pipeline.keys + offset));
      softmax_step(scores, acc, limits, first_kv, p.scale_log2);
      if (first_kv + WARP_TILE > item.kv_end) clear_values(values, item.kv_end - first_kv);
      multiply_values(acc, scores, values);
    }
    __syncwarp();
    if (lane == 0) mbarrier_arrive(pipeline.empty + stage);
    if (++stage == STAGES) stage = 0, parity ^= 1;
  }
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS + 32)
    attention_bulk(const __grid_constant__ AttentionParams p) {
  WorkItem item = read_item(p.items, blockIdx.x);
  if (item.num_rows == 0) return;
  int kv_head = blockIdx.y, warp = threadIdx.x / 32;
  Pipeline pipeline;
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < STAGES; stage++) {
      mbarrier_init(pipeline.full + stage, 1);
      mbarrier_init(pipeline.empty + stage, KV_WARPS);
    }
    mbarrier_init_fence();
  }
  copy_query(p, item, kv_head, pipeline.query);
  __syncthreads();

  Accumulator acc;
  if (warp < KV_WARPS) {
    consume(p, item, pipeline, acc);
  } else if (threadIdx.x % 32 == 0) {
    produce(p, item, kv_head, pipeline);
  }
  __syncthreads();
  WarpResults results;
  if (warp < KV_WARPS) {
    results.put_rows(acc, warp);
    results.put_sums(acc, warp);
  }
  __syncthreads();
  write_rows(p, item, results, kv_head);
}
