// Allreduce, allgather and barrier over one shared segment.
//
// The segment holds four buffers, each with a slot a rank and one for the result. A tensor goes through them in pieces: piece
// number c, counted over all calls, uses buffer c % 4, so that a rank may write a piece while others still read the one
// before, and a call needs no barrier at its end. A slot is written again only when all ranks have consumed what was in it.
// Of small tensors every rank sums everything (one wait); of large ones each sums its share of a piece and collects the
// others' (two waits, but each element is widened, added and rounded once). Either way sums go in rank order and are equal
// to the bit.
#include "collectives.h"

#include <algorithm>
#include <cstring>
#include <memory>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "collectives_wait.h"
#include "thread_pool.h"

namespace diptych {
namespace {

constexpr int64_t kMaxRanks = 64;
constexpr int64_t kDirectNbytes = 16 << 10;    // up to here everyone sums everything
constexpr int64_t kDirectPairNbytes = 64 << 10;
constexpr int64_t kThreadGrain = 64 << 10;     // bytes of a piece that one thread of the pool takes
constexpr int64_t kDataAlignment = 4096;

enum class CallKind : uint64_t { kAllreduce = 1, kAllgather = 2, kBarrier = 3 };

struct SegmentHeader {
  uint64_t token;  // drawn by who made it: what was mapped is what was meant
  int64_t num_ranks;
  int64_t piece_nbytes;
  std::atomic<int64_t> failure;
};

int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }
int64_t data_offset(int64_t num_ranks) {
  return round_up(static_cast<int64_t>(sizeof(SegmentHeader) + 64 + static_cast<size_t>(num_ranks) * sizeof(RankState)),
                  kDataAlignment);
}
int64_t segment_nbytes(int64_t num_ranks, int64_t piece_nbytes) {
  return data_offset(num_ranks) + kNumBuffers * (num_ranks + 1) * piece_nbytes;
}
int64_t item_size(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

// What ranks must agree on: the kind, the dtype where it matters, the size.
uint64_t call_of(CallKind kind, int64_t nbytes, uint64_t detail = 0) {
  return static_cast<uint64_t>(kind) << 60 | detail << 56 | static_cast<uint64_t>(nbytes);
}

template <class Body>
void in_ranges(int64_t nbytes, const Body& body) {
  if (nbytes < 2 * kThreadGrain) return body(int64_t{0}, nbytes);
  parallel_for(ceil_div(nbytes, kThreadGrain), 1, [&](int64_t begin, int64_t end) {
    body(begin * kThreadGrain, std::min(end * kThreadGrain, nbytes));
  });
}

void copy(void* to, const void* from, int64_t nbytes) {
  in_ranges(nbytes, [&](int64_t begin, int64_t end) {
    std::memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin, static_cast<size_t>(end - begin));
  });
}

// Rows of `row_nbytes`, one after the other in a rank's tensor and `stride` apart in the gathered one.
struct Rows {
  char* first;
  int64_t row_nbytes;
  int64_t stride;

  void write(int64_t offset, const char* from, int64_t nbytes) const {
    while (nbytes > 0) {
      const int64_t within = offset % row_nbytes;
      const int64_t count = std::min(row_nbytes - within, nbytes);
      std::memcpy(first + offset / row_nbytes * stride + within, from, static_cast<size_t>(count));
      offset += count, from += count, nbytes -= count;
    }
  }
};

}  // namespace

class SharedCollectives {
 public:
  SharedCollectives(char* memory, int32_t rank, WaitLimits limits)
      : header_(*reinterpret_cast<SegmentHeader*>(memory)),
        ranks_(reinterpret_cast<RankState*>(memory + round_up(sizeof(SegmentHeader), 64))),
        data_(memory + data_offset(header_.num_ranks)),
        rank_(rank),
        num_ranks_(static_cast<int32_t>(header_.num_ranks)),
        watch_{ranks_, num_ranks_, &header_.failure, limits} {}

  int64_t nbytes() const { return segment_nbytes(num_ranks_, header_.piece_nbytes); }
  void* memory() const { return &header_; }
  int64_t piece_nbytes() const { return header_.piece_nbytes; }
  int32_t rank() const { return rank_; }
  int32_t num_ranks() const { return num_ranks_; }

