// RMS norms over rows, alone, fused with the residual stream, or fused with the rotation of heads. Every value is rounded
// where the torch reference (layers/norm.py, layers/rotary.py) rounds it.
#pragma once

#include "thread_pool.h"
#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kElementsPerPiece = 16384;  // work that is worth handing to another thread

ALWAYS_INLINE int64_t rows_per_piece(int64_t row_size) { return larger<int64_t>(1, kElementsPerPiece / row_size); }

template <class T>
ALWAYS_INLINE float inverse_rms(const T* x, int64_t size, float eps) {
  f32x16 sums[2] = {};
  for (int64_t i = 0; i < size; i += kLanes) {
    const f32x16 v = load_some(x + i, size - i);
    f32x16& sum = sums[(i / kLanes) & 1];
    sum = sum + v * v;
  }
  return 1.0f / __builtin_sqrtf(sum_lanes(sums[0] + sums[1]) / static_cast<float>(size) + eps);
}

// Lanes i.. of x, normalised and weighted, rounded to T.
template <class T>
ALWAYS_INLINE f32x16 normalized(const T* x, int64_t i, float inverse, const NormWeights& norm, int64_t head) {
  const int64_t left = norm.size - i;
  const int64_t at = head * norm.weight_stride + i;
  const f32x16 v = load_some(x + i, left) * inverse;
  if (norm.weight_is_float32) return rounded<T>(v * load_some(static_cast<const float*>(norm.weight) + at, left));
  return rounded<T>(rounded<T>(v) * load_some(static_cast<const T*>(norm.weight) + at, left));
}

// hidden += x.
template <class T>
void add_rows(T* hidden, const T* x, int64_t size, int64_t num_rows, int64_t hidden_stride, int64_t x_stride) {
  parallel_for(num_rows, rows_per_piece(size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      for (int64_t i = 0; i < size; i += kLanes) {
        T* to = hidden + row * hidden_stride + i;
        store_some(to, load_some(to, size - i) + load_some(x + row * x_stride + i, size - i), size - i);
      }
  });
}

// out = norm(x).
template <class T>
void rms_norm_rows(T* out, const T* x, const NormWeights& norm, int64_t num_rows, int64_t out_stride, int64_t x_stride) {
  parallel_for(num_rows, rows_per_piece(norm.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * x_stride;
      const float inverse = inverse_rms(from, norm.size, norm.eps);
      for (int64_t i = 0; i < norm.size; i += kLanes)
        store_some(out + row * out_stride + i, normalized(from, i, inverse, norm, 0), norm.size - i);
    }
  });
}

// hidden += norm(x): the residual step of a model that normalises a block's output.
template <class T>
void add_normalized_rows(T* hidden, const T* x, const NormWeights& norm, int64_t num_rows, int64_t hidden_stride,
                         int64_t x_stride) {
  parallel_for(num_rows, rows_per_piece(norm.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* from = x + row * x_stride;
      T* stream = hidden + row * hidden_stride;
      const float inverse = inverse_rms(from, norm.size, norm.eps);
      for (int64_t i = 0; i < norm.size; i += kLanes) {
        const int64_t left = norm.size - i;
        store_some(stream + i, load_some(stream + i, left) + normalized(from, i, inverse, norm, 0), left);
      }
    }
  });
}

// hidden += x; out = norm(hidden): the residual step of a model that normalises a block's input.
template <class T>
void add_then_norm_rows(T* out, T* hidden, const T* x, const NormWeights& norm, int64_t num_rows, int64_t out_stride,
                        int64_t hidden_stride, int64_t x_stride) {
  parallel_for(num_rows, rows_per_piece(norm.size), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      T* stream = hidden + row * hidden_stride;
      for (int64_t i = 0; i < norm.size; i += kLanes) {
        const int64_t left = norm.size - i;
        store_some(stream + i, load_some(stream + i, left) + load_some(x + row * x_stride + i, left), left);
      }
      const float inverse = inverse_rms(stream, norm.size, norm.eps);
      for (int64_t i = 0; i < norm.size; i += kLanes)
        store_some(out + row * out_stride + i, normalized(stream, i, inverse, norm, 0), norm.size - i);
    }
  });
}

// Rotates one head in place: i pairs with i + size / 2; cos and signed_sin are [size].
template <class T>
ALWAYS_INLINE void rotate_head(T* head, const T* cos, const T* signed_sin, int64_t size) {
  const int64_t half = size / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const f32x16 low = load_some(head + i, left), high = load_some(head + half + i, left);
    const f32x16 turned_low = rounded<T>(low * load_some(cos + i, left)) + rounded<T>(high * load_some(signed_sin + i, left));
    const f32x16 turned_high =
        rounded<T>(high * load_some(cos + half + i, left)) + rounded<T>(low * load_some(signed_sin + half + i, left));
    store_some(head + i, turned_low, left);
    store_some(head + half + i, turned_high, left);
  }
}

// Normalises (unless weight is null) and rotates the heads of every token in place.
template <class T>
void norm_and_rotate_heads(T* heads, const T* cos, const T* signed_sin, const NormWeights& norm, int64_t num_tokens,
                           int64_t num_heads, int64_t token_stride) {
  const int64_t size = norm.size;
  parallel_for(num_tokens, rows_per_piece(size * num_heads), [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      for (int64_t index = 0; index < num_heads; ++index) {
        T* head = heads + token * token_stride + index * size;
        if (norm.weight != nullptr) {
          const float inverse = inverse_rms(head, size, norm.eps);
          for (int64_t i = 0; i < size; i += kLanes)
            store_some(head + i, normalized(head, i, inverse, norm, index), size - i);
        }
        rotate_head(head, cos + token * size, signed_sin + token * size, size);
      }
    }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
