// Sixteen float32 lanes in the compiler's own vector types, and the arithmetic that kernels share. Compiled once for each
// instruction set, in a namespace of its own: two copies of an inline function built with different flags must never be
// taken for one another. For the same reason nothing here comes from the standard library.
#pragma once

#include <cstdint>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "abi.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace diptych {
namespace DIPTYCH_ISA {

typedef float f32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

constexpr int64_t kLanes = 16;

// Storage types of tensors. bfloat16 is the upper half of a float32.
struct bfloat16 {
  uint16_t bits;
};
typedef _Float16 float16;

// Denormals count as zero while it lives, as in the tile instructions. Exponentials make many, and each would cost a detour
// of some hundred cycles.
class FlushDenormals {
 public:
#if defined(__x86_64__)
  FlushDenormals() : saved_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(saved_ | 0x8040); }
  ~FlushDenormals() { __builtin_ia32_ldmxcsr(saved_); }

 private:
  unsigned saved_;
#else
  FlushDenormals() {}
#endif
};

template <class T>
ALWAYS_INLINE T smaller(T a, T b) {
  return a < b ? a : b;
}
template <class T>
ALWAYS_INLINE T larger(T a, T b) {
  return a > b ? a : b;
}
ALWAYS_INLINE int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
ALWAYS_INLINE int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

ALWAYS_INLINE f32x16 splat(float value) { return value - f32x16{}; }
ALWAYS_INLINE f32x16 from_bits(u32x16 bits) { return (f32x16)bits; }
ALWAYS_INLINE f32x16 widen(u16x16 halves) { return from_bits(__builtin_convertvector(halves, u32x16) << 16); }

// Round to nearest, ties to even; NaN stays NaN. The result is in the lower 16 bits of each lane.
ALWAYS_INLINE u32x16 bfloat16_bits(f32x16 x) {
  const u32x16 bits = (u32x16)x;
  const u32x16 rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  return (u32x16)(x == x ? (i32x16)rounded : (i32x16)((bits >> 16) | 0x40));
}
// The same as 16 halves.
ALWAYS_INLINE u16x16 to_bfloat16(f32x16 x) {
#if defined(__AVX512BF16__)  // one instruction; it takes denormals for zero
  return (u16x16)_mm512_cvtneps_pbh((__m512)x);
#else
  return __builtin_convertvector(bfloat16_bits(x), u16x16);
#endif
}
ALWAYS_INLINE f32x16 round_to_bfloat16(f32x16 x) { return widen(to_bfloat16(x)); }

