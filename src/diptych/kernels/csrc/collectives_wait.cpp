// Spinning, sleeping on a futex, and asking /proc after a rank that does not come.
#include "collectives_wait.h"

#include <sched.h>

#include <ctime>

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#endif

namespace diptych {
namespace {

constexpr int64_t kSleepNs = 50'000'000;             // between two looks at the other ranks
constexpr int64_t kStoppedGraceNs = 1'000'000'000;  // a debugger or a shell may stop a process for a moment
constexpr int64_t kYieldAfterNs = 3'000;            // a rank that comes at once is met without the kernel
constexpr int kPausesPerLook = 16;

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec;
}

bool has_reached(const Counter& counter, uint32_t target) {
  return static_cast<int32_t>(counter.value.load(std::memory_order_acquire) - target) >= 0;  // they wrap around
}

void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Looks all the time, and soon lets others have the core: the awaited rank may be one of them.
bool spin_until(const Counter& counter, uint32_t target, int64_t spin_ns) {
  if (has_reached(counter, target)) return true;
  const int64_t started = now_ns();
  int64_t waited = 0;
  do {
    for (int i = 0; i < kPausesPerLook; ++i) {
      if (has_reached(counter, target)) return true;
      pause_briefly();
    }
    if (waited > kYieldAfterNs) sched_yield();
    waited = now_ns() - started;
  } while (waited < spin_ns);
  return false;
}

#if defined(__linux__)

struct ProcessStatus {
  char state;  // 0: there is no such process
  uint64_t start_time;
};

ProcessStatus status_of(int64_t pid) {
  char path[40], text[1024];
  std::snprintf(path, sizeof path, "/proc/%lld/stat", static_cast<long long>(pid));
  const int file = open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return {};
  const ssize_t size = read(file, text, sizeof text - 1);
  close(file);
  if (size <= 0) return {};
  text[size] = 0;
  const char* field = std::strrchr(text, ')');  // the name before it may contain anything
  if (field == nullptr || field[1] == 0) return {};
  const char state = field[2];
  for (int number = 2; number < 22 && field != nullptr; ++number) field = std::strchr(field + 1, ' ');
  return field == nullptr ? ProcessStatus{} : ProcessStatus{state, std::strtoull(field + 1, nullptr, 10)};
}

// Sleeps until the counter changes or a while has passed; may return early.
void sleep_on(Counter& counter, uint32_t target) {
  counter.num_asleep.fetch_add(1);
  const uint32_t seen = counter.value.load();
  if (static_cast<int32_t>(seen - target) < 0) {
    const timespec pause = {0, kSleepNs};
    syscall(SYS_futex, &counter.value, FUTEX_WAIT, seen, &pause, nullptr, 0);
  }
  counter.num_asleep.fetch_sub(1);
}

void wake_all(Counter& counter) { syscall(SYS_futex, &counter.value, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0); }

#else

struct ProcessStatus {
  char state;
  uint64_t start_time;
};
ProcessStatus status_of(int64_t) { return {}; }
void sleep_on(Counter&, uint32_t) {}
void wake_all(Counter&) {}

#endif

// Looks for a rank that will not come any more, until the counter is there after all.
class Patience {
 public:
  Patience(int32_t rank, const Watch& watch) : rank_(rank), watch_(watch), started_(now_ns()) {}

  // Throws Failure once there is no hope.
  void look(const Counter& counter, uint32_t target) {
    Failure found = {};
    const bool is_lost = find_lost(&found);
    if (has_reached(counter, target)) return;  // it had come before it went
    const int64_t known = watch_.failure->load();
    if (known != 0) throw Failure{static_cast<FailureCode>(known & 0xff), static_cast<int32_t>(known >> 8)};
    if (is_lost) throw found;
    if (now_ns() - started_ > watch_.limits.timeout_ns) throw Failure{FailureCode::kTimeout, rank_};
  }

 private:
  bool find_lost(Failure* found) {
    bool is_any_stopped = false;
    for (int32_t rank = 0; rank < watch_.num_ranks; ++rank) {
      const RankState& state = watch_.ranks[rank];
      if (state.has_left.load()) {
        if (rank != rank_) continue;
        *found = {FailureCode::kLeft, rank};
        return true;
      }
      const ProcessStatus status = status_of(state.process.pid);
      const bool is_gone = status.start_time != state.process.start_time || status.state == 'Z' || status.state == 'X';
      if (is_gone) {
        *found = {FailureCode::kDead, rank};
        return true;
      }
      if (status.state != 'T') continue;
      is_any_stopped = true;
      if (stopped_since_ == 0) stopped_since_ = now_ns();
      *found = {FailureCode::kStopped, rank};
    }
    if (!is_any_stopped) stopped_since_ = 0;
    return is_any_stopped && now_ns() - stopped_since_ > kStoppedGraceNs;
  }

  int32_t rank_;
  const Watch& watch_;
  int64_t started_;
  int64_t stopped_since_ = 0;
};

}  // namespace

ProcessIdentity this_process() {
#if defined(__linux__)
  const int64_t pid = getpid();
  return {pid, status_of(pid).start_time};
#else
  return {};
#endif
}

bool is_visible(const ProcessIdentity& process) {
  return process.pid != 0 && status_of(process.pid).start_time == process.start_time;
}

void advance(Counter& counter, uint32_t value) {
  counter.value.store(value);  // sequentially consistent, as the sleepers' count: one of both sees the other
  if (counter.num_asleep.load() != 0) wake_all(counter);
}

void wait_until(Counter& counter, uint32_t target, int32_t rank, const Watch& watch) {
  if (spin_until(counter, target, watch.limits.spin_ns)) return;
  Patience patience(rank, watch);
  while (!has_reached(counter, target)) {
    sleep_on(counter, target);
    patience.look(counter, target);
  }
}

}  // namespace diptych
