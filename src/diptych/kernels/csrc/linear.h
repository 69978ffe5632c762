// bfloat16 linear layers over packed weights, without tile instructions.
//
// Packed order: blocks of 16 outputs; in a block, for each pair of inputs, the 16 outputs' weights of that pair side by
// side: [out / 16][in / 2][16][2]. One pair is one vector; 16 pairs (32 inputs) are one tile of the AMX path.
//
// Sums are taken in the order in which tile instructions take them (32 inputs at a time, even and odd inputs apart), so a
// row's result does not depend on which path, or how many rows beside it, it was computed with.
#pragma once

#include "thread_pool.h"
#include "vector.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kBlockOutputs = 16;
constexpr int64_t kTileInputs = 32;
constexpr int64_t kPairsPerTile = 16;

// Where a GEMM's rows come from and go to.
struct LinearRows {
  const bfloat16* x;
  void* out;
  int64_t num_rows;
  int64_t x_stride;
  int64_t out_stride;
};

ALWAYS_INLINE f32x16 with_bias(f32x16 sums, const PackedLinear& layer, int64_t output) {
  return layer.bias == nullptr ? sums : sums + load(layer.bias + output);
}

// Stores one row's float32 sums of two adjacent blocks, the first of which begins at packed column `output`.
ALWAYS_INLINE void store_block_pair(const PackedLinear& layer, const LinearRows& rows, int64_t row, int64_t output,
                                    f32x16 first, f32x16 second) {
  first = with_bias(first, layer, output);
  if (output + kBlockOutputs < layer.out_features) second = with_bias(second, layer, output + kBlockOutputs);
  if (layer.epilogue == Epilogue::kGatedGelu || layer.epilogue == Epilogue::kGatedSilu) {
    const f32x16 gate = round_to_bfloat16(first), up = round_to_bfloat16(second);
    const f32x16 activated = layer.epilogue == Epilogue::kGatedGelu ? gelu_tanh(gate) : silu(gate);
    const int64_t at = output / 2;
    store_some(static_cast<bfloat16*>(rows.out) + row * rows.out_stride + at, round_to_bfloat16(activated) * up,
               layer.num_outputs - at);
    return;
  }
  const f32x16 blocks[2] = {first, second};
  for (int64_t block = 0; block < 2; ++block) {
    const int64_t at = output + block * kBlockOutputs, left = layer.num_outputs - at;
    if (left <= 0) return;
    if (layer.epilogue == Epilogue::kFloat32)
      store_some(static_cast<float*>(rows.out) + row * rows.out_stride + at, round_to_bfloat16(blocks[block]), left);
    else
      store_some(static_cast<bfloat16*>(rows.out) + row * rows.out_stride + at, blocks[block], left);
  }
}

// Rows split into even and odd inputs as float32: [row][2][in / 2], zeros beyond the row's inputs.
ALWAYS_INLINE void split_row(float* even, float* odd, const bfloat16* x, int64_t in_features) {
  for (int64_t i = 0; i < in_features; i += kTileInputs) {
    const u32x16 pairs = load_bits(x + i);
    store(even + i / 2, from_bits(pairs << 16));
    store(odd + i / 2, from_bits(pairs & 0xffff0000u));
  }
}

// Sums of ROWS rows over two blocks; `split` is their split_row form.
template <int ROWS>
ALWAYS_INLINE void multiply_blocks(f32x16 (&sums)[ROWS][2], const float* split, const bfloat16* const (&weights)[2],
                                   int64_t in_features) {
  const int64_t half = in_features / 2;
  for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
  for (int64_t pair = 0; pair < half; pair += kPairsPerTile) {
    f32x16 even[ROWS][2] = {}, odd[ROWS][2] = {};
#pragma GCC unroll 16
    for (int64_t k = 0; k < kPairsPerTile; ++k) {
#pragma GCC unroll 2
      for (int block = 0; block < 2; ++block) {
        const bfloat16* from = weights[block] + (pair + k) * 2 * kBlockOutputs;
        const u32x16 both = load_bits(from);
        __builtin_prefetch(from + 2048);
        const f32x16 even_weight = from_bits(both << 16), odd_weight = from_bits(both & 0xffff0000u);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; ++row) {
          const float* inputs = split + row * 2 * half + pair + k;
          even[row][block] = even[row][block] + even_weight * inputs[0];
          odd[row][block] = odd[row][block] + odd_weight * inputs[half];
        }
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int block = 0; block < 2; ++block) sums[row][block] = sums[row][block] + (even[row][block] + odd[row][block]);
  }
}

