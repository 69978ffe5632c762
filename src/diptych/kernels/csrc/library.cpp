// The C interface: chooses an instruction set once and passes calls on to its kernels.
#include <cstdlib>
#include <cstring>

#if defined(__linux__) && defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "abi.h"
#include "collectives.h"
#include "kernels.h"
#include "thread_pool.h"

namespace diptych {
namespace {

// Linux gives tile registers only to a process that asks: arch_prctl(ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA).
bool may_use_tiles() {
#if defined(__linux__) && defined(__x86_64__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
}

struct CpuidLeaf {
  unsigned a, b, c, d;
};

#if defined(__x86_64__)
CpuidLeaf cpuid(unsigned leaf, unsigned subleaf) {
  CpuidLeaf found;
  asm volatile("cpuid" : "=a"(found.a), "=b"(found.b), "=c"(found.c), "=d"(found.d) : "a"(leaf), "c"(subleaf));
  return found;
}

bool has_tiles() {
  const CpuidLeaf features = cpuid(7, 0);
  constexpr unsigned kTile = 1u << 24, kBfloat16 = 1u << 22;
  constexpr unsigned kAll = kTile | kBfloat16;
  const bool has_vectors = __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512bf16");
  return (features.d & kAll) == kAll && has_vectors && may_use_tiles();
}
#endif

// The kernels called `name`, or null if they were not built or this machine cannot run them.
const KernelTable* runnable_kernels(const char* name) {
  if (std::strcmp(name, "portable") == 0) return portable_kernels();
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (std::strcmp(name, "avx2") == 0) return has_avx2 ? avx2_kernels() : nullptr;
  if (std::strcmp(name, "avx512") == 0) return has_avx512 ? avx512_kernels() : nullptr;
  if (std::strcmp(name, "amx") == 0) return has_avx512 && has_tiles() ? amx_kernels() : nullptr;
#endif
  return nullptr;
}

const KernelTable* kernels = portable_kernels();

}  // namespace
}  // namespace diptych

using diptych::kernels;

// Uses the kernels called `name` from now on. Returns 0, or -1 where they cannot run.
DIPTYCH_EXPORT int32_t diptych_use_kernels(const char* name) {
  const diptych::KernelTable* found = diptych::runnable_kernels(name);
  if (found == nullptr) return -1;
  kernels = found;
  return 0;
}

DIPTYCH_EXPORT const char* diptych_kernels_name() { return kernels->name; }

DIPTYCH_EXPORT void diptych_set_num_threads(int32_t count, const int32_t* cpus) { diptych::set_num_threads(count, cpus); }

DIPTYCH_EXPORT int32_t diptych_num_threads() { return diptych::num_threads(); }

DIPTYCH_EXPORT void diptych_rms_norm(void* out, const void* x, const NormWeights* norm, int64_t num_rows,
                                     int64_t out_stride, int64_t x_stride) {
  kernels->rms_norm(out, x, *norm, num_rows, out_stride, x_stride);
}

DIPTYCH_EXPORT void diptych_add_normalized(void* hidden, const void* x, const NormWeights* norm, int64_t num_rows,
                                           int64_t hidden_stride, int64_t x_stride) {
  kernels->add_normalized(hidden, x, *norm, num_rows, hidden_stride, x_stride);
}

DIPTYCH_EXPORT void diptych_add_then_norm(void* out, void* hidden, const void* x, const NormWeights* norm,
                                          int64_t num_rows, int64_t out_stride, int64_t hidden_stride,
                                          int64_t x_stride) {
  kernels->add_then_norm(out, hidden, x, *norm, num_rows, out_stride, hidden_stride, x_stride);
}

DIPTYCH_EXPORT void diptych_norm_and_rotate(void* heads, const void* cos, const void* signed_sin,
                                            const NormWeights* norm, int64_t num_tokens, int64_t num_heads,
                                            int64_t token_stride) {
  kernels->norm_and_rotate(heads, cos, signed_sin, *norm, num_tokens, num_heads, token_stride);
}

