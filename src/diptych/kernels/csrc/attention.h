// Attention of a ragged batch over the page-major pool, in place: writing K and V, planning, and joining what was split.
// How one piece is attended is the business of attention_rows.h and amx_attention.h.
//
// R = query heads of one KV head. A piece has one KV head and some adjacent tokens of one sequence: tokens * R query rows.
// Long ranges of keys are split at fixed positions, whatever else is in the batch, so that a row's result never depends on
// the rows beside it.
#pragma once

#include "thread_pool.h"
#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kSplitKeys = 512;
constexpr int64_t kMaxQueryRows = 128;
constexpr float kNegativeInfinity = -__builtin_inff();

struct AttentionCall {
  const AttentionLayer& layer;
  const AttentionStep& step;
  const AttentionTensors& tensors;

  int64_t group_size() const { return layer.num_heads / layer.num_kv_heads; }
  int64_t row_size() const { return static_cast<int64_t>(layer.num_kv_heads) * layer.head_dim; }
  int64_t query_len(int64_t row) const { return step.query_starts[row + 1] - step.query_starts[row]; }

  // Position of a step's token in its sequence.
  int64_t position(int64_t row, int64_t token) const {
    return step.kv_lens[row] - query_len(row) + token - step.query_starts[row];
  }
  int64_t first_key(int64_t position) const {
    return layer.window > 0 ? larger<int64_t>(0, position - layer.window + 1) : 0;
  }
};

// partial: place of the result among those to be joined, or -1 when these are all the keys that the tokens see.
struct AttentionPiece {
  int64_t row;
  int64_t kv_head;
  int64_t token_begin;
  int64_t token_end;
  int64_t key_begin;
  int64_t key_end;
  int64_t partial;
};

// A piece's result before division: per query row [D] sums of exp(score - maximum) * value, and sums of the weights.
struct AttentionSums {
  float* values;
  float* maxima;
  float* weights;
};

template <class T>
ALWAYS_INLINE T* key_address(const AttentionCall& call, int64_t row, int64_t kv_head, int64_t position) {
  const AttentionLayer& layer = call.layer;
  const int64_t page = call.step.page_table[row * call.step.page_table_stride + position / layer.page_size];
  return static_cast<T*>(layer.pool) + page * layer.page_stride + position % layer.page_size * call.row_size() +
         kv_head * layer.head_dim;
}

template <class T>
void write_keys_and_values(const AttentionCall& call) {
  const AttentionLayer& layer = call.layer;
  const AttentionTensors& tensors = call.tensors;
  const int64_t size = call.row_size();
  parallel_for(call.step.num_tokens, 32, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t slot = call.step.kv_slots[token];
      T* to = static_cast<T*>(layer.pool) + slot / layer.page_size * layer.page_stride + slot % layer.page_size * size;
      const T* key = static_cast<const T*>(tensors.key) + token * tensors.key_stride;
      const T* value = static_cast<const T*>(tensors.value) + token * tensors.value_stride;
      __builtin_memcpy(to, key, static_cast<size_t>(size) * sizeof(T));
      __builtin_memcpy(to + layer.value_offset, value, static_cast<size_t>(size) * sizeof(T));
    }
  });
}

// A row's tokens start..stop attend from here on: from the first wanted one. `cursor` walks over the wanted tokens with the rows.
ALWAYS_INLINE int64_t first_attending(const AttentionStep& step, int64_t start, int64_t stop, int64_t* cursor) {
  if (step.wanted == nullptr) return start;
  while (*cursor < step.num_wanted && step.wanted[*cursor] < start) ++*cursor;
  return *cursor < step.num_wanted ? smaller(step.wanted[*cursor], stop) : stop;
}

// Calls `visit(piece)` for every piece of the step: longest first within a sequence, so that threads end together. Keys and
// splits of a piece are the same whichever tokens are wanted, hence the results as well.
template <class Visit>
ALWAYS_INLINE void for_each_piece(const AttentionCall& call, const Visit& visit) {
  const int64_t block = larger<int64_t>(1, kMaxQueryRows / call.group_size());
  int64_t num_partials = 0, cursor = 0;
  for (int64_t row = 0; row < call.step.num_rows; ++row) {
    const int64_t start = call.step.query_starts[row], stop = call.step.query_starts[row + 1];
    const int64_t first = first_attending(call.step, start, stop, &cursor);
    for (int64_t end = stop; end > first; end = larger(start, end - block)) {
      const int64_t block_begin = larger(start, end - block), begin = larger(first, block_begin);
      const int64_t key_begin = call.first_key(call.position(row, block_begin)), key_end = call.position(row, end - 1) + 1;
      const bool is_split = stop - start == 1 && key_begin / kSplitKeys != (key_end - 1) / kSplitKeys;
      for (int64_t kv_head = 0; kv_head < call.layer.num_kv_heads; ++kv_head) {
        if (!is_split) {
          visit(AttentionPiece{row, kv_head, begin, end, key_begin, key_end, -1});
          continue;
        }
        for (int64_t key = key_begin; key < key_end;) {
          const int64_t key_stop = smaller(key_end, (key / kSplitKeys + 1) * kSplitKeys);
          visit(AttentionPiece{row, kv_head, begin, end, key, key_stop, num_partials++});
          key = key_stop;
        }
      }
    }
  }
}

