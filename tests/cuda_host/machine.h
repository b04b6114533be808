// A machine that executes translated kernels on the CPU: what ptx_to_cpp.py's output calls.
//
// One thread block runs at a time; each of its threads is a fiber. Barriers and the operations of a whole warp are
// meeting points: the last lane to arrive computes for all. The machine reports what a GPU would leave undefined: a
// deadlock, lanes of a warp that meet in different operations, misaligned accesses, accesses beyond the shared memory.
// Shared memory starts as NaN, and so does what an asynchronous copy has not delivered yet. A seed other than 0
// shuffles the order of warps and lanes and when copies arrive.
//
// Not modelled: the order of memory accesses between blocks, the rounding of approximate instructions, time.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace machine {

// Matches FIELDS in host_device.py.
struct Counters {
  uint64_t mma, ldmatrix, bank_conflicts, async_bytes, load_bytes, store_bytes, shuffles, barriers;
};

struct Index {
  uint32_t x, y, z;
};

struct Place {  // of the running thread
  Index thread, block, block_size, grid_size;
  uint32_t lane;
};
extern thread_local Place place;
extern thread_local Counters* counters;
extern thread_local uint8_t* shared_base;
extern thread_local uint32_t shared_size;

[[noreturn]] void fail(const char* format, ...);

// ---- memory

inline uint8_t* shared(uint64_t address, uint32_t num_bytes) {
  uint32_t offset = uint32_t(address);
  if (offset % num_bytes) fail("misaligned access of %u bytes to shared memory at %u", num_bytes, offset);
  if (uint64_t(offset) + num_bytes > shared_size)
    fail("access of %u bytes to shared memory at %u, which has %u", num_bytes, offset, shared_size);
  return shared_base + offset;
}
inline uint8_t* global(uint64_t address, uint32_t num_bytes) {
  if (address % num_bytes) fail("misaligned access of %u bytes to global memory", num_bytes);
  return reinterpret_cast<uint8_t*>(address);
}
inline uint8_t* global_load(uint64_t address, uint32_t num_bytes) {
  counters->load_bytes += num_bytes;
  return global(address, num_bytes);
}
inline uint8_t* global_store(uint64_t address, uint32_t num_bytes) {
  counters->store_bytes += num_bytes;
  return global(address, num_bytes);
}

// ---- meeting points

void barrier();
void warp_barrier(uint32_t mask);
// Mode: 'u'p, 'd'own, 'b'utterfly or 'i'ndex; clamp as in the PTX manual's shfl.sync.
uint32_t shuffle(char mode, uint32_t value, uint32_t operand, uint32_t clamp, uint32_t mask, bool* valid);
enum class Vote { ballot, any, all };
uint32_t vote(Vote kind, bool predicate, uint32_t mask);
// d = a * b + c, m16n8k16, float32 accumulators.
void mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, bool is_bf16);
void ldmatrix(uint32_t* result, int num_matrices, bool transposed, uint64_t address);

// ---- copies into shared memory

void copy_async(uint64_t destination, uint64_t source, uint32_t num_bytes, uint32_t num_valid);
void copy_async_commit();
void copy_async_wait(uint32_t num_pending);
void mbarrier_init(uint64_t address, uint32_t count);
void mbarrier_arrive(uint64_t address, uint32_t expected_bytes);
void mbarrier_wait(uint64_t address, uint32_t parity);
void copy_bulk(uint64_t destination, uint64_t source, uint32_t num_bytes, uint64_t mbarrier);

// ---- bits of registers

inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}
inline uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}
inline double as_double(uint64_t bits) {
  double value;
  memcpy(&value, &bits, 8);
  return value;
}
inline uint64_t bits_of(double value) {
  uint64_t bits;
  memcpy(&bits, &value, 8);
  return bits;
}

inline uint16_t to_bf16(float value) {
  uint32_t bits = bits_of(value);
  if (std::isnan(value)) return 0x7fff;
  return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline float from_bf16(uint16_t bits) { return as_float(uint32_t(bits) << 16); }
inline uint16_t to_half(float value) {
  _Float16 narrow = _Float16(value);
  uint16_t bits;
  memcpy(&bits, &narrow, 2);
  return bits;
}
inline float from_half(uint16_t bits) {
  _Float16 narrow;
  memcpy(&narrow, &bits, 2);
  return float(narrow);
}
uint8_t to_e4m3(float value);
float from_e4m3(uint8_t bits);

// ---- integer instructions, by the PTX manual's definitions

inline uint32_t prmt(uint32_t a, uint32_t b, uint32_t selector) {
  uint64_t bytes = a | uint64_t(b) << 32;
  uint32_t result = 0;
  for (int i = 0; i < 4; i++) {
    uint32_t nibble = selector >> 4 * i & 15, byte = bytes >> 8 * (nibble & 7) & 255;
    if (nibble & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
inline uint32_t lop3(uint32_t a, uint32_t b, uint32_t c, uint32_t table) {
  uint32_t result = 0;
  for (int i = 0; i < 8; i++)
    if (table >> i & 1) result |= (i & 4 ? a : ~a) & (i & 2 ? b : ~b) & (i & 1 ? c : ~c);
  return result;
}
inline uint32_t funnel_shift(uint32_t low, uint32_t high, uint32_t amount, bool left, bool wrap) {
  amount = wrap ? amount & 31 : amount > 32 ? 32 : amount;
  uint64_t both = low | uint64_t(high) << 32;
  return left ? uint32_t(both << amount >> 32) : uint32_t(both >> amount);
}
template <class T>
inline T bit_field_extract(T value, uint32_t position, uint32_t length) {
  constexpr uint32_t WIDTH = sizeof(T) * 8;
  position &= 255, length &= 255;
  if (length == 0) return 0;
  uint32_t top = position + length - 1 < WIDTH ? position + length - 1 : WIDTH - 1;
  bool sign = std::is_signed<T>::value && (value >> top & 1);
  using U = typename std::make_unsigned<T>::type;
  U result = position < WIDTH ? U(value) >> position : 0;
  if (top < position) return T(sign ? ~U(0) : 0);
  uint32_t kept = top - position + 1;
  if (kept < WIDTH) result = (result & ((U(1) << kept) - 1)) | (sign ? ~U(0) << kept : 0);
  return T(result);
}
template <class U>
inline U bit_field_insert(U field, U base, uint32_t position, uint32_t length) {
  constexpr uint32_t WIDTH = sizeof(U) * 8;
  position &= 255, length &= 255;
  if (position >= WIDTH || length == 0) return base;
  U mask = (length >= WIDTH ? ~U(0) : (U(1) << length) - 1) << position;
  return (field << position & mask) | (base & ~mask);
}
template <class T, class F>
inline T atomic(uint8_t* pointer, F update) {  // Blocks and fibers run one at a time.
  T old, changed;
  memcpy(&old, pointer, sizeof old);
  changed = update(old);
  memcpy(pointer, &changed, sizeof changed);
  return old;
}

}  // namespace machine
