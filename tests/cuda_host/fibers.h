// What machine.cc, which runs the fibers, and instructions.cc, which lets them meet, know of each other.
#pragma once

#include <functional>
#include <vector>

#include "machine.h"

namespace machine {

constexpr size_t STACK_BYTES = 128 << 10;
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

extern thread_local Block* block;
extern thread_local Fiber* fiber;

// Goes on with other fibers until the condition holds.
void wait_until(std::function<bool()> condition);

// Meets the other lanes of a mask in one operation. The last to arrive completes it for all: `completion` reads their
// inputs and writes their outputs.
void meet_bytes(uint32_t mask, const void* input, size_t num_bytes, void* output, Complete completion, int parameter);

template <class In>
void meet(uint32_t mask, const In& input, void* output, Complete completion, int parameter = 0) {
  static_assert(sizeof(In) <= sizeof(Meeting::input[0]));
  meet_bytes(mask, &input, sizeof input, output, completion, parameter);
}

// Lets bulk copies arrive: all of them, or with a seed some. Says whether any did.
bool deliver_bulk_copies(bool all);

}  // namespace machine
