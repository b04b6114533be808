// Joins the results of rows whose keys were divided among several work items.
//
// grid (merged rows, key/value heads), block up to head_dim threads. Part i of a row has the softmax-weighted mean
// out_i over its keys and the logarithm lse_i of their sum of exponentials, so
//
//   out = sum over i of 2^(lse_i - max) * out_i / sum over i of 2^(lse_i - max)
//
// A kernel of its own, because blocks of a grid need not run at the same time: none waits for another.
#include "common.cuh"

struct MergeParams {
  Element* out;            // [T, H, head_dim], tokens out_stride apart
  const float* part_out;   // [part rows, KV heads, head_dim]
  const float* part_lse;   // [part rows, KV heads], base 2
  const int* rows;         // [grid.x]: packed rows, see attention.cuh; -1 pads
  const int* part_start;   // [grid.x + 1]: where each row's parts begin in part_rows
  const int* part_rows;    // part rows, row after row
  int64_t out_stride;      // in elements
  int group_size;
  int head_dim;
};

extern "C" __global__ void merge_parts(const __grid_constant__ MergeParams p) {
  int row = p.rows[blockIdx.x], kv_head = blockIdx.y;
  if (row < 0) return;
  int begin = p.part_start[blockIdx.x], end = p.part_start[blockIdx.x + 1];
  float max = MINUS_INFINITY, sum = 0.0f;
  for (int i = begin; i < end; i++) max = fmaxf(max, p.part_lse[int64_t(p.part_rows[i]) * gridDim.y + kv_head]);
  for (int i = begin; i < end; i++) sum += exp2_fast(p.part_lse[int64_t(p.part_rows[i]) * gridDim.y + kv_head] - max);

  int token = row / p.group_size, head = kv_head * p.group_size + row % p.group_size;
  Element* target = p.out + token * p.out_stride + head * p.head_dim;
  for (int dim = 2 * threadIdx.x; dim < p.head_dim; dim += 2 * blockDim.x) {
    float2 out = make_float2(0.0f, 0.0f);
    for (int i = begin; i < end; i++) {
      int64_t part = int64_t(p.part_rows[i]) * gridDim.y + kv_head;
      float weight = exp2_fast(p.part_lse[part] - max) / sum;
      float2 value = *reinterpret_cast<const float2*>(p.part_out + part * p.head_dim + dim);
      out.x += weight * value.x;
      out.y += weight * value.y;
    }
    *reinterpret_cast<uint32_t*>(target + dim) = Numbers::narrow(out.x, out.y);
  }
}
