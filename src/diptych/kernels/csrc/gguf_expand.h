// Packed GGUF blocks (gguf_format.h) to floats: codes to the integers that they stand for, which are exact in bfloat16, and the
// scales that these are multiplied by afterwards.
#pragma once

#include "gguf_format.h"
#include "linear.h"

namespace diptych {
namespace DIPTYCH_ISA {

typedef uint16_t u16x32 __attribute__((vector_size(64)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

constexpr int kPairsPerCell = kCellInputs / 2;

// A pair of inputs of 16 outputs.
struct PairValues {
  f32x16 even;
  f32x16 odd;
};

// Two bfloat16 a lane, the even input below, of values that bfloat16 holds exactly.
ALWAYS_INLINE u32x16 joined(PairValues pair) { return ((u32x16)pair.even >> 16) | ((u32x16)pair.odd & 0xffff0000u); }
ALWAYS_INLINE PairValues separated(u32x16 words) {
  return {from_bits(words << 16), from_bits(words & 0xffff0000u)};
}

ALWAYS_INLINE f32x16 signed_bytes(const uint8_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
#else
  i8x16 bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  return __builtin_convertvector(__builtin_convertvector(bytes, i32x16), f32x16);
#endif
}

ALWAYS_INLINE f32x16 halves(const uint8_t* from) {
#if defined(__AVX512F__)
  return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#else
  float16 values[kLanes];
  __builtin_memcpy(values, from, sizeof values);
  return load(values);
#endif
}

ALWAYS_INLINE PairValues byte_pair(const uint8_t* cell, int pair) {
  return {signed_bytes(cell + pair * 32), signed_bytes(cell + pair * 32 + 16)};
}

#if defined(__AVX512BW__)

// bfloat16 of every code's value, over and over: a lookup takes five bits of an index, more than some codes have.
template <GgufFormat FORMAT>
struct alignas(64) ValueTable {
  uint16_t bits[64] = {};
  constexpr ValueTable() {
    for (int index = 0; index < 64; ++index) {
      const int code = index % (1 << shape_of(FORMAT).code_bits);
      bits[index] = static_cast<uint16_t>(__builtin_bit_cast(uint32_t, static_cast<float>(value_of(FORMAT, code))) >> 16);
    }
  }
};
template <GgufFormat FORMAT>
constexpr ValueTable<FORMAT> kValueTable;

ALWAYS_INLINE u16x32 load_words(const void* from) {
  u16x32 words;
  __builtin_memcpy(&words, from, sizeof words);
  return words;
}

// A cell's vector, shifted right, or left by less than nothing.
ALWAYS_INLINE u16x32 shifted(const uint8_t* cell, int vector, int shift) {
  const u16x32 words = load_words(cell + vector * kVectorNbytes);
  return shift < 0 ? words << -shift : words >> shift;
}

// The bits of `a` where the mask has ones, else those of `b`.
ALWAYS_INLINE u16x32 selected(uint16_t mask, u16x32 a, u16x32 b) {
  constexpr int select = 0xca;  // mask ? a : b
  return (u16x32)_mm512_ternarylogic_epi32(_mm512_set1_epi16(static_cast<short>(mask)), (__m512i)a, (__m512i)b, select);
}

// Codes of a pair in the low bits of 32 words; rubbish above them.
template <int BITS>
ALWAYS_INLINE u16x32 code_words(const uint8_t* cell, int pair) {
  constexpr CodePlaces places = {BITS};
  if (places.is_whole(pair)) return shifted(cell, places.vector(pair), places.shift(pair));
  if constexpr (BITS == 6) {
    const int index = pair - places.num_whole();
    const u16x32 low = shifted(cell, places.low_vector(index), places.kLowShift);
    const u16x32 high = shifted(cell, places.high_vector(index), places.high_shift(index) - places.kLowBits);
    return selected(15, low, high);
  }
  u16x32 codes = shifted(cell, 0, 15);
#pragma GCC unroll 4
  for (int bit = 1; bit < BITS; ++bit) codes = selected(static_cast<uint16_t>(1 << bit), shifted(cell, bit, 15 - bit), codes);
  return codes;
}

// The values of a pair as bfloat16, as `joined` would have them.
template <GgufFormat FORMAT>
ALWAYS_INLINE u32x16 pair_words(const uint8_t* cell, int pair) {
  constexpr int bits = shape_of(FORMAT).code_bits;
  if constexpr (bits == 8) return joined(byte_pair(cell, pair));
  else {
    const __m512i codes = (__m512i)code_words<bits>(cell, pair);
    const __m512i low = (__m512i)load_words(kValueTable<FORMAT>.bits);
    if constexpr (bits < 6) return (u32x16)_mm512_permutexvar_epi16(codes, low);
    else return (u32x16)_mm512_permutex2var_epi16(low, codes, (__m512i)load_words(kValueTable<FORMAT>.bits + 32));
  }
}

template <GgufFormat FORMAT>
ALWAYS_INLINE PairValues pair_values(const uint8_t* cell, int pair) {
  if constexpr (shape_of(FORMAT).code_bits == 8) return byte_pair(cell, pair);
  else return separated(pair_words<FORMAT>(cell, pair));
}

#else

// Bits `shift` and up, `count` of them, of the words of 16 outputs in a cell's vector; parity says which of a pair's inputs.
ALWAYS_INLINE u32x16 lane_bits(const uint8_t* cell, int vector, int parity, int shift, int count) {
  return load_bits(cell + vector * kVectorNbytes) >> (parity * 16 + shift) & ((1u << count) - 1);
}

// Codes of one input of 16 outputs.
template <int BITS>
ALWAYS_INLINE i32x16 lane_codes(const uint8_t* cell, int pair, int parity) {
  constexpr CodePlaces places = {BITS};
  if (places.is_whole(pair)) return (i32x16)lane_bits(cell, places.vector(pair), parity, places.shift(pair), BITS);
  if constexpr (BITS == 6) {
    const int index = pair - places.num_whole();
    const u32x16 low = lane_bits(cell, places.low_vector(index), parity, places.kLowShift, places.kLowBits);
    const u32x16 high = lane_bits(cell, places.high_vector(index), parity, places.high_shift(index), BITS - places.kLowBits);
    return (i32x16)(low | high << places.kLowBits);
  }
  u32x16 codes = {};
#pragma GCC unroll 5
  for (int bit = 0; bit < BITS; ++bit) codes |= lane_bits(cell, bit, parity, 15, 1) << bit;
  return (i32x16)codes;
}

template <GgufFormat FORMAT>
ALWAYS_INLINE f32x16 lane_values(const uint8_t* cell, int pair, int parity) {
  i32x16 values = lane_codes<shape_of(FORMAT).code_bits>(cell, pair, parity);
  if constexpr (FORMAT == GgufFormat::kIQ4_NL || FORMAT == GgufFormat::kIQ4_XS)
    for (int lane = 0; lane < kLanes; ++lane) values[lane] = value_of(FORMAT, values[lane]);
  else values += value_of(FORMAT, 0);
  return __builtin_convertvector(values, f32x16);
}

template <GgufFormat FORMAT>
ALWAYS_INLINE PairValues pair_values(const uint8_t* cell, int pair) {
  if constexpr (shape_of(FORMAT).code_bits == 8) return byte_pair(cell, pair);
  else return {lane_values<FORMAT>(cell, pair, 0), lane_values<FORMAT>(cell, pair, 1)};
}

template <GgufFormat FORMAT>
ALWAYS_INLINE u32x16 pair_words(const uint8_t* cell, int pair) {
  return joined(pair_values<FORMAT>(cell, pair));
}

#endif

// What the integers of 16 outputs are multiplied by, and what is added for every input.
struct ScaleOffset {
  f32x16 scale;
  f32x16 offset;
};

// Those of the `index`-th 16 or 32 inputs. Products of the K formats' factors are exact.
template <GgufFormat FORMAT>
ALWAYS_INLINE ScaleOffset scale_at(const uint8_t* scales, int64_t index) {
  constexpr FormatShape shape = shape_of(FORMAT);
  constexpr int64_t half_nbytes = kGgufBlockOutputs * 2;
  if constexpr (!shape.has_super_scale) {
    const uint8_t* at = scales + index * scale_group_nbytes(shape);
    return {halves(at), shape.has_offset ? halves(at + half_nbytes) : f32x16{}};
  } else {
    constexpr int64_t per_group = kSuperInputs / shape.scale_inputs;
    const uint8_t* group = scales + index / per_group * scale_group_nbytes(shape);
    const uint8_t* small = group + (shape.has_offset ? 2 : 1) * half_nbytes + index % per_group * kGgufBlockOutputs;
    const f32x16 scale = halves(group) * signed_bytes(small);
    if constexpr (!shape.has_offset) return {scale, f32x16{}};
    else return {scale, -(halves(group + half_nbytes) * signed_bytes(small + per_group * kGgufBlockOutputs))};
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
