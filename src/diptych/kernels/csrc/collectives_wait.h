// One rank waiting for others through shared memory: counters that are spun on and then slept on, and what ends a wait that
// would never end by itself.
#pragma once

#include <atomic>
#include <cstdint>

namespace diptych {

constexpr int kNumBuffers = 4;

// Goes up and never down, written by one rank. Ranks that sleep until it changes are counted, so that nobody calls the
// kernel to wake no one.
struct alignas(64) Counter {
  std::atomic<uint32_t> value;
  std::atomic<uint32_t> num_asleep;
  uint64_t calls[kNumBuffers];  // of `posted` alone: what the rank was called with, for each buffer
};

// A process as the kernel knows it: an id may be used again, but not with the same start time.
struct ProcessIdentity {
  int64_t pid;
  uint64_t start_time;
};

struct alignas(64) RankState {
  Counter posted;    // pieces that this rank has written
  Counter reduced;   // pieces whose share of this rank is summed
  Counter consumed;  // pieces that this rank has read from everyone
  ProcessIdentity process;
  std::atomic<uint32_t> has_left;
};

// Numbers of the C interface, which parallel/shm.py puts into words.
enum class FailureCode : int32_t { kDead = 1, kStopped = 2, kTimeout = 3, kLeft = 4, kMismatch = 5 };

// Ends a collective. The first one is kept in the segment, so that every rank names the same culprit.
struct Failure {
  FailureCode code;
  int32_t rank;
  int64_t packed() const { return static_cast<int64_t>(rank) << 8 | static_cast<int64_t>(code); }
};

struct WaitLimits {
  int64_t spin_ns;
  int64_t timeout_ns;
};

// The calling process; pid 0 where the system does not tell.
ProcessIdentity this_process();

// Whether this process can see that one, without which its death would go unnoticed.
bool is_visible(const ProcessIdentity& process);

// Sets the counter and wakes who sleeps on it.
void advance(Counter& counter, uint32_t value);

// Everything that a waiting rank looks at.
struct Watch {
  RankState* ranks;
  int32_t num_ranks;
  std::atomic<int64_t>* failure;
  WaitLimits limits;
};

// Returns when the counter, which belongs to `rank`, has reached `target`. Throws Failure: a rank is dead, is stopped, has left,
// has failed itself, or the time is over.
void wait_until(Counter& counter, uint32_t target, int32_t rank, const Watch& watch);

}  // namespace diptych
