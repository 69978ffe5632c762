// One instruction set's kernel table. Compiled several times: DIPTYCH_ISA names the set, DIPTYCH_AMX says whether there are
// tile instructions; the flags do the rest.
#include "kernels.h"

#include "any_linear.h"
#include "attention_rows.h"
#include "collectives_sum.h"
#include "decoder_layer.h"
#include "embedding.h"
#include "gguf_linear.h"
#include "linear.h"
#include "norm.h"
#include "reduce.h"
#if DIPTYCH_AMX
#include "amx_attention.h"
#include "gguf_tiles.h"
#endif

#define DIPTYCH_TEXT_OF(name) #name
#define DIPTYCH_TEXT(name) DIPTYCH_TEXT_OF(name)
#define DIPTYCH_JOIN_OF(a, b) a##b
#define DIPTYCH_JOIN(a, b) DIPTYCH_JOIN_OF(a, b)

namespace diptych {
namespace DIPTYCH_ISA {
namespace {

// Calls `body` with a null pointer of the dtype's storage type.
template <class Body>
void with_dtype(Dtype dtype, const Body& body) {
  switch (dtype) {
    case Dtype::kFloat32:
      return body(static_cast<float*>(nullptr));
    case Dtype::kBfloat16:
      return body(static_cast<bfloat16*>(nullptr));
    case Dtype::kFloat16:
      return body(static_cast<float16*>(nullptr));
  }
}

template <class T>
T* as(void* pointer, T*) {
  return static_cast<T*>(pointer);
}
template <class T>
const T* as(const void* pointer, T*) {
  return static_cast<const T*>(pointer);
}

void rms_norm(void* out, const void* x, const NormWeights& norm, int64_t num_rows, int64_t out_stride,
              int64_t x_stride) {
  with_dtype(norm.dtype,
             [&](auto* type) { rms_norm_rows(as(out, type), as(x, type), norm, num_rows, out_stride, x_stride); });
}

void add_normalized(void* hidden, const void* x, const NormWeights& norm, int64_t num_rows, int64_t hidden_stride,
                    int64_t x_stride) {
  with_dtype(norm.dtype, [&](auto* type) {
    add_normalized_rows(as(hidden, type), as(x, type), norm, num_rows, hidden_stride, x_stride);
  });
}

void add_then_norm(void* out, void* hidden, const void* x, const NormWeights& norm, int64_t num_rows,
                   int64_t out_stride, int64_t hidden_stride, int64_t x_stride) {
  with_dtype(norm.dtype, [&](auto* type) {
    add_then_norm_rows(as(out, type), as(hidden, type), as(x, type), norm, num_rows, out_stride, hidden_stride,
                       x_stride);
  });
}

void norm_and_rotate(void* heads, const void* cos, const void* signed_sin, const NormWeights& norm, int64_t num_tokens,
                     int64_t num_heads, int64_t token_stride) {
  with_dtype(norm.dtype, [&](auto* type) {
    norm_and_rotate_heads(as(heads, type), as(cos, type), as(signed_sin, type), norm, num_tokens, num_heads,
                          token_stride);
  });
}

void gguf_linear(const PackedLinear& layer, const LinearRows& rows) {
#if DIPTYCH_AMX
  if (rows.num_rows > 1) return gguf_tiles(layer, rows);
#endif
  gguf_rows(layer, rows);
}

void linear(const PackedLinear& layer, const void* x, void* out, int64_t num_rows, int64_t x_stride,
            int64_t out_stride) {
  const LinearRows rows = {static_cast<const bfloat16*>(x), out, num_rows, x_stride, out_stride};
  if (layer.parts != nullptr) return gguf_linear(layer, rows);
  if (layer.scales != nullptr) return linear_of<Int8Weights>(layer, rows);
  linear_of<Bfloat16Weights>(layer, rows);
}

// Panels of rows would multiply the pieces: rows are taken a panel at a time.
void linear_argmax(const PackedLinear& layer, const void* x, int64_t* indices, float* values, int64_t num_rows,
                   int64_t x_stride) {
  for (int64_t row = 0; row < num_rows; row += kMaxArgmaxRows) {
    const int64_t count = smaller(kMaxArgmaxRows, num_rows - row);
    argmax_of_pieces(layer, count, indices + row, values + row, [&](PieceResults* results) {
      linear(layer, static_cast<const bfloat16*>(x) + row * x_stride, results, count, x_stride, 0);
    });
  }
}

void pack(void* packed, const void* weight, int64_t num_rows, int64_t in_features, int64_t padded_inputs,
          int64_t stride) {
  pack_block(static_cast<bfloat16*>(packed), static_cast<const bfloat16*>(weight), num_rows, in_features, padded_inputs,
             stride);
}

void embed(void* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens, int64_t size,
           int64_t out_stride, float scale, bool is_scaled) {
  const auto embed_table = table.parts != nullptr ? embed_gguf : embed_packed;
  embed_table(static_cast<bfloat16*>(out), token_ids, table, num_tokens, size, out_stride, scale, is_scaled);
}

void attention(const AttentionLayer& layer, const AttentionStep& step, const AttentionTensors& tensors) {
  const AttentionCall call = {layer, step, tensors};
#if DIPTYCH_AMX
  if (fits_tiles(layer)) return attention_tiles(call);
#endif
  with_dtype(layer.dtype, [&](auto* type) { attention_rows(call, type); });
}

void decoder_layers(const StackedLayer* layers, int64_t num_layers, const AttentionStep& step, const Rotation* rotations,
                    void* hidden, int64_t hidden_stride, const AdapterRows* adapters) {
  const Rows rows = {static_cast<bfloat16*>(hidden), hidden_stride};
  for (const StackedLayer* at = layers; at < layers + num_layers; ++at)
    decoder_layer({*at->layer, *at->attention, step, rotations[at->rotation], at->adapted, adapters}, rows, linear,
                  attention);
}

void adapter_addend(const AdaptedLinear& adapted, const AdapterStep& step, const void* x, int64_t x_stride, void* addend,
                    int64_t addend_stride) {
  put_step(adapted, step, {static_cast<const bfloat16*>(x), addend, 0, x_stride, addend_stride});
}

void sum_ranks(void* out, const void* const* inputs, int64_t num_inputs, int64_t count, Dtype dtype) {
  with_dtype(dtype, [&](auto* type) { sum_inputs(as(out, type), inputs, num_inputs, count); });
}

const KernelTable table = {
    DIPTYCH_TEXT(DIPTYCH_ISA), rms_norm,  add_normalized, add_then_norm, norm_and_rotate, linear, linear_argmax,
    pack, embed, attention, decoder_layers, adapter_addend, argmax_rows, sum_ranks,
};

}  // namespace
}  // namespace DIPTYCH_ISA

const KernelTable* DIPTYCH_JOIN(DIPTYCH_ISA, _kernels)() { return &DIPTYCH_ISA::table; }

}  // namespace diptych