  void enter() { ranks_[rank_].process = this_process(); }
  bool sees_all() const {
    return std::all_of(ranks_, ranks_ + num_ranks_, [](const RankState& rank) { return is_visible(rank.process); });
  }
  void leave() { ranks_[rank_].has_left.store(1); }

  char* slot(int64_t piece, int32_t rank) const {
    const int64_t buffer = (first_piece_ + static_cast<uint32_t>(piece)) % kNumBuffers;
    return data_ + (buffer * (num_ranks_ + 1) + rank) * header_.piece_nbytes;
  }
  char* result(int64_t piece) const { return slot(piece, num_ranks_); }

  // Lets a call's pieces pass through `stages` in turn, each stage one piece behind the one before. Returns 0 or the failure.
  template <class... Stages>
  int64_t run(int64_t num_pieces, const Stages&... stages) {
    const int64_t known = header_.failure.load();
    if (known != 0) return known;
    try {
      const int64_t num_turns = num_pieces + static_cast<int64_t>(sizeof...(stages)) - 1;
      for (int64_t turn = 0; turn < num_turns; ++turn) {
        int64_t piece = turn;
        ((piece >= 0 && piece < num_pieces ? stages(piece) : void(), --piece), ...);
      }
    } catch (const Failure& failure) {
      int64_t none = 0;
      header_.failure.compare_exchange_strong(none, failure.packed());
      return header_.failure.load();
    }
    first_piece_ += static_cast<uint32_t>(num_pieces);
    return 0;
  }

  // Until the piece's slot is free: everyone has read what was in it.
  void wait_for_slot(int64_t piece) {
    const uint32_t target = number(piece) - kNumBuffers;
    wait_for_all(&RankState::consumed, target);
  }
  void post(int64_t piece, uint64_t call) {
    Counter& posted = ranks_[rank_].posted;
    posted.calls[number(piece) % kNumBuffers] = call;
    advance(posted, number(piece));
  }
  void wait_posted(int64_t piece, uint64_t call) {
    wait_for_all(&RankState::posted, number(piece));
    for (int32_t rank = 0; rank < num_ranks_; ++rank)
      if (ranks_[rank].posted.calls[number(piece) % kNumBuffers] != call) throw Failure{FailureCode::kMismatch, rank};
  }
  void finish_share(int64_t piece) { advance(ranks_[rank_].reduced, number(piece)); }
  void wait_reduced(int64_t piece) { wait_for_all(&RankState::reduced, number(piece)); }
  void consume(int64_t piece) { advance(ranks_[rank_].consumed, number(piece)); }

 private:
  // A counter's value once this piece is done.
  uint32_t number(int64_t piece) const { return first_piece_ + static_cast<uint32_t>(piece) + 1; }

  void wait_for_all(Counter RankState::*counter, uint32_t target) {
    for (int32_t rank = 0; rank < num_ranks_; ++rank) wait_until(ranks_[rank].*counter, target, rank, watch_);
  }

  SegmentHeader& header_;
  RankState* ranks_;
  char* data_;
  int32_t rank_;
  int32_t num_ranks_;
  Watch watch_;
  uint32_t first_piece_ = 0;  // of the call under way
};

namespace {

// One allreduce: what its stages share.
struct Reduction {
  SharedCollectives& group;
  char* out;
  const char* x;
  int64_t nbytes;
  Dtype dtype;
  SumRanks sum;
  uint64_t call;

  int64_t start(int64_t piece) const { return piece * group.piece_nbytes(); }
  int64_t size(int64_t piece) const { return std::min(group.piece_nbytes(), nbytes - start(piece)); }

  // The bytes of a piece that this rank sums: from `first`, and how many.
  int64_t share(int64_t piece, int64_t* first) const {
    const int64_t most = round_up(ceil_div(size(piece), group.num_ranks()), 64);
    *first = std::min(most * group.rank(), size(piece));
    return std::min(most, size(piece) - *first);
  }

