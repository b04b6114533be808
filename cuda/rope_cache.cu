// Rotates queries and keys by their positions and writes keys and values into the paged cache, in one pass.
//
// grid (tokens), block 128: a warp takes a head after another, those of q, then k, then v. Element i of a head is
// paired with i + head_dim / 2; for an angle a the pair (x, y) becomes (x cos a - y sin a, y cos a + x sin a). All in
// float32, rounded once.
//
// PKV_STORED_BYTES is 2, or 1 for a cache of e4m3 (fp8) elements, which are divided by their scale.
#include "fp8.cuh"

struct RopeCacheParams {
  Element* query_out;       // [T, H, head_dim], without gaps
  const Element* query;     // [T, H, head_dim], tokens query_stride apart
  const Element* key;       // [T, KV heads, head_dim], tokens key_stride apart
  const Element* value;     // likewise, value_stride apart
  const float* cos;         // [positions, head_dim]; both halves of a row are equal
  const float* sin;         // likewise
  const int* positions;     // [T]
  const int* slots;         // [T]: block * block_size + offset; -1 writes nothing
  void* key_cache;          // see cache_offset
  void* value_cache;        // likewise
  int64_t query_stride;     // in elements
  int64_t key_stride;       // in elements
  int64_t value_stride;     // in elements
  int64_t block_stride;     // in elements
  int64_t head_stride;      // in elements
  int64_t slot_stride;      // in elements
  float key_factor;         // 1 / the scale of fp8 keys
  float value_factor;       // 1 / the scale of fp8 values
  int num_heads;
  int num_kv_heads;
  int head_dim;
  int block_size_log2;
};

INLINE int place_of_dim(int dim, int slot) {
  constexpr int CHUNK = 16 / PKV_STORED_BYTES;
  return place_of_chunk(dim / CHUNK, slot) * CHUNK + dim % CHUNK;
}

INLINE void store_pair(void* cache, int64_t offset, float2 pair, float factor) {
#if PKV_STORED_BYTES == 1
  *reinterpret_cast<uint16_t*>(static_cast<uint8_t*>(cache) + offset) = to_e4m3(pair.x * factor, pair.y * factor);
#else
  *reinterpret_cast<uint32_t*>(static_cast<Element*>(cache) + offset) = Numbers::narrow(pair.x, pair.y);
#endif
}

INLINE float2 read_pair(const Element* pointer) {
  return Numbers::widen(*reinterpret_cast<const uint32_t*>(pointer));
}

// A pair of neighbours of the first half and its partners in the second.
INLINE void rotate(float2& x, float2& y, float2 cos, float2 sin) {
  float2 x_old = x;
  x = make_float2(x.x * cos.x - y.x * sin.x, x.y * cos.y - y.y * sin.y);
  y = make_float2(y.x * cos.x + x_old.x * sin.x, y.y * cos.y + x_old.y * sin.y);
}

extern "C" __global__ void __launch_bounds__(128) rope_cache(const __grid_constant__ RopeCacheParams p) {
  int64_t token = blockIdx.x;
  int half_dim = p.head_dim / 2, slot = p.slots[token];
  const float* cos = p.cos + int64_t(p.positions[token]) * p.head_dim;
  const float* sin = p.sin + int64_t(p.positions[token]) * p.head_dim;
  int num_rows = p.num_heads + 2 * p.num_kv_heads;
  for (int row = threadIdx.x / 32; row < num_rows; row += blockDim.x / 32) {
    bool is_query = row < p.num_heads, is_value = row >= p.num_heads + p.num_kv_heads;
    if (!is_query && slot < 0) continue;
    int head = is_query ? row : is_value ? row - p.num_heads - p.num_kv_heads : row - p.num_heads;
    const Element* source = is_query   ? p.query + token * p.query_stride
                            : is_value ? p.value + token * p.value_stride
                                       : p.key + token * p.key_stride;
    source += head * p.head_dim;
    int slot_in_block = slot & ((1 << p.block_size_log2) - 1);
    int64_t cached = cache_offset(p, slot >> p.block_size_log2, slot_in_block, head);
    for (int dim = threadIdx.x % 32 * 2; dim < half_dim; dim += 64) {
      float2 x = read_pair(source + dim), y = read_pair(source + half_dim + dim);
      if (!is_value) {
        rotate(x, y, *reinterpret_cast<const float2*>(cos + dim), *reinterpret_cast<const float2*>(sin + dim));
      }
      if (is_query) {
        Element* target = p.query_out + (token * p.num_heads + head) * p.head_dim + dim;
        *reinterpret_cast<uint32_t*>(target) = Numbers::narrow(x.x, x.y);
        *reinterpret_cast<uint32_t*>(target + half_dim) = Numbers::narrow(y.x, y.y);
      } else {
        void* cache = is_value ? p.value_cache : p.key_cache;
        float factor = is_value ? p.value_factor : p.key_factor;
        store_pair(cache, cached + place_of_dim(dim, slot), x, factor);
        store_pair(cache, cached + place_of_dim(half_dim + dim, slot), y, factor);
      }
    }
  }
}
