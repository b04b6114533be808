// See machine.h. Built once; the translated kernels are linked with it.
#include "machine.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <utility>
#include <vector>
#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

namespace machine {

thread_local Place place;
thread_local Counters* counters;
thread_local uint8_t* shared_base;
thread_local uint32_t shared_size;

namespace {

constexpr size_t STACK_BYTES = 128 << 10;
constexpr uint32_t ALL_LANES = 0xffffffffu;

struct PendingCopy {
  uint8_t* destination;
  const uint8_t* source;
  uint32_t num_bytes, num_valid, group;
};

struct BulkCopy {
  uint8_t* destination;
  const uint8_t* source;
  uint32_t num_bytes;
  uint64_t mbarrier;
};

// Our image of an mbarrier, in the 8 bytes that PTX gives it.
struct Mbarrier {
  uint16_t count, pending;
  int32_t missing_bytes : 31;
  uint32_t phase : 1;
};
static_assert(sizeof(Mbarrier) == 8);

using Complete = void (*)(struct Meeting&, int parameter);

// Lanes of a warp that wait for each other in one operation.
struct Meeting {
  uint32_t mask = 0, arrived = 0;
  uint64_t generation = 0;
  Complete complete = nullptr;
  int parameter = 0;
  alignas(16) uint8_t input[32][48];
  void* output[32];
  template <class T>
  T& in(int lane) {
    return *reinterpret_cast<T*>(input[lane]);
  }
  template <class T>
  T& out(int lane) {
    return *reinterpret_cast<T*>(output[lane]);
  }
};

struct Warp {
  uint32_t live = 0;
  Meeting meetings[4];
};

struct Fiber {
  void* stack_pointer;
  uint8_t* stack;
  Index thread;
  uint32_t lane, warp;
  bool done;
  std::function<bool()> waits_for;  // empty: it can run
  std::vector<PendingCopy> copies;
  uint32_t group;
  void* sanitizer_stack = nullptr;
};

struct Block {
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<BulkCopy> bulk_copies;
  uint32_t live = 0, at_barrier = 0;
  uint64_t barrier_generation = 0;
  void* scheduler_stack_pointer = nullptr;
  void (*kernel)(const uint8_t*) = nullptr;
  const uint8_t* params = nullptr;
  char error[512] = {};
  bool failed = false;
  uint32_t random = 0;
  const void* scheduler_stack = nullptr;
  size_t scheduler_stack_bytes = 0;
  void* sanitizer_stack = nullptr;