DIPTYCH_EXPORT void diptych_linear(const PackedLinear* layer, const void* x, void* out, int64_t num_rows,
                                   int64_t x_stride, int64_t out_stride) {
  kernels->linear(*layer, x, out, num_rows, x_stride, out_stride);
}

// The largest output of each row (rounded to bfloat16) and its lowest index; a NaN counts as the largest. The layer's epilogue
// is kArgmax.
DIPTYCH_EXPORT void diptych_linear_argmax(const PackedLinear* layer, const void* x, int64_t* indices, float* values,
                                          int64_t num_rows, int64_t x_stride) {
  kernels->linear_argmax(*layer, x, indices, values, num_rows, x_stride);
}

// Packs `num_rows` rows of weights into blocks of 16; packed may be where weight is (no padding then), block by block.
// block_step: blocks of `packed` from one block of rows to the next (2 where two matrices are interleaved).
DIPTYCH_EXPORT void diptych_pack(void* packed, const void* weight, int64_t num_rows, int64_t in_features,
                                 int64_t padded_inputs, int64_t block_step) {
  const int64_t num_blocks = (num_rows + 15) / 16;
  const size_t block_nbytes = static_cast<size_t>(padded_inputs) * 32;
  diptych::parallel_for(num_blocks, 16, [&](int64_t begin, int64_t end) {
    char* block = static_cast<char*>(diptych::thread_scratch(diptych::kScratchWorker, block_nbytes));
    for (int64_t index = begin; index < end; ++index) {
      const int64_t rows = num_rows - index * 16 < 16 ? num_rows - index * 16 : 16;
      const char* from = static_cast<const char*>(weight) + index * 32 * in_features;
      kernels->pack_block(block, from, rows, in_features, padded_inputs, in_features);
      std::memcpy(static_cast<char*>(packed) + static_cast<size_t>(index * block_step) * block_nbytes, block, block_nbytes);
    }
  });
}

DIPTYCH_EXPORT void diptych_embed_packed(void* out, const int64_t* token_ids, const PackedLinear* table,
                                         int64_t num_tokens, int64_t size, int64_t out_stride, float scale,
                                         int32_t is_scaled) {
  kernels->embed_packed(out, token_ids, *table, num_tokens, size, out_stride, scale, is_scaled != 0);
}

DIPTYCH_EXPORT void diptych_attention(const AttentionLayer* layer, const AttentionStep* step,
                                      const AttentionTensors* tensors) {
  kernels->attention(*layer, *step, *tensors);
}

DIPTYCH_EXPORT void diptych_decoder_layers(const StackedLayer* layers, int64_t num_layers, const AttentionStep* step,
                                           const Rotation* rotations, void* hidden, int64_t hidden_stride,
                                           const AdapterRows* adapters) {
  kernels->decoder_layers(layers, num_layers, *step, rotations, hidden, hidden_stride, adapters);
}

// addend = what adapters add to a linear layer's sums, bfloat16 [rows of the step, addend_stride]; zeros where they add nothing.
DIPTYCH_EXPORT void diptych_adapter_addend(const AdaptedLinear* adapted, const AdapterStep* step, const void* x,
                                           int64_t x_stride, void* addend, int64_t addend_stride) {
  kernels->adapter_addend(*adapted, *step, x, x_stride, addend, addend_stride);
}

DIPTYCH_EXPORT void diptych_argmax(int64_t* indices, const float* x, int64_t num_rows, int64_t size, int64_t stride) {
  kernels->argmax(indices, x, num_rows, size, stride);
}

// out = the sum over all ranks of `x`, of `count` elements, which may be the same memory. Returns as collectives.cpp says.
DIPTYCH_EXPORT int64_t diptych_shm_allreduce(diptych::SharedCollectives* group, void* out, const void* x, int64_t count,
                                             Dtype dtype) {
  return diptych::shm_allreduce(*group, out, x, count, dtype, kernels->sum_ranks);
}
