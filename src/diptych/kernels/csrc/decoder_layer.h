// A whole decoder layer from the other kernels: between them is no Python, and intermediate results lie in memory that is
// kept. Computes what the separate calls compute, to the bit.
#pragma once

#include "attention.h"
#include "linear.h"
#include "low_rank.h"
#include "norm.h"

namespace diptych {
namespace DIPTYCH_ISA {

struct LayerCall {
  const DecoderLayer& layer;
  const AttentionLayer& attention;
  const AttentionStep& step;
  const Rotation& rotation;
  const AdaptedLayer* adapted;
  const AdapterRows* adapters;  // null: no row has one
};

struct Rows {
  bfloat16* data;
  int64_t stride;
};

// Rows of whole 256 bytes are set apart a little further: the same columns of many rows would share few sets of the cache.
ALWAYS_INLINE int64_t padded_stride(int64_t size) { return size * 2 % 256 == 0 ? size + 32 : size; }

// Intermediate results of a layer over T tokens, carved from one allocation. `wide` holds what is between the two GEMMs of
// either block, `normed` the input of the first.
struct LayerBuffers {
  Rows normed;
  Rows projected;
  Rows wide;
  Rows added;

  LayerBuffers(const LayerCall& call) {
    const int64_t num_tokens = call.step.num_tokens;
    const int64_t hidden = call.layer.input_norm->size;
    const int64_t wide_size = larger(call.layer.down->in_features, call.layer.attention_output->in_features);
    normed.stride = added.stride = padded_stride(hidden);
    projected.stride = padded_stride(call.layer.query_key_value->num_outputs);
    wide.stride = padded_stride(wide_size);
    const int64_t per_token = normed.stride + added.stride + projected.stride + wide.stride;
    const int64_t padding = 4 * 32;  // every part begins at a cache line
    normed.data = static_cast<bfloat16*>(
        thread_scratch(kScratchLayer, static_cast<size_t>(per_token * num_tokens + padding) * sizeof(bfloat16)));
    projected.data = normed.data + round_up(normed.stride * num_tokens, 32);
    wide.data = projected.data + round_up(projected.stride * num_tokens, 32);
    added.data = wide.data + round_up(wide.stride * num_tokens, 32);
  }
};

// Moves the wanted tokens' rows of `size` to the front; no row moves backwards.
inline void keep_wanted(Rows rows, int64_t size, const AttentionStep& step) {
  for (int64_t index = 0; index < step.num_wanted; ++index)
    __builtin_memmove(rows.data + index * rows.stride, rows.data + step.wanted[index] * rows.stride,
                      static_cast<size_t>(size) * sizeof(bfloat16));
}

// From `normed` to what is attended, in `wide`.
template <class Linear, class Attention>
void attend_normed(const LayerCall& call, const LayerBuffers& buffers, const Linear& linear,
                     const Attention& attention) {
  const AttentionLayer& shape = call.attention;
  const int64_t num_tokens = call.step.num_tokens, size = shape.head_dim;
  const Rows projected = buffers.projected, wide = buffers.wide;
  adapted_linear(
      *call.layer.query_key_value, call.adapted ? call.adapted->query_key_value : nullptr,
      call.adapters ? &call.adapters->before : nullptr,
      {buffers.normed.data, projected.data, num_tokens, buffers.normed.stride, projected.stride}, linear);
  norm_and_rotate_heads(projected.data, static_cast<const bfloat16*>(call.rotation.cos),
                        static_cast<const bfloat16*>(call.rotation.signed_sin), *call.layer.head_norm, num_tokens,
                        static_cast<int64_t>(shape.num_heads) + shape.num_kv_heads, projected.stride);
  const bfloat16* key = projected.data + shape.num_heads * size;
  const AttentionTensors tensors = {
      projected.data,   key,              key + shape.num_kv_heads * size, wide.data,
      projected.stride, projected.stride, projected.stride,                wide.stride,
  };
  attention(shape, call.step, tensors);
}

// hidden += block's output, normalised if the layer has a norm for it.
ALWAYS_INLINE void add_block(const NormWeights* norm, Rows hidden, Rows added, int64_t size, int64_t num_tokens) {
  if (norm != nullptr)
    add_normalized_rows(hidden.data, added.data, *norm, num_tokens, hidden.stride, added.stride);
  else
    add_rows(hidden.data, added.data, size, num_tokens, hidden.stride, added.stride);
}

// With `step.wanted`, their results are the first rows of `hidden` afterwards, and the others are lost.
template <class Linear, class Attention>
void decoder_layer(const LayerCall& call, Rows hidden, const Linear& linear, const Attention& attention) {
  const LayerBuffers buffers(call);
  const DecoderLayer& layer = call.layer;
  const int64_t size = layer.input_norm->size;
  int64_t num_tokens = call.step.num_tokens;
  const Rows normed = buffers.normed, wide = buffers.wide, added = buffers.added;
  rms_norm_rows(normed.data, hidden.data, *layer.input_norm, num_tokens, normed.stride, hidden.stride);
  attend_normed(call, buffers, linear, attention);
  if (call.step.wanted != nullptr) {
    num_tokens = call.step.num_wanted;
    keep_wanted(wide, layer.attention_output->in_features, call.step);
    keep_wanted(hidden, size, call.step);
  }
  if (num_tokens == 0) return;
  const AdapterStep* adapters = call.adapters ? &call.adapters->after : nullptr;
  const AdaptedLayer none = {}, &adapted = call.adapted ? *call.adapted : none;
  adapted_linear(*layer.attention_output, adapted.attention_output, adapters,
                 {wide.data, added.data, num_tokens, wide.stride, added.stride}, linear);
  add_block(layer.post_attention_norm, hidden, added, size, num_tokens);
  rms_norm_rows(normed.data, hidden.data, *layer.mlp_norm, num_tokens, normed.stride, hidden.stride);
  adapted_linear(*layer.gate_up, adapted.gate_up, adapters, {normed.data, wide.data, num_tokens, normed.stride, wide.stride},
                 linear);
  adapted_linear(*layer.down, adapted.down, adapters, {wide.data, added.data, num_tokens, wide.stride, added.stride}, linear);
  add_block(layer.post_mlp_norm, hidden, added, size, num_tokens);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