  void write_all(int64_t piece) const {
    group.wait_for_slot(piece);
    copy(group.slot(piece, group.rank()), x + start(piece), size(piece));
    group.post(piece, call);
  }
  void write_for_others(int64_t piece) const {
    group.wait_for_slot(piece);
    copy_around_share(piece, group.slot(piece, group.rank()), x + start(piece));
    group.post(piece, call);
  }
  void copy_around_share(int64_t piece, char* to, const char* from) const {
    int64_t first = 0;
    const int64_t last = share(piece, &first) + first;
    copy(to, from, first);
    copy(to + last, from + last, size(piece) - last);
  }
  // Sums bytes begin..end of a piece. This rank's own are still in its cache where they came from.
  void sum_range(char* to, int64_t piece, int64_t begin, int64_t end) const {
    const void* inputs[kMaxRanks];
    for (int32_t rank = 0; rank < group.num_ranks(); ++rank) inputs[rank] = group.slot(piece, rank) + begin;
    inputs[group.rank()] = x + start(piece) + begin;
    sum(to + begin, inputs, group.num_ranks(), (end - begin) / item_size(dtype), dtype);
  }
  void sum_all(int64_t piece) const {
    group.wait_posted(piece, call);
    in_ranges(size(piece), [&](int64_t begin, int64_t end) { sum_range(out + start(piece), piece, begin, end); });
    group.consume(piece);
  }
  void sum_share(int64_t piece) const {
    group.wait_posted(piece, call);
    int64_t first = 0;
    const int64_t count = share(piece, &first);
    in_ranges(count, [&](int64_t begin, int64_t end) {
      sum_range(group.result(piece), piece, first + begin, first + end);
    });
    group.finish_share(piece);
    copy(out + start(piece) + first, group.result(piece) + first, count);
  }
  void collect(int64_t piece) const {
    group.wait_reduced(piece);
    copy_around_share(piece, out + start(piece), group.result(piece));
    group.consume(piece);
  }
};

struct Gathering {
  SharedCollectives& group;
  char* out;
  const char* x;
  int64_t num_rows;
  int64_t row_nbytes;
  uint64_t call;

  int64_t nbytes() const { return num_rows * row_nbytes; }
  int64_t start(int64_t piece) const { return piece * group.piece_nbytes(); }
  int64_t size(int64_t piece) const { return std::min(group.piece_nbytes(), nbytes() - start(piece)); }

  void write(int64_t piece) const {
    group.wait_for_slot(piece);
    copy(group.slot(piece, group.rank()), x + start(piece), size(piece));
    group.post(piece, call);
    place(piece, group.rank(), x + start(piece));
  }
  void collect(int64_t piece) const {
    group.wait_posted(piece, call);
    for (int32_t step = 1; step < group.num_ranks(); ++step) {  // not all at the same rank's memory at once
      const int32_t rank = (group.rank() + step) % group.num_ranks();
      place(piece, rank, group.slot(piece, rank));
    }
    group.consume(piece);
  }
  void place(int64_t piece, int32_t rank, const char* from) const {
    const Rows rows = {out + rank * row_nbytes, row_nbytes, group.num_ranks() * row_nbytes};
    in_ranges(size(piece), [&](int64_t begin, int64_t end) { rows.write(start(piece) + begin, from + begin, end - begin); });
  }
};

}  // namespace

int64_t shm_allreduce(SharedCollectives& group, void* out, const void* x, int64_t count, Dtype dtype, SumRanks sum) {
  const int64_t nbytes = count * item_size(dtype);
  const Reduction all = {group, static_cast<char*>(out), static_cast<const char*>(x), nbytes, dtype, sum,
                         call_of(CallKind::kAllreduce, nbytes, static_cast<uint64_t>(dtype))};
  const int64_t num_pieces = ceil_div(nbytes, group.piece_nbytes());
  const bool is_pair = group.num_ranks() == 2;
  // A pair of float32 tensors is added as fast as it is copied, so that halving the sums would gain nothing.
  if (nbytes <= (is_pair ? kDirectPairNbytes : kDirectNbytes) || (is_pair && dtype == Dtype::kFloat32))
    return group.run(
        num_pieces, [&](int64_t piece) { all.write_all(piece); }, [&](int64_t piece) { all.sum_all(piece); });
  return group.run(
      num_pieces, [&](int64_t piece) { all.write_for_others(piece); }, [&](int64_t piece) { all.sum_share(piece); },
      [&](int64_t piece) { all.collect(piece); });
}

}  // namespace diptych

