// What the attention kernels share: parameters, work items, the loader of K/V tiles, the online softmax, the end.
//
// A thread block takes one work item and one key/value head. The item's query rows are "packed": row r of the step
// is head r % group_size of the group that shares the key/value head, for token r / group_size. So the heads of a
// group are rows of one matrix product, and their keys are read once. The host plans the items of a step
// (pagedkv.ops.cuda_plan); one list holds decodes, chunks of prompts, parts of long contexts and shared prefixes.
//
// Compile-time constants, from the command line: PKV_HEAD_DIM, PKV_STORED_BYTES (of a cached element), and the shape of
// a block: PKV_ROW_WARPS warps along the rows (16 each) x PKV_KV_WARPS warps along the keys of a tile of PKV_TILE
// tokens; PKV_STAGES tiles are in flight.
#pragma once

#include "common.cuh"

struct AttentionParams {
  Element* out;              // [T, H, HEAD_DIM], tokens out_stride apart
  float* part_out;           // [part rows, KV heads, HEAD_DIM]: results over a part of a row's keys
  float* part_lse;           // [part rows, KV heads]: base-2 logarithm of the sum of their exponentials
  const Element* query;      // [T, H, HEAD_DIM], tokens query_stride apart
  const void* key_cache;     // [blocks, KV heads, block_size, HEAD_DIM], see cache_offset
  const void* value_cache;   // likewise
  const int* table_start;    // [S + 1]: where each sequence's table begins in block_ids
  const int* block_ids;      // the block tables, one after another
  const int* positions;      // [T]: a token sees keys 0..its position
  const int4* items;         // [grid.x, 2]: see WorkItem
  int64_t out_stride;        // in elements
  int64_t query_stride;      // in elements
  int64_t block_stride;      // in elements
  int64_t head_stride;       // in elements
  int64_t slot_stride;       // in elements
  float scale_log2;          // score = scale_log2 * q.k, in units of log(2); holds the scale of fp8 keys
  float out_scale;           // the scale of fp8 values, else 1
  int group_size;            // query heads per key/value head
  int block_size_log2;
};

constexpr int HEAD_DIM = PKV_HEAD_DIM;
constexpr int STORED_BYTES = PKV_STORED_BYTES;
constexpr int ROW_WARPS = PKV_ROW_WARPS;
constexpr int KV_WARPS = PKV_KV_WARPS;
constexpr int TILE = PKV_TILE;
constexpr int STAGES = PKV_STAGES;

constexpr int NUM_WARPS = ROW_WARPS * KV_WARPS;
constexpr int NUM_THREADS = 32 * NUM_WARPS;
constexpr int ROWS = 16 * ROW_WARPS;
constexpr int WARP_TILE = TILE / KV_WARPS;  // keys of a tile that one warp multiplies with
constexpr int DIM_STEPS = HEAD_DIM / 16;

// Rows of tiles in shared memory are an odd number of 16-byte chunks apart: eight rows that are read together then
// lie in different banks.
constexpr int STORED_CHUNKS = HEAD_DIM * STORED_BYTES / 16;
constexpr int STORED_ROW_BYTES = (STORED_CHUNKS | 1) * 16;
constexpr int STAGE_BYTES = TILE * STORED_ROW_BYTES;
constexpr int QUERY_ROW = HEAD_DIM + 8;  // in elements, an odd number of chunks as well
constexpr int RESULT_ROW = HEAD_DIM + 8;  // in floats
static_assert(WARP_TILE % 16 == 0 && HEAD_DIM % 16 == 0, "tiles are made of 16 x 16 fragments");

// Eight words; the planner writes them.
struct WorkItem {
  int sequence;      // whose block table holds the keys
  int first_row;     // packed rows first_row .. first_row + num_rows, at most ROWS of them
  int num_rows;      // 0 pads the list
  int kv_begin;      // keys kv_begin .. kv_end of that sequence
  int kv_end;
  int unmasked_end;  // keys before this are seen by every row of the item
  int part_row;      // first row in part_out and part_lse; -1: the rows see no other keys, and go to out
};

INLINE WorkItem read_item(const int4* items, int index) {
  int4 a = items[2 * index], b = items[2 * index + 1];
  return {a.x, a.y, a.z, a.w, b.x, b.y, b.z};
}

// Where a packed row lies in a tensor [T, H, HEAD_DIM].
INLINE int64_t row_offset(int row, int group_size, int kv_head, int64_t token_stride) {
  int token = row / group_size, head = kv_head * group_size + row % group_size;
  return token * token_stride + head * HEAD_DIM;
}

// Copies tiles of keys and values into a ring in shared memory: keys of all stages first, then values. A thread
// keeps its 16-byte column and walks over rows, so a row costs one look-up in the table and one multiplication.
struct TileLoader {
  static constexpr int ROWS_PER_PASS = NUM_THREADS / STORED_CHUNKS;

