// See machine.h: runs the threads of a grid, block after block. Built once; translated kernels are linked with it.
#include "fibers.h"

#include <sys/mman.h>

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
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

thread_local Block* block;
thread_local Fiber* fiber;

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

}  // namespace

void wait_until(std::function<bool()> condition) {
  if (condition()) return;
  fiber->waits_for = std::move(condition);
  to_scheduler();
  fiber->waits_for = nullptr;
}

namespace {

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

}  // namespace

void meet_bytes(uint32_t mask, const void* input, size_t num_bytes, void* output, Complete completion, int parameter) {
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
  memcpy(meeting.input[lane], input, num_bytes);
  meeting.output[lane] = output;
  meeting.arrived |= 1u << lane;
  if (meeting.arrived == (mask & warp.live)) return complete(meeting);
  uint64_t generation = meeting.generation;
  wait_until([&meeting, generation] { return meeting.generation != generation; });
}

namespace {

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