using diptych::SharedCollectives;

// Bytes of a segment for so many ranks, whose tensors pass in pieces of `piece_nbytes` (a multiple of 4096).
DIPTYCH_EXPORT int64_t diptych_shm_nbytes(int32_t num_ranks, int64_t piece_nbytes) {
  return diptych::segment_nbytes(num_ranks, piece_nbytes);
}

// Maps the segment in `file`; who made it also names it with `token` first (is_maker). Returns the rank's handle, or null if this is
// not the segment that was meant or cannot be mapped. The file may be closed afterwards.
DIPTYCH_EXPORT SharedCollectives* diptych_shm_open(int32_t file, int32_t rank, int32_t num_ranks, int64_t piece_nbytes,
                                                   uint64_t token, int32_t is_maker, int64_t spin_ns,
                                                   int64_t timeout_ns) {
#if defined(__linux__)
  if (num_ranks > diptych::kMaxRanks) return nullptr;
  const size_t nbytes = static_cast<size_t>(diptych::segment_nbytes(num_ranks, piece_nbytes));
  void* memory = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, file, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* header = static_cast<diptych::SegmentHeader*>(memory);
  if (is_maker) header->token = token, header->num_ranks = num_ranks, header->piece_nbytes = piece_nbytes;
  if (header->token != token || header->num_ranks != num_ranks || header->piece_nbytes != piece_nbytes) {
    munmap(memory, nbytes);
    return nullptr;
  }
  madvise(memory, nbytes, MADV_DONTFORK);
  auto group = std::make_unique<SharedCollectives>(static_cast<char*>(memory), rank,
                                                   diptych::WaitLimits{spin_ns, timeout_ns});
  group->enter();
  return group.release();
#else
  (void)file, (void)rank, (void)num_ranks, (void)piece_nbytes, (void)token, (void)is_maker, (void)spin_ns, (void)timeout_ns;
  return nullptr;
#endif
}

// Whether this rank can see the processes of all ranks; asked when all have opened the segment.
DIPTYCH_EXPORT int32_t diptych_shm_sees_all(const SharedCollectives* group) { return group->sees_all(); }

// Says goodbye and unmaps. A rank that still waits for this one gets an error.
DIPTYCH_EXPORT void diptych_shm_close(SharedCollectives* group) {
  const std::unique_ptr<SharedCollectives> owned(group);
  owned->leave();
#if defined(__linux__)
  munmap(owned->memory(), static_cast<size_t>(owned->nbytes()));
#endif
}

// Collectives return 0, or a failure as rank << 8 | code, after which the group is of no more use.

// out, of num_rows rows of num_ranks * row_nbytes, gets row i of every rank's x beside each other, in rank order.
DIPTYCH_EXPORT int64_t diptych_shm_allgather(SharedCollectives* group, void* out, const void* x, int64_t num_rows,
                                             int64_t row_nbytes) {
  const diptych::Gathering all = {*group, static_cast<char*>(out), static_cast<const char*>(x), num_rows, row_nbytes,
                                  diptych::call_of(diptych::CallKind::kAllgather, num_rows * row_nbytes)};
  return group->run(
      diptych::ceil_div(all.nbytes(), group->piece_nbytes()), [&](int64_t piece) { all.write(piece); },
      [&](int64_t piece) { all.collect(piece); });
}

// Returns when every rank has called it.
DIPTYCH_EXPORT int64_t diptych_shm_barrier(SharedCollectives* group) {
  const uint64_t call = diptych::call_of(diptych::CallKind::kBarrier, 0);
  return group->run(1, [&](int64_t piece) {
    group->wait_for_slot(piece);
    group->post(piece, call);
    group->wait_posted(piece, call);
    group->consume(piece);
  });
}