ALWAYS_INLINE f32x16 load(const float* from) {
  f32x16 x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
ALWAYS_INLINE f32x16 load(const bfloat16* from) {
  u16x16 x;
  __builtin_memcpy(&x, from, sizeof x);
  return widen(x);
}
ALWAYS_INLINE f32x16 load(const float16* from) {
  f32x16 x;
  for (int lane = 0; lane < kLanes; ++lane) x[lane] = static_cast<float>(from[lane]);
  return x;
}
ALWAYS_INLINE u32x16 load_bits(const void* from) {
  u32x16 x;
  __builtin_memcpy(&x, from, sizeof x);
  return x;
}
ALWAYS_INLINE void store(float* to, f32x16 x) { __builtin_memcpy(to, &x, sizeof x); }
ALWAYS_INLINE void store(bfloat16* to, f32x16 x) {
  const u16x16 halves = to_bfloat16(x);
  __builtin_memcpy(to, &halves, sizeof halves);
}
ALWAYS_INLINE void store(float16* to, f32x16 x) {
  for (int lane = 0; lane < kLanes; ++lane) to[lane] = static_cast<float16>(x[lane]);
}

// Incomplete vectors are rare: kept out of the loops that inline the complete ones.
template <class T>
__attribute__((noinline, cold)) void copy_some(T* to, const T* from, int64_t count) {
  __builtin_memcpy(to, from, static_cast<size_t>(count) * sizeof(T));
}

// The first `count` lanes; the others are zero, and their memory is not touched.
template <class T>
ALWAYS_INLINE f32x16 load_some(const T* from, int64_t count) {
  if (__builtin_expect(count >= kLanes, 1)) return load(from);
  T padded[kLanes] = {};
  copy_some(padded, from, count);
  return load(padded);
}
template <class T>
ALWAYS_INLINE void store_some(T* to, f32x16 x, int64_t count) {
  if (__builtin_expect(count >= kLanes, 1)) return store(to, x);
  T padded[kLanes];
  store(padded, x);
  copy_some(to, padded, count);
}

// What a value becomes by being stored as T and read again.
template <class T>
ALWAYS_INLINE f32x16 rounded(f32x16 x);
template <>
ALWAYS_INLINE f32x16 rounded<float>(f32x16 x) {
  return x;
}
template <>
ALWAYS_INLINE f32x16 rounded<bfloat16>(f32x16 x) {
  return round_to_bfloat16(x);
}
template <>
ALWAYS_INLINE f32x16 rounded<float16>(f32x16 x) {
  float16 halves[kLanes];
  store(halves, x);
  return load(halves);
}

// e^x to about 1e-7 relative: e^x = 2^n e^f with |f| <= ln 2 / 2.
ALWAYS_INLINE f32x16 exponential_polynomial(f32x16 f) {
  f32x16 p = splat(1.9875691500e-4f);
  p = p * f + 1.3981999507e-3f;
  p = p * f + 8.3334519073e-3f;
  p = p * f + 4.1665795894e-2f;
  p = p * f + 1.6666665459e-1f;
  p = p * f + 5.0000001201e-1f;
  return p * (f * f) + f + 1.0f;
}
constexpr float kLog2E = 1.44269504089f;
constexpr float kLn2High = 0.693359375f;
constexpr float kLn2Low = -2.12194440e-4f;

ALWAYS_INLINE f32x16 minimum(f32x16 a, f32x16 b) { return a < b ? a : b; }
ALWAYS_INLINE f32x16 maximum(f32x16 a, f32x16 b) { return a > b ? a : b; }

// Lane sums and maxima as a fixed tree, the same on every instruction set.
ALWAYS_INLINE float sum_lanes(f32x16 x) {
  typedef float f32x8 __attribute__((vector_size(32)));
  typedef float f32x4 __attribute__((vector_size(16)));
  f32x8 halves[2];
  __builtin_memcpy(halves, &x, sizeof x);
  const f32x8 eight = halves[0] + halves[1];
  f32x4 quarters[2];
  __builtin_memcpy(quarters, &eight, sizeof eight);
  const f32x4 four = quarters[0] + quarters[1];
  return (four[0] + four[2]) + (four[1] + four[3]);
}
ALWAYS_INLINE float max_lanes(f32x16 x) {
  float best = x[0];
  for (int lane = 1; lane < kLanes; ++lane) best = larger(best, x[lane]);
  return best;
}

// e^x; NaN stays NaN, and what would be denormal may be zero.
ALWAYS_INLINE f32x16 exponential(f32x16 x) {
#if defined(__AVX512F__)
  const __m512 clamped = _mm512_min_ps(_mm512_set1_ps(130.0f), _mm512_max_ps(_mm512_set1_ps(-130.0f), (__m512)x));
  const f32x16 n = (f32x16)_mm512_roundscale_ps(_mm512_mul_ps(clamped, _mm512_set1_ps(kLog2E)), _MM_FROUND_TO_NEAREST_INT);
  const f32x16 f = ((f32x16)clamped - n * kLn2High) - n * kLn2Low;
  return (f32x16)_mm512_scalef_ps((__m512)exponential_polynomial(f), (__m512)n);
#else
  const f32x16 magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer in the low bits
  const f32x16 clamped = minimum(maximum(x, splat(-87.3f)), splat(88.3f));
  const f32x16 shifted = clamped * kLog2E + magic;
  const f32x16 n = shifted - magic;
  const f32x16 f = (clamped - n * kLn2High) - n * kLn2Low;
  const f32x16 scaled = from_bits((u32x16)exponential_polynomial(f) + (((u32x16)shifted - (u32x16)magic) << 23));
  const f32x16 bounded = x > splat(-87.3f) ? scaled : f32x16{};
  return x == x ? bounded : x;
#endif
}

// a / b to about one unit in the last place, for b whose reciprocal is a normal number.
ALWAYS_INLINE f32x16 quotient(f32x16 a, f32x16 b) {
#if defined(__AVX512F__)
  const f32x16 estimate = (f32x16)_mm512_rcp14_ps((__m512)b);
  return a * (estimate * (2.0f - b * estimate));
#else
  return a / b;
#endif
}

ALWAYS_INLINE f32x16 tanh(f32x16 x) {
  const f32x16 e = exponential(minimum(x, splat(20.0f)) * 2.0f);
  return 1.0f - 2.0f / (e + 1.0f);
}
// 0.5 x (1 + tanh(u)) is x / (1 + e^(-2u)): one division less.
ALWAYS_INLINE f32x16 gelu_tanh(f32x16 x) {
  const f32x16 doubled = x * (1.5957691216057308f + 0.07135481282748573f * (x * x));
  return quotient(x, 1.0f + exponential(minimum(-doubled, splat(80.0f))));
}
ALWAYS_INLINE f32x16 silu(f32x16 x) { return quotient(x, 1.0f + exponential(minimum(-x, splat(80.0f)))); }

}  // namespace DIPTYCH_ISA
}  // namespace diptych