  uint32_t draw(uint32_t bound) {
    random = random * 1664525u + 1013904223u;
    return (random >> 8) % bound;
  }
};

thread_local Block* block;
thread_local Fiber* fiber;

}  // namespace

// Saves the registers that a call must keep, and continues where `to` was saved.
extern "C" void switch_stack(void** save, void* to);
#if !defined(__x86_64__)
#error "the machine needs a switch of stacks for this processor"
#endif
asm(R"(.text
.globl switch_stack
.hidden switch_stack
.type switch_stack,@function
switch_stack:
  pushq %rbp; pushq %rbx; pushq %r12; pushq %r13; pushq %r14; pushq %r15
  movq %rsp,(%rdi)
  movq %rsi,%rsp
  popq %r15; popq %r14; popq %r13; popq %r12; popq %rbx; popq %rbp
  ret
.size switch_stack,.-switch_stack
)");

namespace {

void to_scheduler() {
  Fiber* self = fiber;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(self->done ? nullptr : &self->sanitizer_stack, block->scheduler_stack,
                                 block->scheduler_stack_bytes);
#endif
  switch_stack(&self->stack_pointer, block->scheduler_stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(self->sanitizer_stack, &block->scheduler_stack, &block->scheduler_stack_bytes);
#endif
}

void to_fiber(Fiber& next) {
  fiber = &next;
  place.thread = next.thread;
  place.lane = next.lane;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&block->sanitizer_stack, next.stack, STACK_BYTES);
#endif
  switch_stack(&block->scheduler_stack_pointer, next.stack_pointer);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(block->sanitizer_stack, nullptr, nullptr);
#endif
  fiber = nullptr;
}

void wait_until(std::function<bool()> condition) {
  if (condition()) return;
  fiber->waits_for = std::move(condition);
  to_scheduler();
  fiber->waits_for = nullptr;
}

void complete(Meeting& meeting) {
  meeting.complete(meeting, meeting.parameter);
  meeting.arrived = 0;
  meeting.generation++;
}

Meeting& find_meeting(Warp& warp, uint32_t mask) {
  for (Meeting& meeting : warp.meetings)
    if (meeting.arrived && meeting.mask == mask) return meeting;
  for (Meeting& meeting : warp.meetings)
    if (meeting.arrived & mask) fail("lanes of a warp wait for different sets of lanes");
  for (Meeting& meeting : warp.meetings)
    if (!meeting.arrived) {
      meeting.mask = mask;
      return meeting;
    }
  fail("a warp waits in more than four places");
}

template <class In>
void meet(uint32_t mask, const In& input, void* output, Complete completion, int parameter = 0) {
  static_assert(sizeof(In) <= sizeof(Meeting::input[0]));
  Warp& warp = block->warps[fiber->warp];
  uint32_t lane = fiber->lane;
  if (!(mask >> lane & 1)) fail("lane %u is not in the mask %08x of its own operation", lane, mask);
  Meeting& meeting = find_meeting(warp, mask);
  if (!meeting.arrived) {
    meeting.complete = completion;
    meeting.parameter = parameter;
  } else if (meeting.complete != completion || meeting.parameter != parameter) {
    fail("lanes of a warp meet in different operations");
  }
  memcpy(meeting.input[lane], &input, sizeof input);
  meeting.output[lane] = output;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == (mask & warp.live)) return complete(meeting);
  uint64_t generation = meeting.generation;
  wait_until([&meeting, generation] { return meeting.generation != generation; });
}

void complete_barrier_if_all_are_there() {
  if (block->at_barrier > 0 && block->at_barrier >= block->live) {
    block->at_barrier = 0;
    block->barrier_generation++;
  }
}

void run_thread() {
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, &block->scheduler_stack, &block->scheduler_stack_bytes);
#endif
  block->kernel(block->params);
  fiber->done = true;
  block->live--;
  // Those who wait for all threads of a warp or block wait for the others from now on.
  Warp& warp = block->warps[fiber->warp];
  warp.live &= ~(1u << fiber->lane);
  for (Meeting& meeting : warp.meetings)
    if (meeting.arrived && meeting.arrived == (meeting.mask & warp.live)) complete(meeting);
  complete_barrier_if_all_are_there();
  for (;;) to_scheduler();
}

void prepare(Fiber& next) {
  void** top = reinterpret_cast<void**>(next.stack + STACK_BYTES) - 2;
  *top = reinterpret_cast<void*>(run_thread);  // After `ret` the stack is aligned as at a call.
  for (int i = 0; i < 6; i++) *--top = nullptr;
  next.stack_pointer = top;
  next.done = false;
  next.waits_for = nullptr;
  next.copies.clear();
  next.group = 0;
}

bool run_warp(uint32_t warp) {
  uint32_t first = warp * 32, size = std::min<uint32_t>(32, block->fibers.size() - first);
  // With a seed, warps get short turns and lanes start anywhere.
  uint32_t turns = block->random ? 1 + block->draw(4) : UINT32_MAX;
  bool progress = false;
  for (bool any = true; any && turns-- > 0 && !block->failed;) {
    any = false;
    uint32_t start = block->random ? block->draw(size) : 0;
    for (uint32_t i = 0; i < size && !block->failed; i++) {
      Fiber& next = block->fibers[first + (start + i) % size];
      if (next.done || (next.waits_for && !next.waits_for())) continue;
      any = progress = true;
      to_fiber(next);
    }
  }
  return progress;
}

