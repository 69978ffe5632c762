// Linear layers with int8 weights, one scale an output, and bfloat16 inputs quantised on the way in: int8 with one scale for
// every 64 inputs of a row. (A scale for a whole row would cost this family of models ten times as much accuracy.)
//
// Weights are stored plus 128, as unsigned bytes, because the vector instruction multiplies unsigned by signed; 128 times
// the sum of a row's 64 inputs is taken off again. Packed order: [out / 16][in / 4][16][4].
#pragma once

#include "linear.h"

#if DIPTYCH_AMX
#include "amx_linear.h"
#endif

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kScaleInputs = 64;
constexpr int64_t kInputsPerGroup = 4;
constexpr int64_t kGroupsPerScale = kScaleInputs / kInputsPerGroup;

// Quantised rows: values [row][in], and for every 64 of them a scale and minus 128 times their sum, [row][in / 64].
struct QuantizedRows {
  int8_t* values;
  float* scales;
  int32_t* corrections;
  int64_t in_features;

  int64_t num_scales() const { return in_features / kScaleInputs; }
};

ALWAYS_INLINE f32x16 magnitude(f32x16 x) { return from_bits((u32x16)x & 0x7fffffffu); }

// Quantises 64 inputs to -127..127, to nearest, ties to even.
ALWAYS_INLINE void quantize_64(int8_t* values, float* scale, int32_t* correction, const bfloat16* x) {
  f32x16 parts[4];
  f32x16 largest = {};
  for (int part = 0; part < 4; ++part) {
    parts[part] = load(x + part * kLanes);
    largest = maximum(magnitude(parts[part]), largest);
  }
  const float highest = max_lanes(largest);
  *scale = highest / 127.0f;
  const float inverse = highest > 0.0f ? 127.0f / highest : 0.0f;
  const f32x16 magic = splat(12582912.0f);
  i32x16 sums = {};
  for (int part = 0; part < 4; ++part) {
    const i32x16 rounded_part = (i32x16)(parts[part] * inverse + magic) - (i32x16)magic;
    sums += rounded_part;
    for (int lane = 0; lane < kLanes; ++lane) values[part * kLanes + lane] = static_cast<int8_t>(rounded_part[lane]);
  }
  int32_t total = 0;
  for (int lane = 0; lane < kLanes; ++lane) total += sums[lane];
  *correction = -128 * total;
}

// Rows of x, quantised into scratch; `padded_rows` of values exist, the last ones zero.
inline QuantizedRows quantize_rows(const LinearRows& rows, int64_t in_features, int64_t padded_rows) {
  const int64_t num_scales = in_features / kScaleInputs;
  const size_t nbytes = static_cast<size_t>(padded_rows * (in_features + num_scales * 8));
  char* memory = static_cast<char*>(thread_scratch(kScratchCaller, nbytes));
  float* scales = reinterpret_cast<float*>(memory + padded_rows * in_features);
  const QuantizedRows quantized = {reinterpret_cast<int8_t*>(memory), scales,
                                   reinterpret_cast<int32_t*>(scales + padded_rows * num_scales), in_features};
  parallel_for(padded_rows, larger<int64_t>(1, 8192 / in_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      int8_t* values = quantized.values + row * in_features;
      if (row >= rows.num_rows) {
        __builtin_memset(values, 0, static_cast<size_t>(in_features));
        __builtin_memset(quantized.scales + row * num_scales, 0, static_cast<size_t>(num_scales) * 4);
        __builtin_memset(quantized.corrections + row * num_scales, 0, static_cast<size_t>(num_scales) * 4);
        continue;
      }
      for (int64_t index = 0; index < num_scales; ++index) {
        const int64_t at = row * num_scales + index;
        quantize_64(values + index * kScaleInputs, quantized.scales + at, quantized.corrections + at,
                    rows.x + row * rows.x_stride + index * kScaleInputs);
      }
    }
  });
  return quantized;
}

