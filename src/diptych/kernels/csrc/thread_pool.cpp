#include "thread_pool.h"

#include <pthread.h>
#if defined(__linux__)
#include <sched.h>
#endif

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace diptych {
namespace {

// About 50 microseconds of pauses: longer than the gap between two kernels of a step, shorter than a time slice.
constexpr int kSpins = 1200;

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

struct Job {
  RangeFunction function;
  void* context;
  int64_t count;
  int64_t smallest;
  int64_t largest;
};

// A job is open between the caller's publishing it and its closing it. Helpers enter an open job only, so that a helper
// that wakes up late (its core was busy) is never waited for.
class ThreadPool {
 public:
  ThreadPool(int num_helpers, const int32_t* cpus) {
    for (int index = 0; index < num_helpers; ++index) {
      helpers_.emplace_back([this] { serve(); });
      if (cpus != nullptr) pin(helpers_.back(), cpus[index + 1]);
    }
  }

  ~ThreadPool() {
    is_ending_.store(true);
    generation_.fetch_add(1);
    generation_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
  }

  int size() const { return static_cast<int>(helpers_.size()) + 1; }

  void run(const Job& job) {
    std::lock_guard<std::mutex> lock(mutex_);
    job_ = job;
    next_.store(0, std::memory_order_relaxed);
    entry_.store(0, std::memory_order_release);
    generation_.fetch_add(1);
    if (num_asleep_.load() > 0) generation_.notify_all();
    work(job);
    entry_.fetch_or(kClosed);
    wait_until_left();
  }

 private:
  static constexpr uint32_t kClosed = 1u << 31;  // the lower bits count the helpers inside

  static void pin(std::thread& thread, int32_t cpu) {
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(static_cast<size_t>(cpu), &set);
    pthread_setaffinity_np(thread.native_handle(), sizeof set, &set);  // a refusal costs speed, not correctness
#else
    (void)thread, (void)cpu;
#endif
  }

  void work(const Job& job) {
    int64_t begin = next_.load(std::memory_order_relaxed);
    while (begin < job.count) {
      const int64_t share = (job.count - begin) / (2 * size());
      const int64_t end = std::min(begin + std::clamp(share, job.smallest, job.largest), job.count);
      if (!next_.compare_exchange_weak(begin, end, std::memory_order_relaxed)) continue;
      job.function(job.context, begin, end);
      begin = next_.load(std::memory_order_relaxed);
    }
  }

  bool enter() {
    uint32_t entry = entry_.load(std::memory_order_relaxed);
    while (!(entry & kClosed)) {
      if (entry_.compare_exchange_weak(entry, entry + 1, std::memory_order_acquire)) return true;
    }
    return false;
  }

  void wait_until_left() {
    for (int spins = 0;; ++spins) {
      if (entry_.load(std::memory_order_acquire) == kClosed) return;
      if (spins < kSpins) pause_cpu();
      else std::this_thread::yield();  // the helper has lost its core: let it have this one
    }
  }

  void serve() {
    uint32_t seen = 0;
    for (;;) {
      seen = wait_for_news(seen);
      if (is_ending_.load()) return;
      if (!enter()) continue;
      work(job_);
      entry_.fetch_sub(1, std::memory_order_release);
    }
  }

  uint32_t wait_for_news(uint32_t seen) {
    for (int spins = 0; spins < kSpins; ++spins) {
      const uint32_t generation = generation_.load(std::memory_order_acquire);
      if (generation != seen) return generation;
      pause_cpu();
    }
    num_asleep_.fetch_add(1);
    generation_.wait(seen);
    num_asleep_.fetch_sub(1);
    return generation_.load();
  }

  std::mutex mutex_;
  Job job_{};
  alignas(64) std::atomic<int64_t> next_{0};
  alignas(64) std::atomic<uint32_t> entry_{kClosed};
  alignas(64) std::atomic<uint32_t> generation_{0};
  std::atomic<int> num_asleep_{0};
  std::atomic<bool> is_ending_{false};
  std::vector<std::thread> helpers_;
};

// Never destroyed at exit: helpers may still run while statics are torn down.
ThreadPool* pool = nullptr;
std::mutex pool_mutex;

// A child of fork has none of the helpers; its pool must be made anew, and the old one cannot be joined.
void forget_pool_after_fork() {
  pool = nullptr;
  new (&pool_mutex) std::mutex;
}

ThreadPool& current_pool() {
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool == nullptr) pool = new ThreadPool(0, nullptr);
  return *pool;
}

struct Scratch {
  void* memory = nullptr;
  size_t nbytes = 0;
  ~Scratch() { std::free(memory); }
};

thread_local bool is_serial = false;

}  // namespace

SerialScope::SerialScope() { is_serial = true; }
SerialScope::~SerialScope() { is_serial = false; }

int num_threads() { return current_pool().size(); }

void set_num_threads(int count, const int32_t* cpus) {
  static const int registered = pthread_atfork(nullptr, nullptr, forget_pool_after_fork);
  (void)registered;
  std::lock_guard<std::mutex> lock(pool_mutex);
  if (pool != nullptr && pool->size() == count && cpus == nullptr) return;
  delete pool;
  pool = new ThreadPool(count - 1, cpus);
}

void run_ranges(int64_t count, int64_t grain, RangeFunction function, void* context) {
  run_shrinking_ranges(count, grain, grain, function, context);
}

void run_shrinking_ranges(int64_t count, int64_t smallest, int64_t largest, RangeFunction function, void* context) {
  if (count <= 0) return;
  if (count <= smallest || is_serial) {
    function(context, 0, count);
    return;
  }
  current_pool().run({function, context, count, smallest, largest});
}

void* thread_scratch(int slot, size_t nbytes) {
  static thread_local Scratch scratches[kNumScratchSlots];
  Scratch& scratch = scratches[slot];
  if (scratch.nbytes < nbytes) {
    std::free(scratch.memory);
    scratch.nbytes = (nbytes + 4095) / 4096 * 4096;
    scratch.memory = std::aligned_alloc(64, scratch.nbytes);
    if (scratch.memory == nullptr) std::abort();  // a few MiB: nothing sensible can go on without them
  }
  return scratch.memory;
}

}  // namespace diptych
