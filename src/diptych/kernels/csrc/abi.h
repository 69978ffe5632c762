// The C interface of the kernel library: what ctypes calls, and the structs that cross. Every pointer is borrowed for
// the length of a call. Strides count elements. Sizes are not checked here: the Python side has done so.
#pragma once

#include <cstdint>

#define DIPTYCH_EXPORT extern "C" __attribute__((visibility("default")))

enum class Dtype : int32_t { kFloat32 = 0, kBfloat16 = 1, kFloat16 = 2 };

// What happens to a GEMM's float32 result.
enum class Epilogue : int32_t {
  kBfloat16 = 0,      // + bias, rounded
  kFloat32 = 1,       // + bias, rounded to bfloat16, widened: logits
  kGatedGelu = 2,     // gelu_tanh(gate) * up of interleaved halves, rounded where torch would round
  kGatedSilu = 3,     // the same with silu
  kArgmax = 4,        // + bias, rounded to bfloat16, and only the largest output kept: for linear_argmax alone
  kBlocks = 5,        // rounded; blocks of 16 outputs are `block_step` columns apart
};

// Quantised formats of GGUF files, by ggml's numbers.
enum class GgufFormat : int32_t {
  kQ4_0 = 2,
  kQ4_1 = 3,
  kQ5_0 = 6,
  kQ5_1 = 7,
  kQ8_0 = 8,
  kQ2_K = 10,
  kQ3_K = 11,
  kQ4_K = 12,
  kQ5_K = 13,
  kQ6_K = 14,
  kIQ4_NL = 20,
  kIQ4_XS = 23,
};

// Adjacent outputs of one format in the packed order of gguf_format.h.
struct GgufPart {
  const void* blocks;
  int64_t num_blocks;
  GgufFormat format;
};

// Weights of one linear layer in the packed order of linear.h. out_features is a multiple of 16 and in_features of 32,
// padded with zeros; `num_outputs` is how many columns are stored (half of out_features when gated). With `scales`, one an
// output, the weights are int8 in the order of weights.h. With `parts` these are the weights, one after the other; when gated
// there are two, gate and up, and outputs count as if their blocks took turns. With `addend`, bfloat16 [rows, out_features] in
// packed order, its rows are added to the sums before anything else happens to them.
struct PackedLinear {
  const void* weight;
  const float* bias;
  const float* scales;
  int64_t out_features;
  int64_t in_features;
  int64_t num_outputs;
  Epilogue epilogue;
  const GgufPart* parts;
  int64_t num_parts;
  const void* addend;
  int64_t addend_stride;
  int64_t block_step;
};

// What one adapter adds to one projection: up(down(x)), for an input of `down` and outputs from packed column `column` on.
// down: epilogue kBfloat16, with the adapter's scale as its `scales`. up: epilogue kBlocks. No weights: adds nothing.
struct LowRank {
  PackedLinear down;
  PackedLinear up;
  int64_t column;
};

// All adapters' parts of one linear layer: [slots][num_parts].
struct AdaptedLinear {
  const LowRank* parts;
  int64_t num_parts;
};

// Adjacent rows of a step under one adapter: the slot that holds it, or -1 for none.
struct AdapterSegment {
  int64_t begin;
  int64_t count;
  int64_t slot;
};

// All rows of a step, in order.
struct AdapterStep {
  const AdapterSegment* segments;
  int64_t num_segments;
};

// One norm's constants. A float32 weight multiplies before the result is rounded to the dtype, others after.
// weight_stride: between the weights of one head and the next; 0 where all rows share one.
struct NormWeights {
  const void* weight;
  int64_t size;
  int64_t weight_stride;
  float eps;
  Dtype dtype;
  int32_t weight_is_float32;
};

// Cosines, and sines with the first half negated, of a step's tokens: [T, head_dim], contiguous.
struct Rotation {
  const void* cos;
  const void* signed_sin;
};

// One layer's attention and where its K and V lie. pool: K of page 0. value_offset: from a page's K to its V.
// window, soft_cap: 0 for none.
struct AttentionLayer {
  void* pool;
  int64_t page_stride;
  int64_t value_offset;
  int64_t page_size;
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_dim;
  Dtype dtype;
  int64_t window;
  float scale;
  float soft_cap;
};

// One step's ragged shape, as AttentionInputs describes it. wanted: ascending tokens, the only ones whose results matter (K and V
// of all are written); null for all of them.
struct AttentionStep {
  const int32_t* query_starts;
  const int32_t* kv_lens;
  const int32_t* page_table;
  const int64_t* kv_slots;
  int64_t page_table_stride;
  int64_t num_rows;
  int64_t num_tokens;
  const int64_t* wanted;
  int64_t num_wanted;
};

// Token-major tensors [T, heads, D] whose heads are adjacent; only the token stride is free.
struct AttentionTensors {
  const void* query;
  const void* key;
  const void* value;
  void* output;
  int64_t query_stride;
  int64_t key_stride;
  int64_t value_stride;
  int64_t output_stride;
};

// A whole decoder layer in bfloat16: attention, then a gated MLP, each on the normalised residual stream and added to it.
// post_attention_norm, post_mlp_norm: null, or what a block's output is normalised with before it is added.
struct DecoderLayer {
  const NormWeights* input_norm;
  const PackedLinear* query_key_value;
  const NormWeights* head_norm;  // its weight may be null: heads are rotated only
  const PackedLinear* attention_output;
  const NormWeights* post_attention_norm;
  const NormWeights* mlp_norm;
  const PackedLinear* gate_up;
  const PackedLinear* down;
  const NormWeights* post_mlp_norm;
};

// What adapters add to a layer's GEMMs.
struct AdaptedLayer {
  const AdaptedLinear* query_key_value;
  const AdaptedLinear* attention_output;
  const AdaptedLinear* gate_up;
  const AdaptedLinear* down;
};

// A layer in its place: its attention, which of the step's rotations it uses, and what adapters add (null: there are none).
struct StackedLayer {
  const DecoderLayer* layer;
  const AttentionLayer* attention;
  int64_t rotation;
  const AdaptedLayer* adapted;
};

// A step's rows under adapters: before attention, and after it (fewer where only some tokens are wanted).
struct AdapterRows {
  AdapterStep before;
  AdapterStep after;
};