Mbarrier& mbarrier_at(uint64_t address) { return *reinterpret_cast<Mbarrier*>(shared(address, 8)); }

void flip_if_complete(Mbarrier& barrier) {
  if (barrier.pending == 0 && barrier.missing_bytes == 0) {
    barrier.phase ^= 1;
    barrier.pending = barrier.count;
  }
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

void run_block() {
  block->live = uint32_t(block->fibers.size());
  block->at_barrier = 0;
  block->bulk_copies.clear();
  for (Warp& warp : block->warps) {
    warp.live = 0;
    for (Meeting& meeting : warp.meetings) meeting.arrived = 0;
  }
  for (Fiber& each : block->fibers) {
    prepare(each);
    block->warps[each.warp].live |= 1u << each.lane;
  }
  memset(shared_base, 0xff, shared_size);  // NaN in every format
  std::vector<uint32_t> order(block->warps.size());
  for (uint32_t i = 0; i < order.size(); i++) order[i] = i;
  while (block->live && !block->failed) {
    if (block->random)
      for (uint32_t i = uint32_t(order.size()) - 1; i > 0; i--) std::swap(order[i], order[block->draw(i + 1)]);
    bool progress = false;
    for (uint32_t warp : order) progress |= !block->failed && run_warp(warp);
    progress |= deliver_bulk_copies(!progress);
    if (!progress && block->live && !block->failed) {
      snprintf(block->error, sizeof block->error, "deadlock: %u threads wait [block %u,%u,%u]", block->live,
               place.block.x, place.block.y, place.block.z);
      block->failed = true;
    }
  }
}

}  // namespace

void fail(const char* format, ...) {
  char message[400];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(message, sizeof message, format, arguments);
  va_end(arguments);
  snprintf(block->error, sizeof block->error, "%s [block %u,%u,%u thread %u]", message, place.block.x, place.block.y,
           place.block.z, fiber->thread.x);
  block->failed = true;
  for (;;) to_scheduler();
}

void barrier() {
  counters->barriers++;
  block->at_barrier++;
  uint64_t generation = block->barrier_generation;
  complete_barrier_if_all_are_there();
  Block* mine = block;
  wait_until([mine, generation] { return mine->barrier_generation != generation; });
}

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

// Runs a grid. Returns 0, or 1 with a message in `error` [512].
extern "C" int launch_grid(void (*kernel)(const uint8_t*), const uint8_t* params, const uint32_t* grid,
                           uint32_t num_threads, uint32_t shared_bytes, uint32_t seed, Counters* result, char* error) {
  static thread_local std::vector<uint8_t*> stacks;
  while (stacks.size() < num_threads)
    stacks.push_back(static_cast<uint8_t*>(
        mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0)));
  Block here;
  block = &here;
  here.kernel = kernel;
  here.params = params;
  here.random = seed;
  here.fibers.resize(num_threads);
  here.warps.resize((num_threads + 31) / 32);
  for (uint32_t i = 0; i < num_threads; i++) {
    Fiber& each = here.fibers[i];
    each.stack = stacks[i];
    each.thread = {i, 0, 0};
    each.lane = i % 32;
    each.warp = i / 32;
  }
  counters = result;
  shared_size = shared_bytes;
  shared_base = static_cast<uint8_t*>(aligned_alloc(1024, (shared_bytes + 1024) / 1024 * 1024));
  place.block_size = {num_threads, 1, 1};
  place.grid_size = {grid[0], grid[1], grid[2]};
  for (uint32_t z = 0; z < grid[2]; z++)
    for (uint32_t y = 0; y < grid[1]; y++)
      for (uint32_t x = 0; x < grid[0] && !here.failed; x++) {
        place.block = {x, y, z};
        run_block();
      }
  free(shared_base);
  memcpy(error, here.error, sizeof here.error);
  block = nullptr;
  return here.failed;
}

}  // namespace machine
