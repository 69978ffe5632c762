// How packed weights are stored, and how they become pairs of bfloat16 in registers or as a tile.
#pragma once

#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kTileInputs = 32;
constexpr int64_t kPairsPerTile = kTileInputs / 2;
constexpr int64_t kBfloat16TileNbytes = kTileInputs * kBlockOutputs * 2;

struct Bfloat16Weights {
  static constexpr int64_t kTileNbytes = kBfloat16TileNbytes;

  // Pairs 2 * group and the next of a tile.
  static ALWAYS_INLINE void load_pairs(u32x16 (&pairs)[2], const char* tile, int64_t group) {
    pairs[0] = load_bits(tile + group * 128);
    pairs[1] = load_bits(tile + group * 128 + 64);
  }
};

#if defined(__AVX512VBMI__)

// The bytes of the bfloat16s of 0..127.
struct alignas(64) ByteTables {
  uint8_t low[128];
  uint8_t high[128];

  constexpr ByteTables() : low(), high() {
    for (int value = 0; value < 128; ++value) {
      const uint32_t bits = __builtin_bit_cast(uint32_t, static_cast<float>(value));
      low[value] = static_cast<uint8_t>(bits >> 16);
      high[value] = static_cast<uint8_t>(bits >> 24);
    }
  }
};
inline constexpr ByteTables kByteTables;

#endif

// Signed bytes, every one of which is a bfloat16 as it is; its output's scale comes after the sum. Two pairs are 64 bytes,
// [4][2 pairs][8], so that what a 128-bit lane holds of both can be widened in that lane.
struct Int8Weights {
  static constexpr int64_t kTileNbytes = kBfloat16TileNbytes / 2;

  static ALWAYS_INLINE void load_pairs(u32x16 (&pairs)[2], const char* tile, int64_t group) {
    const char* from = tile + group * 64;
#if defined(__AVX512VBMI__)
    const __m512i bytes = _mm512_loadu_si512(from);
    const __m512i magnitudes = _mm512_abs_epi8(bytes);
    const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(kByteTables.low), magnitudes,
                                                 _mm512_load_si512(kByteTables.low + 64));
    const __m512i unsigned_high = _mm512_permutex2var_epi8(_mm512_load_si512(kByteTables.high), magnitudes,
                                                           _mm512_load_si512(kByteTables.high + 64));
    constexpr int kOrAnd = 0xf8;  // a | (b & c)
    const __m512i high = _mm512_ternarylogic_epi32(unsigned_high, bytes, _mm512_set1_epi8(-128), kOrAnd);
    pairs[0] = (u32x16)_mm512_unpacklo_epi8(low, high);
    pairs[1] = (u32x16)_mm512_unpackhi_epi8(low, high);
#else
    for (int pair = 0; pair < 2; ++pair) {
      typedef int8_t i8x32 __attribute__((vector_size(32)));
      i8x32 bytes;
      for (int lane = 0; lane < 4; ++lane)
        __builtin_memcpy(reinterpret_cast<char*>(&bytes) + lane * 8, from + lane * 16 + pair * 8, 8);
      typedef int16_t i16x32 __attribute__((vector_size(64)));
      const i32x16 both = (i32x16)__builtin_convertvector(bytes, i16x32);
      const u32x16 even = (u32x16)__builtin_convertvector((both << 16) >> 16, f32x16);
      const u32x16 odd = (u32x16)__builtin_convertvector(both >> 16, f32x16);
      pairs[pair] = (even >> 16) | odd;
    }
#endif
  }

  // Place of one weight of a block: input i, output `row` of 16.
  static ALWAYS_INLINE int64_t offset(int64_t row, int64_t i) {
    const int64_t at = row * 2 + i % 2;  // within its pair
    return i / 4 * 64 + at / 8 * 16 + i / 2 % 2 * 8 + at % 8;
  }
};

}  // namespace DIPTYCH_ISA
}  // namespace diptych