// sums + dot products of four unsigned weights with four signed inputs, lane by lane; the inputs are the same in all lanes.
ALWAYS_INLINE i32x16 add_dots(i32x16 sums, u32x16 weights, const int8_t* inputs) {
#if defined(__AVX512VNNI__)
  int32_t packed;
  __builtin_memcpy(&packed, inputs, sizeof packed);
  return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(packed));
#else
  for (int i = 0; i < kInputsPerGroup; ++i) sums += (i32x16)((weights >> (8 * i)) & 0xffu) * static_cast<int32_t>(inputs[i]);
  return sums;
#endif
}

ALWAYS_INLINE f32x16 as_float(i32x16 x) { return __builtin_convertvector(x, f32x16); }

ALWAYS_INLINE void store_scaled(const PackedLinear& layer, const LinearRows& rows, int64_t row, int64_t output,
                                f32x16 first, f32x16 second) {
  const bool has_second = output + kBlockOutputs < layer.out_features;
  const f32x16 second_scale = has_second ? load(layer.scales + output + kBlockOutputs) : f32x16{};
  store_block_pair(layer, rows, row, output, first * load(layer.scales + output), second * second_scale);
}

// ROWS rows against the two blocks that begin at packed column `output`.
template <int ROWS>
ALWAYS_INLINE void quantized_row_group(const PackedLinear& layer, const LinearRows& rows, const QuantizedRows& x,
                                       int64_t row, int64_t output) {
  const uint8_t* first = static_cast<const uint8_t*>(layer.weight) + output * layer.in_features;
  const bool has_second = output + kBlockOutputs < layer.out_features;
  const uint8_t* const blocks[2] = {first, has_second ? first + kBlockOutputs * layer.in_features : first};
  f32x16 totals[ROWS][2] = {};
  for (int64_t index = 0; index < x.num_scales(); ++index) {
    i32x16 sums[ROWS][2];
    for (int i = 0; i < ROWS; ++i)
      sums[i][0] = sums[i][1] = i32x16{} + x.corrections[(row + i) * x.num_scales() + index];
#pragma GCC unroll 16
    for (int64_t group = 0; group < kGroupsPerScale; ++group)
      for (int block = 0; block < 2; ++block) {
        const uint8_t* from = blocks[block] + (index * kGroupsPerScale + group) * 64;
        __builtin_prefetch(from + 2048);
        const u32x16 weights = load_bits(from);
        for (int i = 0; i < ROWS; ++i) {
          const int8_t* inputs = x.values + (row + i) * x.in_features + index * kScaleInputs + group * kInputsPerGroup;
          sums[i][block] = add_dots(sums[i][block], weights, inputs);
        }
      }
    for (int i = 0; i < ROWS; ++i)
      for (int block = 0; block < 2; ++block)
        totals[i][block] = totals[i][block] + as_float(sums[i][block]) * x.scales[(row + i) * x.num_scales() + index];
  }
  for (int i = 0; i < ROWS; ++i) store_scaled(layer, rows, row + i, output, totals[i][0], totals[i][1]);
}

inline void quantized_rows(const PackedLinear& layer, const LinearRows& rows) {
  const QuantizedRows x = quantize_rows(rows, layer.in_features, rows.num_rows);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  parallel_for(num_pairs, block_pairs_per_piece(layer, num_pairs), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    for (int64_t pair = begin; pair < end; ++pair) {
      int64_t row = 0;
      for (; row + 4 <= rows.num_rows; row += 4) quantized_row_group<4>(layer, rows, x, row, pair * 2 * kBlockOutputs);
      for (; row < rows.num_rows; ++row) quantized_row_group<1>(layer, rows, x, row, pair * 2 * kBlockOutputs);
    }
  });
}

#if DIPTYCH_AMX