  const uint8_t *keys, *values;  // of this head
  const int* table;
  int64_t block_bytes;
  uint32_t slot_bytes, block_size_log2;
  int row, chunk, kv_end;

  __device__ __forceinline__ TileLoader(const AttentionParams& p, const WorkItem& item, int kv_head) {
    row = threadIdx.x / STORED_CHUNKS;
    chunk = threadIdx.x % STORED_CHUNKS;
    int64_t start = kv_head * p.head_stride * STORED_BYTES;
    keys = static_cast<const uint8_t*>(p.key_cache) + start;
    values = static_cast<const uint8_t*>(p.value_cache) + start;
    table = p.block_ids + p.table_start[item.sequence];
    block_bytes = p.block_stride * STORED_BYTES;
    slot_bytes = uint32_t(p.slot_stride) * STORED_BYTES;
    block_size_log2 = p.block_size_log2;
    kv_end = item.kv_end;
  }

  // Rows from kv_end on become zero: a slot that nobody has written may hold NaN, and 0 * NaN is NaN.
  __device__ __forceinline__ void load(int first_kv, uint8_t* key_stage) const {
    if (row >= ROWS_PER_PASS) return;
    uint8_t* key_row = key_stage + row * STORED_ROW_BYTES + chunk * 16;
    uint8_t* value_row = key_row + STAGES * STAGE_BYTES;
    uint32_t slot_mask = (1u << block_size_log2) - 1;
#pragma unroll
    for (int r = 0; r < TILE; r += ROWS_PER_PASS) {
      if (TILE % ROWS_PER_PASS != 0 && row + r >= TILE) break;
      int kv = first_kv + row + r;
      bool valid = kv < kv_end;
      if (!valid) kv = 0;
      int64_t offset = table[kv >> block_size_log2] * block_bytes + (kv & slot_mask) * slot_bytes;
      offset += place_of_chunk(chunk, kv) * 16;
      copy_async(key_row + r * STORED_ROW_BYTES, keys + offset, valid);
      copy_async(value_row + r * STORED_ROW_BYTES, values + offset, valid);
    }
  }
};

// One warp's 16 rows. A lane holds two of them, lane / 4 and lane / 4 + 8, in the layout of an mma's result: element
// j of a fragment belongs to row j / 2 of the two and to column 2 * (lane % 4) + j % 2.
struct Accumulator {
  float out[2 * DIM_STEPS][4];
  float max[2];
  float sum[2];  // over this lane's columns only, until the end

  __device__ __forceinline__ Accumulator() {
#pragma unroll
    for (int i = 0; i < 2 * DIM_STEPS; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) out[i][j] = 0.0f;
    max[0] = max[1] = MINUS_INFINITY;
    sum[0] = sum[1] = 0.0f;
  }
};

// What the item's rows see of its keys.
struct RowLimits {
  int last_kv[2];    // the last key for each of a lane's two rows; -1 for rows beyond the item
  int unmasked_end;  // keys before this are seen by every row

  __device__ __forceinline__ RowLimits(const AttentionParams& p, const WorkItem& item, int row_warp) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      int row = row_warp * 16 + threadIdx.x % 32 / 4 + r * 8;
      // A row may see keys beyond the item's; those belong to another item.
      int position = row < item.num_rows ? p.positions[(item.first_row + row) / p.group_size] : -1;
      last_kv[r] = min(position, item.kv_end - 1);
    }
    unmasked_end = min(item.unmasked_end, item.kv_end);
  }
};

// Turns scores into weights 2^(score - max), after bringing what was summed so far to the new maximum (Milakov and
// Gimelshein, "Online normalizer calculation for softmax", 2018). `first_kv` is the key of the first score.
template <int FRAGMENTS>
INLINE void softmax_step(float (&scores)[FRAGMENTS][4], Accumulator& acc, const RowLimits& limits, int first_kv,
                         float scale_log2) {
  int lane_kv = first_kv + threadIdx.x % 4 * 2;
  bool masked = first_kv + FRAGMENTS * 8 > limits.unmasked_end;
  float max[2] = {acc.max[0], acc.max[1]};
#pragma unroll
  for (int i = 0; i < FRAGMENTS; i++)
#pragma unroll
    for (int j = 0; j < 4; j++) {
      float score = scores[i][j] * scale_log2;
      if (masked && lane_kv + i * 8 + j % 2 > limits.last_kv[j / 2]) score = MINUS_INFINITY;
      scores[i][j] = score;
      max[j / 2] = fmaxf(max[j / 2], score);
    }
#pragma unroll
  for (int r = 0; r < 2; r++) {
    // Four neighbouring lanes share a row.
    max[r] = fmaxf(max[r], __shfl_xor_sync(ALL_LANES, max[r], 1));
    max[r] = fmaxf(max[r], __shfl_xor_sync(ALL_LANES, max[r], 2));
    // A row that has seen no key yet keeps the maximum -inf; its weights must be 0, not NaN.
    float origin = max[r] == MINUS_INFINITY ? 0.0f : max[r];
    float correction = exp2_fast(acc.max[r] - origin);
    acc.max[r] = max[r];
    acc.sum[r] *= correction;
#pragma unroll
    for (int i = 0; i < 2 * DIM_STEPS; i++) {
      acc.out[i][2 * r] *= correction;
      acc.out[i][2 * r + 1] *= correction;
    }
#pragma unroll
    for (int i = 0; i < FRAGMENTS; i++) {
      scores[i][2 * r] = exp2_fast(scores[i][2 * r] - origin);
      scores[i][2 * r + 1] = exp2_fast(scores[i][2 * r + 1] - origin);
      acc.sum[r] += scores[i][2 * r] + scores[i][2 * r + 1];
    }
  }
}