template <class T>
ALWAYS_INLINE void store_attended(const AttentionCall& call, const AttentionPiece& piece, const AttentionSums& sums) {
  const int64_t group = call.group_size(), size = call.layer.head_dim;
  for (int64_t token = piece.token_begin; token < piece.token_end; ++token)
    for (int64_t head = 0; head < group; ++head) {
      const int64_t index = (token - piece.token_begin) * group + head;
      const float inverse = 1.0f / sums.weights[index];
      T* to = static_cast<T*>(call.tensors.output) + token * call.tensors.output_stride +
              (piece.kv_head * group + head) * size;
      for (int64_t d = 0; d < size; d += kLanes)
        store_some(to + d, load_some(sums.values + index * size + d, size - d) * inverse, size - d);
    }
}

// Pieces first..last are the parts of one token and KV head: joins them, in order, into the first and stores it.
template <class T>
ALWAYS_INLINE void join_parts(const AttentionCall& call, const AttentionPiece* pieces, int64_t first, int64_t last,
                              const AttentionSums& partials) {
  const int64_t group = call.group_size(), size = call.layer.head_dim;
  const int64_t base = pieces[first].partial * group;
  for (int64_t head = base; head < base + group; ++head) {
    float highest = kNegativeInfinity, weight = 0.0f;
    for (int64_t part = 0; part < last - first; ++part) highest = larger(highest, partials.maxima[head + part * group]);
    for (int64_t part = 0; part < last - first; ++part) {
      const int64_t index = head + part * group;
      const float factor = exponential(splat(partials.maxima[index] - highest))[0];
      weight += partials.weights[index] * factor;
      float* to = partials.values + head * size;
      for (int64_t d = 0; d < size; d += kLanes) {
        const f32x16 scaled = load_some(partials.values + index * size + d, size - d) * factor;
        store_some(to + d, part == 0 ? scaled : load_some(to + d, size - d) + scaled, size - d);
      }
    }
    partials.weights[head] = weight;
  }
  const AttentionSums joined = {partials.values + base * size, nullptr, partials.weights + base};
  store_attended<T>(call, pieces[first], joined);
}

// Writes K and V, then attends. attend(piece, partials) computes a piece; what is to be joined goes to `partials`.
template <class T, class Attend>
void attend_step(const AttentionCall& call, const Attend& attend) {
  write_keys_and_values<T>(call);
  int64_t num_pieces = 0, num_partials = 0;
  for_each_piece(call, [&](const AttentionPiece& piece) { ++num_pieces, num_partials += piece.partial >= 0; });
  const int64_t group = call.group_size(), size = call.layer.head_dim;
  const size_t pieces_nbytes = static_cast<size_t>(round_up(num_pieces * static_cast<int64_t>(sizeof(AttentionPiece)), 64));
  const size_t partial_floats = static_cast<size_t>(num_partials * group * (size + 2));
  char* scratch = static_cast<char*>(thread_scratch(kScratchCaller, pieces_nbytes + partial_floats * 4));
  AttentionPiece* pieces = reinterpret_cast<AttentionPiece*>(scratch);
  float* floats = reinterpret_cast<float*>(scratch + pieces_nbytes);
  const AttentionSums partials = {floats, floats + num_partials * group * size, floats + num_partials * group * (size + 1)};
  int64_t count = 0;
  for_each_piece(call, [&](const AttentionPiece& piece) { pieces[count++] = piece; });
  parallel_for(num_pieces, 1, [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    for (int64_t index = begin; index < end; ++index) attend(pieces[index], partials);
  });
  if (num_partials == 0) return;
  parallel_for(num_pieces, 8, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin; first < end; ++first) {
      const AttentionPiece& piece = pieces[first];
      const bool begins = piece.partial >= 0 && (first == 0 || pieces[first - 1].row != piece.row ||
                                                 pieces[first - 1].kv_head != piece.kv_head);
      int64_t last = first + 1;
      while (begins && last < num_pieces && pieces[last].row == piece.row && pieces[last].kv_head == piece.kv_head) ++last;
      if (begins) join_parts<T>(call, pieces, first, last, partials);
    }
  });
}

// Where a piece's sums go: straight to memory of their own when they will be joined, else to `own`.
ALWAYS_INLINE AttentionSums sums_of(const AttentionCall& call, const AttentionPiece& piece, const AttentionSums& partials,
                                    const AttentionSums& own) {
  if (piece.partial < 0) return own;
  const int64_t first = piece.partial * call.group_size();
  return {partials.values + first * call.layer.head_dim, partials.maxima + first, partials.weights + first};
}

// A score as the softmax sees it.
ALWAYS_INLINE f32x16 finished_scores(f32x16 scores, const AttentionLayer& layer) {
  scores = scores * layer.scale;
  return layer.soft_cap > 0.0f ? layer.soft_cap * tanh(scores / layer.soft_cap) : scores;
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
