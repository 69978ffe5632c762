// Packing a weight, and reading rows of it back: a packed table as an embedding.
#pragma once

#include "thread_pool.h"
#include "vector.h"
#include "weights.h"

namespace diptych {
namespace DIPTYCH_ISA {

// Reorders 16 rows of weights, [16][in] with `stride` between rows, into one packed block. Missing rows are zero.
inline void pack_block(bfloat16* packed, const bfloat16* weight, int64_t num_rows, int64_t in_features,
                       int64_t padded_inputs, int64_t stride) {
  for (int64_t i = 0; i < padded_inputs; ++i)
    for (int64_t row = 0; row < kBlockOutputs; ++row) {
      const bool is_there = row < num_rows && i < in_features;
      packed[(i / 2) * 2 * kBlockOutputs + row * 2 + i % 2] = is_there ? weight[row * stride + i] : bfloat16{0};
    }
}

// Sixteen inputs, from the i-th on, of a packed layer's output `row`.
ALWAYS_INLINE f32x16 packed_inputs(const PackedLinear& table, int64_t row, int64_t i) {
  f32x16 inputs;
  const int64_t block = row / kBlockOutputs * kBlockOutputs * table.in_features, in_block = row % kBlockOutputs;
  if (table.scales != nullptr) {
    const int8_t* from = static_cast<const int8_t*>(table.weight) + block;
    for (int64_t lane = 0; lane < kLanes; ++lane) inputs[lane] = from[Int8Weights::offset(in_block, i + lane)];
    return round_to_bfloat16(inputs * table.scales[row]);
  }
  const bfloat16* from = static_cast<const bfloat16*>(table.weight) + block + in_block * 2;
  u16x16 halves;
  for (int64_t lane = 0; lane < kLanes; ++lane) halves[lane] = from[(i + lane) / 2 * 2 * kBlockOutputs + (i + lane) % 2].bits;
  return widen(halves);
}

// out[token] = packed row of its id, times scale.
inline void embed_packed(bfloat16* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens,
                         int64_t size, int64_t out_stride, float scale, bool is_scaled) {
  parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token)
      for (int64_t i = 0; i < size; i += kLanes) {
        const f32x16 inputs = packed_inputs(table, token_ids[token], i);
        store_some(out + token * out_stride + i, is_scaled ? inputs * scale : inputs, size - i);
      }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
