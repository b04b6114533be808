// Draws one token a row without sorting: temperature, top-k, top-p, min-p, and the largest score + Gumbel noise.
//
// grid (rows), block 1024. What is drawn is defined by pagedkv.ops.Ops.sample, the noise by pagedkv.ops.philox, and
// logarithm and exponential by pagedkv.ops.exact: words, noise and masses are equal to the CPU's bit for bit.
//
// Tokens are ranked by a 64-bit key, score above, lower id first among equal scores, so no two are equal. A filter
// keeps the tokens from some key on. That key is found by a weighted radix selection: a histogram of the weights (1
// for top-k, the mass for top-p) tells the digit, then the next digit is looked for among the tokens that
// share it. Masses are integers, so their sums do not depend on the order.
#include "common.cuh"
#include "noise.cuh"

struct SampleParams {
  int64_t* tokens;       // [rows]; NOT_A_NUMBER or INFINITE for a row that cannot be sampled
  const float* logits;   // [rows, vocab_size], rows logits_stride apart
  const int* rows;       // [rows, NUM_WORDS]: see read_row
  int64_t logits_stride;  // in elements
  int vocab_size;
};

struct SamplingRow {
  float temperature;  // 0: the largest logit
  float top_p;        // 1 keeps all
  float min_p;        // 0 keeps all
  int top_k;          // 0 or less keeps all
  uint32_t seed_low, seed_high;
  uint32_t sample_index, position;
};

// In place of a token, as rust/cpu/sample.rs has them.
constexpr int64_t NOT_A_NUMBER = -1;  // The row holds NaN.
constexpr int64_t INFINITE = -2;      // The largest logit is infinite, and there is a choice.

constexpr int NUM_WORDS = 9;
constexpr int NUM_BINS = 256;
constexpr int NUM_THREADS = 1024;

struct Scratch {
  uint64_t histogram[NUM_BINS];
  uint64_t per_warp[NUM_THREADS / 32];
  uint64_t result[2];
};

// The words of a row are those of the arena, see pagedkv.batch.SamplingRows. The last one, num_logprobs, is not read.
INLINE SamplingRow read_row(const int* rows, int index) {
  const int* words = rows + index * NUM_WORDS;
  return {__int_as_float(words[0]), __int_as_float(words[1]), __int_as_float(words[2]), words[3],
          uint32_t(words[4]),       uint32_t(words[5]),       uint32_t(words[6]),       uint32_t(words[7])};
}

// ---- keys

// Larger for larger values, and among equal values for lower ids.
INLINE uint64_t rank_key(float value, int token) {
  uint32_t bits = __float_as_uint(value + 0.0f);  // The sum makes -0 and 0 one value.
  bits ^= bits >> 31 ? 0xffffffffu : 0x80000000u;
  return uint64_t(bits) << 32 | uint32_t(~token);
}

INLINE int token_of(uint64_t key) { return ~uint32_t(key); }

// ---- sums and maxima over the block; the result is in every thread

template <bool MAXIMUM>
INLINE uint64_t reduce(uint64_t value, Scratch* scratch) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    uint64_t other = __shfl_xor_sync(ALL_LANES, value, distance);
    value = MAXIMUM ? (value > other ? value : other) : value + other;
  }
  __syncthreads();  // Nobody still reads what an earlier call left here.
  if (threadIdx.x % 32 == 0) scratch->per_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
  for (int w = 0; w < NUM_THREADS / 32; w++) {
    uint64_t other = scratch->per_warp[w];
    value = MAXIMUM ? (value > other ? value : other) : value + other;
  }
  return value;
}

// ---- a row's scores

struct Scores {
  const float* logits;
  int vocab_size;
  float largest, temperature;

  // Relative to the best, so that any temperature > 0 stays finite.
  __device__ __forceinline__ float at(int token) const { return (logits[token] - largest) / temperature + 0.0f; }
};

// The first digit: bins of 1/8 that spread usual scores, so that few threads add to the same bin at once.
INLINE int bin_of(float score) {
  float bin = -8.0f * score;
  return bin < NUM_BINS - 1 ? NUM_BINS - 1 - int(bin) : 0;
}

template <bool BY_MASS>
INLINE uint64_t weight_of(float score) {
  return BY_MASS ? mass_of(score) : 1;
}

// In the histogram, the highest bin at which the sum from the top reaches `target`; result[1] is what bins above hold.
// The first warp looks: lane 0 has the eight highest bins.
INLINE void find_bin(Scratch* scratch, uint64_t target) {
  if (threadIdx.x >= 32) return;
  int top = NUM_BINS - 1 - 8 * threadIdx.x;
  uint64_t own = 0;
  for (int i = 0; i < 8; i++) own += scratch->histogram[top - i];
  uint64_t through = own;
  for (int distance = 1; distance < 32; distance *= 2) {
    uint64_t other = __shfl_up_sync(ALL_LANES, through, distance);
    if (threadIdx.x >= distance) through += other;
  }
  uint64_t before = through - own;
  if (before >= target || through < target) return;
  int bin = top;
  for (; before + scratch->histogram[bin] < target; bin--) before += scratch->histogram[bin];
  scratch->result[0] = bin;
  scratch->result[1] = before;
}

