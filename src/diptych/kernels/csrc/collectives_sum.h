// Sums of the same elements of several ranks, in rank order: the arithmetic of collectives.cpp.
#pragma once

#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

// Two ranks are the common case: four vectors at a time keep enough loads under way to hide a neighbour's cache.
template <class T>
void sum_pair(T* out, const T* first, const T* second, int64_t count) {
  constexpr int64_t kStep = 4 * kLanes;
  int64_t i = 0;
  for (; i + kStep <= count; i += kStep) {
    const f32x16 a = load(first + i) + load(second + i);
    const f32x16 b = load(first + i + kLanes) + load(second + i + kLanes);
    const f32x16 c = load(first + i + 2 * kLanes) + load(second + i + 2 * kLanes);
    const f32x16 d = load(first + i + 3 * kLanes) + load(second + i + 3 * kLanes);
    store(out + i, a);
    store(out + i + kLanes, b);
    store(out + i + 2 * kLanes, c);
    store(out + i + 3 * kLanes, d);
  }
  for (; i < count; i += kLanes)
    store_some(out + i, load_some(first + i, count - i) + load_some(second + i, count - i), count - i);
}

// out[i] = inputs[0][i] + inputs[1][i] + ..., added up in float32 in this order and rounded once. `out` may be an input.
template <class T>
void sum_inputs(T* out, const void* const* inputs, int64_t num_inputs, int64_t count) {
  const T* first = static_cast<const T*>(inputs[0]);
  if (num_inputs == 2) return sum_pair(out, first, static_cast<const T*>(inputs[1]), count);
  for (int64_t i = 0; i < count; i += kLanes) {
    f32x16 sum = load_some(first + i, count - i);
    for (int64_t rank = 1; rank < num_inputs; ++rank)
      sum += load_some(static_cast<const T*>(inputs[rank]) + i, count - i);
    store_some(out + i, sum, count - i);
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
