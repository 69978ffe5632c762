// The kernels of one instruction set, as functions that the C interface calls through.
#pragma once

#include "abi.h"

namespace diptych {

struct KernelTable {
  const char* name;
  void (*rms_norm)(void* out, const void* x, const NormWeights& norm, int64_t num_rows, int64_t out_stride,
                   int64_t x_stride);
  void (*add_normalized)(void* hidden, const void* x, const NormWeights& norm, int64_t num_rows, int64_t hidden_stride,
                         int64_t x_stride);
  void (*add_then_norm)(void* out, void* hidden, const void* x, const NormWeights& norm, int64_t num_rows,
                        int64_t out_stride, int64_t hidden_stride, int64_t x_stride);
  void (*norm_and_rotate)(void* heads, const void* cos, const void* signed_sin, const NormWeights& norm,
                          int64_t num_tokens, int64_t num_heads, int64_t token_stride);
  void (*linear)(const PackedLinear& layer, const void* x, void* out, int64_t num_rows, int64_t x_stride,
                 int64_t out_stride);
  void (*linear_argmax)(const PackedLinear& layer, const void* x, int64_t* indices, float* values, int64_t num_rows,
                        int64_t x_stride);
  void (*pack_block)(void* packed, const void* weight, int64_t num_rows, int64_t in_features, int64_t padded_inputs,
                     int64_t stride);
  void (*embed_packed)(void* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens, int64_t size,
                       int64_t out_stride, float scale, bool is_scaled);
  void (*attention)(const AttentionLayer& layer, const AttentionStep& step, const AttentionTensors& tensors);
  void (*decoder_layers)(const StackedLayer* layers, int64_t num_layers, const AttentionStep& step,
                         const Rotation* rotations, void* hidden, int64_t hidden_stride, const AdapterRows* adapters);
  void (*adapter_addend)(const AdaptedLinear& adapted, const AdapterStep& step, const void* x, int64_t x_stride,
                         void* addend, int64_t addend_stride);
  void (*argmax)(int64_t* indices, const float* x, int64_t num_rows, int64_t size, int64_t stride);
  void (*sum_ranks)(void* out, const void* const* inputs, int64_t num_inputs, int64_t count, Dtype dtype);
};

// Null where the compiler could not build that set, as on other machines than x86-64.
const KernelTable* portable_kernels();
const KernelTable* avx2_kernels();
const KernelTable* avx512_kernels();
const KernelTable* amx_kernels();

}  // namespace diptych