// The results of all warps in shared memory, over the ring, which is dead by then.
struct WarpResults {
  float* out;  // [NUM_WARPS, 16, RESULT_ROW]
  float* max;  // [NUM_WARPS, 16]
  float* sum;  // [NUM_WARPS, 16]

  __device__ __forceinline__ WarpResults() {
    out = reinterpret_cast<float*>(shared_memory);
    max = out + NUM_WARPS * 16 * RESULT_ROW;
    sum = max + NUM_WARPS * 16;
  }

  // A lane's part of its two rows, where fragment i of the accumulator has dimensions 8 * i and the next seven.
  __device__ __forceinline__ void put_rows(const Accumulator& acc, int warp) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 2 * DIM_STEPS; i++)
#pragma unroll
      for (int r = 0; r < 2; r++) {
        float* target = out + (warp * 16 + lane / 4 + r * 8) * RESULT_ROW + i * 8 + lane % 4 * 2;
        *reinterpret_cast<float2*>(target) = make_float2(acc.out[i][2 * r], acc.out[i][2 * r + 1]);
      }
  }

  // The maximum and sum of a lane's two rows.
  __device__ __forceinline__ void put_sums(const Accumulator& acc, int warp) const {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int r = 0; r < 2; r++) {
      float total = acc.sum[r] + __shfl_xor_sync(ALL_LANES, acc.sum[r], 1);
      total += __shfl_xor_sync(ALL_LANES, total, 2);
      int row = warp * 16 + lane / 4 + r * 8;
      if (lane % 4 == 0) {
        max[row] = acc.max[r];
        sum[row] = total;
      }
    }
  }
};

// Joins the warps that shared a row's keys, and writes the item's rows: eight dimensions of a row a turn.
INLINE void write_rows(const AttentionParams& p, const WorkItem& item, const WarpResults& results, int kv_head) {
  constexpr int CHUNKS = HEAD_DIM / 8;
  for (int i = threadIdx.x; i < item.num_rows * CHUNKS; i += blockDim.x) {
    int row = i / CHUNKS, dim = i % CHUNKS * 8;
    // Warp w has row_warp w % ROW_WARPS.
    int first = row / 16 * 16 + row % 16;
    float max = MINUS_INFINITY, sum = 0.0f, out[8] = {};
#pragma unroll
    for (int w = 0; w < KV_WARPS; w++) max = fmaxf(max, results.max[first + w * ROWS]);
    float origin = max == MINUS_INFINITY ? 0.0f : max;
#pragma unroll
    for (int w = 0; w < KV_WARPS; w++) {
      int result_row = first + w * ROWS;
      float weight = exp2_fast(results.max[result_row] - origin);
      sum += weight * results.sum[result_row];
      const float4* values = reinterpret_cast<const float4*>(results.out + result_row * RESULT_ROW + dim);
      float4 low = values[0], high = values[1];
      out[0] += weight * low.x, out[1] += weight * low.y, out[2] += weight * low.z, out[3] += weight * low.w;
      out[4] += weight * high.x, out[5] += weight * high.y, out[6] += weight * high.z, out[7] += weight * high.w;
    }
    float factor = sum > 0.0f ? p.out_scale / sum : 0.0f;
#pragma unroll
    for (int d = 0; d < 8; d++) out[d] *= factor;
    if (item.part_row < 0) {
      Chunk chunk;
#pragma unroll
      for (int d = 0; d < 4; d++) chunk.pairs[d] = Numbers::narrow(out[2 * d], out[2 * d + 1]);
      write_chunk(p.out + row_offset(item.first_row + row, p.group_size, kv_head, p.out_stride) + dim, chunk);
    } else {
      int64_t part = int64_t(item.part_row + row) * gridDim.y + kv_head;
      float4* target = reinterpret_cast<float4*>(p.part_out + part * HEAD_DIM + dim);
      target[0] = make_float4(out[0], out[1], out[2], out[3]);
      target[1] = make_float4(out[4], out[5], out[6], out[7]);
      if (dim == 0) p.part_lse[part] = sum > 0.0f ? max + log2_fast(sum) : MINUS_INFINITY;
    }
  }
}
