// Attention of one piece in vector arithmetic: any dtype, head size and page size.
#pragma once

#include "attention.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kChunkKeys = 256;
constexpr int kHeadBlock = 4;  // query heads that share each load of a key or value

// Scores of up to 256 keys at a time: [HEADS][kChunkKeys] in `scores`, softmaxed in place.
template <class T, int HEADS>
class HeadBlock {
 public:
  HeadBlock(const AttentionCall& call, const float* query, int64_t query_stride, const AttentionSums& sums)
      : call_(call), query_(query), query_stride_(query_stride), sums_(sums) {
    for (int head = 0; head < HEADS; ++head) {
      sums_.maxima[head] = kNegativeInfinity;
      sums_.weights[head] = 0.0f;
      __builtin_memset(sums_.values + head * size(), 0, static_cast<size_t>(size()) * sizeof(float));
    }
  }

  void attend_chunk(const T* const* keys, int64_t num_keys) {
    alignas(64) float scores[HEADS][kChunkKeys];
    score(scores, keys, num_keys);
    for (int head = 0; head < HEADS; ++head) soften(scores[head], num_keys, head);
    add_values(scores, keys, num_keys);
  }

 private:
  int64_t size() const { return call_.layer.head_dim; }

  void score(float (&scores)[HEADS][kChunkKeys], const T* const* keys, int64_t num_keys) const {
    for (int64_t key = 0; key < num_keys; ++key) {
      f32x16 dots[HEADS] = {};
      for (int64_t d = 0; d < size(); d += kLanes) {
        const f32x16 k = load_some(keys[key] + d, size() - d);
#pragma GCC unroll 4
        for (int head = 0; head < HEADS; ++head) dots[head] = dots[head] + k * load(query_ + head * query_stride_ + d);
      }
      for (int head = 0; head < HEADS; ++head) scores[head][key] = sum_lanes(dots[head]);
    }
  }

  // Scores become weights; the sums so far are scaled to the new maximum.
  void soften(float* scores, int64_t num_keys, int head) {
    f32x16 highest = splat(sums_.maxima[head]);
    for (int64_t key = num_keys; key < round_up(num_keys, kLanes); ++key) scores[key] = kNegativeInfinity;
    for (int64_t key = 0; key < num_keys; key += kLanes) {
      f32x16 finished = finished_scores(load(scores + key), call_.layer);
      for (int64_t lane = num_keys - key; lane < kLanes; ++lane) finished[lane] = kNegativeInfinity;
      store(scores + key, finished);
      highest = maximum(finished, highest);
    }
    const float maximum_score = max_lanes(highest);
    f32x16 weights = {};
    for (int64_t key = 0; key < num_keys; key += kLanes) {
      const f32x16 weight = exponential(load(scores + key) - maximum_score);
      store(scores + key, weight);
      weights = weights + weight;
    }
    const float factor = exponential(splat(sums_.maxima[head] - maximum_score))[0];
    sums_.maxima[head] = maximum_score;
    sums_.weights[head] = sums_.weights[head] * factor + sum_lanes(weights);
    for (int64_t d = 0; d < size(); d += kLanes) {
      float* to = sums_.values + head * size() + d;
      store_some(to, load_some(to, size() - d) * factor, size() - d);
    }
  }

  void add_values(const float (&weights)[HEADS][kChunkKeys], const T* const* keys, int64_t num_keys) {
    for (int64_t d = 0; d < size(); d += kLanes) {
      f32x16 totals[HEADS] = {};
      for (int64_t key = 0; key < num_keys; ++key) {
        const f32x16 v = load_some(keys[key] + call_.layer.value_offset + d, size() - d);
#pragma GCC unroll 4
        for (int head = 0; head < HEADS; ++head) totals[head] = totals[head] + v * weights[head][key];
      }
      for (int head = 0; head < HEADS; ++head) {
        float* to = sums_.values + head * size() + d;
        store_some(to, load_some(to, size() - d) + totals[head], size() - d);
      }
    }
  }

  const AttentionCall& call_;
  const float* query_;
  int64_t query_stride_;
  AttentionSums sums_;
};

template <class T, int HEADS>
void attend_head_block(const AttentionCall& call, const AttentionPiece& piece, int64_t token, int64_t head,
                       float* query, const AttentionSums& sums) {
  const AttentionLayer& layer = call.layer;
  const int64_t size = layer.head_dim, query_stride = round_up(size, kLanes);
  const T* from = static_cast<const T*>(call.tensors.query) + token * call.tensors.query_stride +
                  (piece.kv_head * call.group_size() + head) * size;
  for (int index = 0; index < HEADS; ++index)
    for (int64_t d = 0; d < size; d += kLanes)
      store(query + index * query_stride + d, load_some(from + index * size + d, size - d));
  HeadBlock<T, HEADS> block(call, query, query_stride, sums);
  const int64_t position = call.position(piece.row, token);
  const int64_t key_end = smaller(piece.key_end, position + 1);
  const T* keys[kChunkKeys];
  for (int64_t key = larger(piece.key_begin, call.first_key(position)); key < key_end; key += kChunkKeys) {
    const int64_t num_keys = smaller(kChunkKeys, key_end - key);
    for (int64_t index = 0; index < num_keys; ++index)
      keys[index] = key_address<const T>(call, piece.row, piece.kv_head, key + index);
    block.attend_chunk(keys, num_keys);
  }
}

template <class T>
void attention_rows(const AttentionCall& call, const T*) {
  const int64_t group = call.group_size(), size = call.layer.head_dim;
  attend_step<T>(call, [&](const AttentionPiece& piece, const AttentionSums& partials) {
    const int64_t max_rows = (piece.token_end - piece.token_begin) * group;
    const int64_t query_floats = kHeadBlock * round_up(size, kLanes);
    const size_t num_floats = static_cast<size_t>(query_floats + max_rows * (size + 2));
    float* query = static_cast<float*>(thread_scratch(kScratchWorker, num_floats * sizeof(float)));
    float* own = query + query_floats;
    const AttentionSums sums =
        sums_of(call, piece, partials, {own, own + max_rows * size, own + max_rows * (size + 1)});
    for (int64_t token = piece.token_begin; token < piece.token_end; ++token)
      for (int64_t head = 0; head < group;) {
        const int64_t index = (token - piece.token_begin) * group + head;
        const AttentionSums at = {sums.values + index * size, sums.maxima + index, sums.weights + index};
        const bool is_full = group - head >= kHeadBlock;
        if (is_full) attend_head_block<T, kHeadBlock>(call, piece, token, head, query, at);
        else attend_head_block<T, 1>(call, piece, token, head, query, at);
        head += is_full ? kHeadBlock : 1;
      }
    if (piece.partial < 0) store_attended<T>(call, piece, sums);
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
