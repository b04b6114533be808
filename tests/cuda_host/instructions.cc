// See machine.h: what the lanes of a warp do together, copies into shared memory, and conversions.
#include <cstring>
#include <vector>

#include "fibers.h"

namespace machine {

constexpr uint32_t ALL_LANES = 0xffffffffu;

void warp_barrier(uint32_t mask) {
  meet(mask, 0, nullptr, [](Meeting&, int) {});
}

uint32_t shuffle(char mode, uint32_t value, uint32_t operand, uint32_t clamp, uint32_t mask, bool* valid) {
  struct In {
    uint32_t value, source;
  };
  int lane = int(place.lane), segment = int(clamp >> 8 & 31), bound = int(clamp & 31);
  int first = lane & segment, last = first | (bound & ~segment), source;
  operand &= 31;
  switch (mode) {
    case 'u': source = lane - int(operand); *valid = source >= last; break;
    case 'd': source = lane + int(operand); *valid = source <= last; break;
    case 'b': source = lane ^ int(operand); *valid = source <= last; break;
    default: source = first | (int(operand) & ~segment); *valid = source <= last;
  }
  counters->shuffles++;
  uint32_t result;
  meet(mask, In{value, uint32_t(*valid ? source : lane)}, &result, [](Meeting& m, int) {
    for (int l = 0; l < 32; l++) {
      if (!(m.arrived >> l & 1)) continue;
      uint32_t from = m.in<In>(l).source;
      if (!(m.arrived >> from & 1)) fail("a shuffle reads lane %u, which takes no part", from);
      m.out<uint32_t>(l) = m.in<In>(int(from)).value;
    }
  });
  return result;
}

uint32_t vote(Vote kind, bool predicate, uint32_t mask) {
  uint32_t result;
  meet(
      mask, predicate, &result,
      [](Meeting& m, int which) {
        uint32_t ballot = 0;
        for (int l = 0; l < 32; l++)
          if (m.arrived >> l & 1 && m.in<bool>(l)) ballot |= 1u << l;
        uint32_t value = which == int(Vote::ballot) ? ballot
                         : which == int(Vote::any)  ? ballot != 0
                                                    : ballot == m.arrived;
        for (int l = 0; l < 32; l++)
          if (m.arrived >> l & 1) m.out<uint32_t>(l) = value;
      },
      int(kind));
  return result;
}

namespace {

struct MmaIn {
  uint32_t a[4], b[2];
  float c[4];
};

float element(uint32_t pair, int index, bool is_bf16) {
  uint16_t bits = uint16_t(index ? pair >> 16 : pair);
  return is_bf16 ? from_bf16(bits) : from_half(bits);
}

// Fragments by the PTX manual's figures for mma.m16n8k16.
void complete_mma(Meeting& m, int is_bf16) {
  if (m.arrived != ALL_LANES) fail("mma needs all 32 lanes");
  float a[16][16], b[8][16];
  for (int l = 0; l < 32; l++) {
    const MmaIn& in = m.in<MmaIn>(l);
    int group = l / 4, pair = l % 4 * 2;
    for (int h = 0; h < 2; h++) {
      for (int r = 0; r < 4; r++) a[group + r % 2 * 8][pair + h + r / 2 * 8] = element(in.a[r], h, is_bf16);
      for (int r = 0; r < 2; r++) b[group][pair + h + r * 8] = element(in.b[r], h, is_bf16);
    }
  }
  for (int l = 0; l < 32; l++) {
    float* d = &m.out<float>(l);
    for (int i = 0; i < 4; i++) {
      const float *row = a[l / 4 + i / 2 * 8], *column = b[l % 4 * 2 + i % 2];
      float sum = 0;
      for (int k = 0; k < 16; k++) sum += row[k] * column[k];
      d[i] = m.in<MmaIn>(l).c[i] + sum;
    }
  }
}

// The parameter is the number of matrices, plus 16 for transposed ones.
void complete_ldmatrix(Meeting& m, int parameter) {
  if (m.arrived != ALL_LANES) fail("ldmatrix needs all 32 lanes");
  int num_matrices = parameter & 15;
  bool transposed = parameter & 16;
  for (int matrix = 0; matrix < num_matrices; matrix++) {
    const uint8_t* rows[8];
    uint32_t banks = 0;
    for (int r = 0; r < 8; r++) {
      uint64_t address = m.in<uint64_t>(matrix * 8 + r);
      rows[r] = shared(address, 16);
      // Eight rows of 16 bytes are read at once if they lie in different groups of four banks.
      uint32_t bank = 1u << (uint32_t(address) / 16 % 8);
      counters->bank_conflicts += (banks & bank) != 0;
      banks |= bank;
    }
    for (int l = 0; l < 32; l++) {
      uint16_t pair[2];
      for (int h = 0; h < 2; h++) {
        int row = transposed ? l % 4 * 2 + h : l / 4, column = transposed ? l / 4 : l % 4 * 2 + h;
        memcpy(&pair[h], rows[row] + 2 * column, 2);
      }
      (&m.out<uint32_t>(l))[matrix] = pair[0] | uint32_t(pair[1]) << 16;
    }
  }
}

}  // namespace

void mma(float* d, const uint32_t* a, const uint32_t* b, const float* c, bool is_bf16) {
  MmaIn in;
  memcpy(in.a, a, sizeof in.a);
  memcpy(in.b, b, sizeof in.b);
  memcpy(in.c, c, sizeof in.c);
  counters->mma += place.lane == 0;
  meet(ALL_LANES, in, d, complete_mma, is_bf16);
}

void ldmatrix(uint32_t* result, int num_matrices, bool transposed, uint64_t address) {
  counters->ldmatrix += place.lane == 0;
  meet(ALL_LANES, address, result, complete_ldmatrix, num_matrices + (transposed ? 16 : 0));
}

void copy_async(uint64_t destination, uint64_t source, uint32_t num_bytes, uint32_t num_valid) {
  uint8_t* target = shared(destination, num_bytes);
  memset(target, 0xff, num_bytes);
  const uint8_t* from = num_valid ? global(source, num_bytes) : nullptr;
  fiber->copies.push_back({target, from, num_bytes, num_valid, fiber->group});
  counters->async_bytes += num_valid;
}

void copy_async_commit() { fiber->group++; }

void copy_async_wait(uint32_t num_pending) {
  std::vector<PendingCopy> waiting;
  for (PendingCopy& copy : fiber->copies) {
    if (copy.group + num_pending >= fiber->group) {
      waiting.push_back(copy);
      continue;
    }
    memset(copy.destination, 0, copy.num_bytes);
    if (copy.num_valid) memcpy(copy.destination, copy.source, copy.num_valid);
  }
  fiber->copies.swap(waiting);
}

namespace {

Mbarrier& mbarrier_at(uint64_t address) { return *reinterpret_cast<Mbarrier*>(shared(address, 8)); }

void flip_if_complete(Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.missing_bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
}

}  // namespace

void mbarrier_init(uint64_t address, uint32_t count) {
  mbarrier_at(address) = Mbarrier{uint16_t(count), uint16_t(count), 0, 0};
}

void mbarrier_arrive(uint64_t address, uint32_t expected_bytes) {
  Mbarrier& barrier = mbarrier_at(address);
  if (barrier.pending == 0) fail("more arrivals at an mbarrier than its count");
  barrier.missing_bytes += int32_t(expected_bytes);
  barrier.pending--;
  flip_if_complete(barrier);
}

void mbarrier_wait(uint64_t address, uint32_t parity) {
  Mbarrier* barrier = &mbarrier_at(address);
  wait_until([barrier, parity] { return barrier->phase != (parity & 1); });
}

void copy_bulk(uint64_t destination, uint64_t source, uint32_t num_bytes, uint64_t mbarrier) {
  if (num_bytes == 0 || num_bytes % 16) fail("a bulk copy of %u bytes, which is no multiple of 16", num_bytes);
  uint8_t* target = shared(destination, 16);
  shared(destination + num_bytes - 16, 16);
  memset(target, 0xff, num_bytes);
  mbarrier_at(mbarrier);
  block->bulk_copies.push_back({target, global(source, 16), num_bytes, mbarrier});
  counters->async_bytes += num_bytes;
}

// Bulk copies arrive when nothing else can go on, or, with a seed, at any time.
bool deliver_bulk_copies(bool all) {
  std::vector<BulkCopy> waiting;
  bool any = false;
  for (BulkCopy& copy : block->bulk_copies) {
    if (!all && !(block->random && block->draw(3) == 0)) {
      waiting.push_back(copy);
      continue;
    }
    memcpy(copy.destination, copy.source, copy.num_bytes);
    Mbarrier& barrier = mbarrier_at(copy.mbarrier);
    barrier.missing_bytes -= copy.num_bytes;
    flip_if_complete(barrier);
    any = true;
  }
  block->bulk_copies.swap(waiting);
  return any;
}

float from_e4m3(uint8_t bits) {
  int exponent = bits >> 3 & 15, mantissa = bits & 7;
  float size = exponent ? std::ldexp(1.0f + float(mantissa) / 8, exponent - 7) : std::ldexp(float(mantissa), -9);
  if ((bits & 0x7f) == 0x7f) size = NAN;
  return bits & 0x80 ? -size : size;
}

// The nearest of the 127 sizes, the one with an even mantissa if two are as near; saturating.
uint8_t to_e4m3(float value) {
  if (std::isnan(value)) return 0x7f;
  float size = std::fabs(value);
  uint8_t best = 0;
  for (uint8_t bits = 1; bits < 0x7f; bits++) {
    float distance = std::fabs(from_e4m3(bits) - size), least = std::fabs(from_e4m3(best) - size);
    if (distance < least || (distance == least && bits % 2 == 0)) best = bits;
  }
  return best | (std::signbit(value) ? 0x80 : 0);
}

}  // namespace machine
