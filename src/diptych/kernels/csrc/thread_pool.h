// One pool of threads for every kernel. The caller works too; helpers spin briefly between jobs and then sleep, so that
// engines that share cores do not take them from each other while idle.
#pragma once

#include <cstddef>
#include <cstdint>

namespace diptych {

using RangeFunction = void (*)(void* context, int64_t begin, int64_t end);

// Runs `function` over 0..count in pieces of `grain`, claimed one by one; returns when all are done. Pieces may run in any
// order on any thread, so a piece's result must not depend on which.
void run_ranges(int64_t count, int64_t grain, RangeFunction function, void* context);

// The same in pieces that get smaller towards the end, so that threads end together: half of a thread's share of what is
// left, but at least `smallest` and at most `largest`.
void run_shrinking_ranges(int64_t count, int64_t smallest, int64_t largest, RangeFunction function, void* context);

// While one lives, its thread runs what it is given by itself: for kernels that are a piece of another one's job.
class SerialScope {
 public:
  SerialScope();
  ~SerialScope();
};

// Number of threads that share a job, the caller included.
int num_threads();

// Sets that number. cpus: one core number a thread to pin helpers to (the caller is never pinned), or null.
void set_num_threads(int count, const int32_t* cpus);

// Memory of the calling thread, 64-byte aligned, undefined contents, valid until its next call with the same slot.
void* thread_scratch(int slot, size_t nbytes);

// Slots of thread_scratch, one a purpose, so that callers of callers do not collide.
enum ScratchSlot { kScratchCaller = 0, kScratchWorker = 1, kScratchLayer = 2, kScratchSums = 3, kScratchLowRank = 4, kScratchAddend = 5, kNumScratchSlots = 6 };

template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  run_ranges(
      count, grain,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

template <class Body>
void parallel_for_shrinking(int64_t count, int64_t smallest, int64_t largest, const Body& body) {
  run_shrinking_ranges(
      count, smallest, largest,
      [](void* context, int64_t begin, int64_t end) { (*static_cast<const Body*>(context))(begin, end); },
      const_cast<Body*>(&body));
}

}  // namespace diptych