// Adds 64 inputs' worth of a 16 x 32 block: two tiles of int32 dots, corrected and scaled, onto the float32 sums.
ALWAYS_INLINE void add_scaled_tiles(float* totals, const int32_t* dots, const QuantizedRows& x, int64_t row,
                                    int64_t index) {
  for (int64_t i = 0; i < kTileRows; ++i) {
    const int64_t at = (row + i) * x.num_scales() + index;
    for (int64_t block = 0; block < 2; ++block) {
      i32x16 sums;
      __builtin_memcpy(&sums, dots + block * kTileElements + i * 16, sizeof sums);
      float* total = totals + block * kTileElements + i * 16;
      store(total, load(total) + as_float(sums + x.corrections[at]) * x.scales[at]);
    }
  }
}

// A 16 x 32 block of the result, for rows row..row + 15.
ALWAYS_INLINE void quantized_tile_pair(const PackedLinear& layer, const LinearRows& rows, const QuantizedRows& x,
                                       int64_t row, int64_t output) {
  alignas(64) float totals[2 * kTileElements] = {};
  alignas(64) int32_t dots[2 * kTileElements];
  const uint8_t* first = static_cast<const uint8_t*>(layer.weight) + output * layer.in_features;
  const bool has_second = output + kBlockOutputs < layer.out_features;
  const uint8_t* second = has_second ? first + kBlockOutputs * layer.in_features : first;
  const int8_t* values = x.values + row * x.in_features;
  for (int64_t index = 0; index < x.num_scales(); ++index) {
    prefetch_tile(reinterpret_cast<const char*>(first) + index * 1024);
    prefetch_tile(reinterpret_cast<const char*>(second) + index * 1024);
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_loadd(4, values + index * kScaleInputs, x.in_features);
    _tile_loadd(6, first + index * 1024, 64);
    _tile_dpbsud(0, 4, 6);
    _tile_loadd(7, second + index * 1024, 64);
    _tile_dpbsud(1, 4, 7);
    _tile_stored(0, dots, 64);
    _tile_stored(1, dots + kTileElements, 64);
    tile_fence();
    add_scaled_tiles(totals, dots, x, row, index);
  }
  for (int64_t i = 0; i < smaller(kTileRows, rows.num_rows - row); ++i)
    store_scaled(layer, rows, row + i, output, load(totals + i * 16), load(totals + kTileElements + i * 16));
}

inline void quantized_tiles(const PackedLinear& layer, const LinearRows& rows) {
  const QuantizedRows x = quantize_rows(rows, layer.in_features, round_up(rows.num_rows, kTileRows));
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  parallel_for(num_pairs, block_pairs_per_piece(layer, num_pairs), [&](int64_t begin, int64_t end) {
    const TileScope tiles;
    const FlushDenormals flush;
    for (int64_t pair = begin; pair < end; ++pair)
      for (int64_t row = 0; row < rows.num_rows; row += kTileRows)
        quantized_tile_pair(layer, rows, x, row, pair * 2 * kBlockOutputs);
  });
}

#endif

// Rows of an int8 table, widened and scaled: a quantised layer as an embedding.
inline void embed_quantized(bfloat16* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens,
                            int64_t size, int64_t out_stride, float scale, bool is_scaled) {
  const uint8_t* packed = static_cast<const uint8_t*>(table.weight);
  parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t row = token_ids[token];
      const uint8_t* block = packed + row / kBlockOutputs * kBlockOutputs * table.in_features + row % kBlockOutputs * 4;
      bfloat16* to = out + token * out_stride;
      for (int64_t i = 0; i < size; i += kLanes) {
        f32x16 weights = {};
        for (int64_t lane = 0; lane < smaller(kLanes, size - i); ++lane)
          weights[lane] = static_cast<float>(block[(i + lane) / 4 * 64 + (i + lane) % 4]) - 128.0f;
        const f32x16 row_values = round_to_bfloat16(weights * table.scales[row]);
        store_some(to + i, is_scaled ? row_values * scale : row_values, size - i);
      }
    }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