// The key from which on the tokens that have at least `floor` weigh `target` or just more.
template <bool BY_MASS>
INLINE uint64_t select_key(const Scores& scores, uint64_t floor, uint64_t target, Scratch* scratch) {
  // Digits after the first are bytes of the key: four of the score, then the three of the id that differ.
  int first_bin = 0;
  uint64_t prefix = 0, prefix_mask = 0;
#pragma unroll 1
  for (int level = 0; level < 8; level++) {
    int shift = level == 0 ? 0 : level <= 4 ? 64 - 8 * level : 56 - 8 * level;
    __syncthreads();
    for (int i = threadIdx.x; i < NUM_BINS; i += NUM_THREADS) scratch->histogram[i] = 0;
    __syncthreads();
    for (int token = threadIdx.x; token < scores.vocab_size; token += NUM_THREADS) {
      float score = scores.at(token);
      uint64_t key = rank_key(score, token);
      if (key < floor || (level > 0 && bin_of(score) != first_bin) || (key & prefix_mask) != prefix) continue;
      int bin = level == 0 ? bin_of(score) : int(key >> shift & 255);
      atomicAdd(&scratch->histogram[bin], weight_of<BY_MASS>(score));
    }
    __syncthreads();
    find_bin(scratch, target);
    __syncthreads();
    int bin = int(scratch->result[0]);
    target -= scratch->result[1];
    if (level == 0) {
      first_bin = bin;
    } else {
      prefix |= uint64_t(bin) << shift;
      prefix_mask |= uint64_t(255) << shift;
    }
  }
  // The 8 bits of the id between the digits are all ones: it is stored inverted, and no vocabulary has 2^24 tokens.
  return prefix | uint64_t(255) << 24;
}

// ---- the draw

// The kept token with the largest score + noise, as a key.
INLINE uint64_t draw(const Scores& scores, const SamplingRow& row, uint64_t floor) {
  // The largest mass is the unit. A comparison with the next integer is one with the product.
  uint32_t least_mass = row.min_p > 0.0f ? uint32_t(fmin(ceil(double(row.min_p) * UNIT_MASS), double(UNIT_MASS))) : 0;
  uint64_t best = 0;
  float best_value = MINUS_INFINITY;
  for (int group = threadIdx.x; group * 4 < scores.vocab_size; group += NUM_THREADS) {
    uint4 words = philox(make_uint4(group, row.position, row.sample_index, 0), make_uint2(row.seed_low, row.seed_high));
    uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      int token = group * 4 + i;
      if (token >= scores.vocab_size) break;
      float score = scores.at(token);
      // The noise costs two logarithms; most tokens cannot win whatever it is.
      if (score + gumbel_bound(word[i]) < best_value) continue;
      if (rank_key(score, token) < floor) continue;
      if (mass_of(score) < least_mass) continue;
      float value = score + gumbel(word[i]);
      uint64_t key = rank_key(value, token);
      if (key > best) {
        best = key;
        best_value = value;
      }
    }
  }
  return best;
}

extern "C" __global__ void __launch_bounds__(NUM_THREADS) sample(const __grid_constant__ SampleParams p) {
  Scratch* scratch = reinterpret_cast<Scratch*>(shared_memory);
  const float* logits = p.logits + blockIdx.x * p.logits_stride;
  SamplingRow row = read_row(p.rows, blockIdx.x);
  uint64_t best_key = 0, num_nan = 0;
  for (int token = threadIdx.x; token < p.vocab_size; token += NUM_THREADS) {
    float logit = logits[token];
    num_nan += logit != logit;
    uint64_t key = rank_key(logit, token);
    best_key = key > best_key ? key : best_key;
  }
  num_nan = reduce<false>(num_nan, scratch);
  best_key = reduce<true>(best_key, scratch);
  Scores scores = {logits, p.vocab_size, logits[num_nan ? 0 : token_of(best_key)], row.temperature};
  // Infinite logits have no differences.
  bool drawable = fabsf(scores.largest) < __int_as_float(0x7f800000);
  if (num_nan == 0 && row.temperature > 0.0f && drawable) {
    uint64_t floor = 0;
    if (row.top_k > 0 && row.top_k < p.vocab_size) floor = select_key<false>(scores, 0, row.top_k, scratch);
    if (row.top_p < 1.0f) {
      uint64_t mass = 0;
      for (int token = threadIdx.x; token < p.vocab_size; token += NUM_THREADS) {
        float score = scores.at(token);
        if (rank_key(score, token) >= floor) mass += mass_of(score);
      }
      mass = reduce<false>(mass, scratch);
      uint64_t target = uint64_t(ceil(double(row.top_p) * double(mass)));
      floor = select_key<true>(scores, floor, target > 0 ? target : 1, scratch);
    }
    best_key = reduce<true>(draw(scores, row, floor), scratch);
  }
  if (threadIdx.x == 0) {
    int64_t token = row.temperature > 0.0f && !drawable ? INFINITE : token_of(best_key);
    p.tokens[blockIdx.x] = num_nan > 0 ? NOT_A_NUMBER : token;
  }
}
