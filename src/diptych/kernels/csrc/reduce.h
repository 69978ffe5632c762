// Reductions over the vocabulary, one pass a row.
#pragma once

#include "thread_pool.h"
#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

// Lowest index of the largest value; a row with a NaN gives the first NaN's index.
inline int64_t argmax_row(const float* x, int64_t size) {
  f32x16 best = splat(-__builtin_inff());
  i32x16 best_at = {};
  i32x16 at = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  i32x16 nan_seen = {};
  int64_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    const f32x16 v = load(x + i);
    const i32x16 is_better = v > best;
    nan_seen |= v != v;
    best = is_better ? v : best;
    best_at = is_better ? at : best_at;
    at += 16;
  }
  float value = -__builtin_inff();
  int64_t found = 0;
  bool has_nan = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    has_nan |= nan_seen[lane] != 0;
    if (best[lane] > value || (best[lane] == value && best_at[lane] < found)) value = best[lane], found = best_at[lane];
  }
  for (; i < size; ++i) {
    has_nan |= x[i] != x[i];
    if (x[i] > value) value = x[i], found = i;
  }
  for (int64_t j = 0; has_nan; ++j)
    if (x[j] != x[j]) return j;
  return found;
}

inline void argmax_rows(int64_t* indices, const float* x, int64_t num_rows, int64_t size, int64_t stride) {
  parallel_for(num_rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) indices[row] = argmax_row(x + row * stride, size);
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