template <int ROWS>
ALWAYS_INLINE void linear_row_group(const PackedLinear& layer, const LinearRows& rows, const float* split, int64_t row,
                                    int64_t output) {
  const bfloat16* first = static_cast<const bfloat16*>(layer.weight) + output * layer.in_features;
  const bool has_second = output + kBlockOutputs < layer.out_features;
  const bfloat16* const weights[2] = {first, has_second ? first + kBlockOutputs * layer.in_features : first};
  f32x16 sums[ROWS][2];
  multiply_blocks<ROWS>(sums, split + row * layer.in_features, weights, layer.in_features);
  for (int index = 0; index < ROWS; ++index)
    store_block_pair(layer, rows, row + index, output, sums[index][0], sums[index][1]);
}

// Block pairs claimed at once: about 128 KiB of weights, but enough pieces that threads end together.
ALWAYS_INLINE int64_t block_pairs_per_piece(const PackedLinear& layer, int64_t num_pairs) {
  const int64_t by_size = larger<int64_t>(1, 65536 / (2 * kBlockOutputs * layer.in_features));
  return larger<int64_t>(1, smaller(by_size, num_pairs / (4 * num_threads())));
}

inline void linear_rows(const PackedLinear& layer, const LinearRows& rows) {
  const int64_t size = layer.in_features;
  float* split = static_cast<float*>(thread_scratch(kScratchCaller, static_cast<size_t>(rows.num_rows * size) * 4));
  for (int64_t row = 0; row < rows.num_rows; ++row)
    split_row(split + row * size, split + row * size + size / 2, rows.x + row * rows.x_stride, size);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  parallel_for(num_pairs, block_pairs_per_piece(layer, num_pairs), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t output = pair * 2 * kBlockOutputs;
      int64_t row = 0;
      for (; row + 4 <= rows.num_rows; row += 4) linear_row_group<4>(layer, rows, split, row, output);
      for (; row < rows.num_rows; ++row) linear_row_group<1>(layer, rows, split, row, output);
    }
  });
}

// Reorders 16 rows of weights, [16][in] with `stride` between rows, into one packed block. Missing rows are zero.
inline void pack_block(bfloat16* packed, const bfloat16* weight, int64_t num_rows, int64_t in_features,
                       int64_t padded_inputs, int64_t stride) {
  for (int64_t i = 0; i < padded_inputs; ++i)
    for (int64_t row = 0; row < kBlockOutputs; ++row) {
      const bool is_there = row < num_rows && i < in_features;
      packed[(i / 2) * 2 * kBlockOutputs + row * 2 + i % 2] = is_there ? weight[row * stride + i] : bfloat16{0};
    }
}

// Input i of a packed layer's output `row`.
ALWAYS_INLINE bfloat16 packed_weight(const bfloat16* packed, int64_t row, int64_t i, int64_t in_features) {
  return packed[(row / kBlockOutputs) * kBlockOutputs * in_features + (i / 2) * 2 * kBlockOutputs +
                (row % kBlockOutputs) * 2 + i % 2];
}

// out[token] = packed row of its id, times scale: an embedding whose table is also the packed logits head.
inline void embed_packed(bfloat16* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens,
                         int64_t size, int64_t out_stride, float scale, bool is_scaled) {
  const bfloat16* packed = static_cast<const bfloat16*>(table.weight);
  parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      bfloat16* to = out + token * out_stride;
      for (int64_t i = 0; i < size; ++i) to[i] = packed_weight(packed, token_ids[token], i, table.in_features);
      if (!is_scaled) continue;
      for (int64_t i = 0; i < size; i += kLanes) store_some(to + i, load_some(to + i, size - i) * scale, size - i);
    }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
