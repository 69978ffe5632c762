// Linear layers over packed weights, without tile instructions: bfloat16 inputs, weights of bfloat16 or int8.
//
// Packed order: blocks of 16 outputs; in a block, tiles of 32 inputs (16 pairs). A pair is one vector: the 16 outputs'
// weights of two adjacent inputs, side by side. A tile of bfloat16 is [pair][output][2]; for int8 see Int8Weights.
//
// Sums are taken in the order in which tile instructions take them (32 inputs at a time, even and odd inputs apart), so a
// row's result does not depend on which path, or how many rows beside it, it was computed with.
#pragma once

#include "thread_pool.h"
#include "vector.h"
#include "weights.h"

namespace diptych {
namespace DIPTYCH_ISA {

// Where a GEMM's rows come from and go to.
struct LinearRows {
  const bfloat16* x;
  void* out;
  int64_t num_rows;
  int64_t x_stride;
  int64_t out_stride;
};

// The largest output of each row so far, lane by lane: [row][16]. A NaN is larger than anything, and stays.
struct BestOutputs {
  float* values;
  int32_t* indices;

  static constexpr int64_t kRowNbytes = kLanes * 8;

  ALWAYS_INLINE void clear(int64_t num_rows) const {
    for (int64_t row = 0; row < num_rows; ++row) store(values + row * kLanes, splat(-__builtin_inff()));
    __builtin_memset(indices, 0, static_cast<size_t>(num_rows * kLanes) * 4);
  }

  // Outputs at, at + 1, .. of a row, of which `count` are there.
  ALWAYS_INLINE void put(int64_t row, int64_t at, f32x16 outputs, int64_t count) const {
    const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const f32x16 best = load(values + row * kLanes);
    i32x16 best_at;
    __builtin_memcpy(&best_at, indices + row * kLanes, sizeof best_at);
    const i32x16 is_better = ((outputs > best) | (outputs != outputs)) & (lanes < static_cast<int32_t>(count));
    store(values + row * kLanes, is_better ? outputs : best);
    best_at = is_better ? lanes + static_cast<int32_t>(at) : best_at;
    __builtin_memcpy(indices + row * kLanes, &best_at, sizeof best_at);
  }
};

// What becomes of a layer's float32 sums: scaled, biased, activated, rounded, and stored or compared. A copy of what it
// needs, so that the compiler need not fear that storing a result changes it.
class OutputSink {
 public:
  OutputSink(const PackedLinear& layer, const LinearRows& rows, const BestOutputs& best)
      : layer_(layer), out_(rows.out), out_stride_(rows.out_stride), best_(best) {}

  // One row's sums of two adjacent blocks, the first of which begins at packed column `output`.
  ALWAYS_INLINE void put(int64_t row, int64_t output, f32x16 first, f32x16 second) const {
    first = finished(first, row, output);
    if (output + kBlockOutputs < layer_.out_features) second = finished(second, row, output + kBlockOutputs);
    if (layer_.epilogue == Epilogue::kGatedGelu || layer_.epilogue == Epilogue::kGatedSilu) {
      const f32x16 gate = round_to_bfloat16(first), up = round_to_bfloat16(second);
      const f32x16 activated = layer_.epilogue == Epilogue::kGatedGelu ? gelu_tanh(gate) : silu(gate);
      const int64_t at = output / 2;
      store_some(static_cast<bfloat16*>(out_) + row * out_stride_ + at, round_to_bfloat16(activated) * up,
                 layer_.num_outputs - at);
      return;
    }
    put_block(row, output, first);
    put_block(row, output + kBlockOutputs, second);
  }

 private:
  ALWAYS_INLINE f32x16 finished(f32x16 sums, int64_t row, int64_t output) const {
    if (layer_.scales != nullptr) sums = sums * load(layer_.scales + output);
    if (layer_.addend != nullptr)
      sums = sums + load(static_cast<const bfloat16*>(layer_.addend) + row * layer_.addend_stride + output);
    return layer_.bias == nullptr ? sums : sums + load(layer_.bias + output);
  }

  ALWAYS_INLINE void put_block(int64_t row, int64_t output, f32x16 outputs) const {
    const int64_t left = layer_.num_outputs - output;
    if (left <= 0) return;
    if (layer_.epilogue == Epilogue::kBfloat16)
      store_some(static_cast<bfloat16*>(out_) + row * out_stride_ + output, outputs, left);
    else if (layer_.epilogue == Epilogue::kFloat32)
      store_some(static_cast<float*>(out_) + row * out_stride_ + output, round_to_bfloat16(outputs), left);
    else if (layer_.epilogue == Epilogue::kBlocks)
      store_some(static_cast<bfloat16*>(out_) + row * out_stride_ + output / kBlockOutputs * layer_.block_step, outputs, left);
    else best_.put(row, output, round_to_bfloat16(outputs), left);
  }

  const PackedLinear layer_;
  void* const out_;
  const int64_t out_stride_;
  const BestOutputs best_;
};

// The packed weights of two adjacent blocks; the second may not be there, and is then the first again.
struct BlockPair {
  const char* weights[2];
  int64_t block_nbytes;

  template <class Weights>
  static ALWAYS_INLINE BlockPair at(const PackedLinear& layer, int64_t output, const Weights&) {
    const int64_t nbytes = layer.in_features / kTileInputs * Weights::kTileNbytes;
    const char* first = static_cast<const char*>(layer.weight) + output / kBlockOutputs * nbytes;
    return {{first, output + kBlockOutputs < layer.out_features ? first + nbytes : first}, nbytes};
  }

  // What is `ahead` bytes further on in the same block, or else in that block of the next pair.
  ALWAYS_INLINE const char* ahead(int block, int64_t offset, int64_t ahead) const {
    const int64_t at = offset + ahead;
    return weights[block] + (at < block_nbytes ? at : at + block_nbytes);
  }
};

// Rows split into even and odd inputs as float32: [row][2][in / 2], zeros beyond the row's inputs.
ALWAYS_INLINE void split_row(float* even, float* odd, const bfloat16* x, int64_t in_features) {
  for (int64_t i = 0; i < in_features; i += kTileInputs) {
    const u32x16 pairs = load_bits(x + i);
    store(even + i / 2, from_bits(pairs << 16));
    store(odd + i / 2, from_bits(pairs & 0xffff0000u));
  }
}

constexpr int64_t kVectorPrefetchNbytes = 4096;

// Sums of ROWS rows over two blocks; `split` is their split_row form.
template <class Weights, int ROWS>
ALWAYS_INLINE void multiply_blocks(f32x16 (&sums)[ROWS][2], const float* split, const BlockPair& blocks,
                                   int64_t in_features) {
  const int64_t half = in_features / 2;
  for (int row = 0; row < ROWS; ++row) sums[row][0] = sums[row][1] = f32x16{};
  for (int64_t tile = 0; tile < in_features / kTileInputs; ++tile) {
    f32x16 even[ROWS][2] = {}, odd[ROWS][2] = {};
    const int64_t offset = tile * Weights::kTileNbytes;
#pragma GCC unroll 8
    for (int64_t group = 0; group < kPairsPerTile / 2; ++group) {
#pragma GCC unroll 2
      for (int block = 0; block < 2; ++block) {
        constexpr int64_t kGroupNbytes = Weights::kTileNbytes / (kPairsPerTile / 2);
        for (int64_t line = 0; line < kGroupNbytes; line += 64)
          __builtin_prefetch(blocks.ahead(block, offset, kVectorPrefetchNbytes) + group * kGroupNbytes + line);
        u32x16 pairs[2];
        Weights::load_pairs(pairs, blocks.weights[block] + offset, group);
#pragma GCC unroll 2
        for (int pair = 0; pair < 2; ++pair) {
          const f32x16 even_weight = from_bits(pairs[pair] << 16), odd_weight = from_bits(pairs[pair] & 0xffff0000u);
#pragma GCC unroll 4
          for (int row = 0; row < ROWS; ++row) {
            const float* inputs = split + row * 2 * half + tile * kPairsPerTile + group * 2 + pair;
            even[row][block] = even[row][block] + even_weight * inputs[0];
            odd[row][block] = odd[row][block] + odd_weight * inputs[half];
          }
        }
      }
    }
    for (int row = 0; row < ROWS; ++row)
      for (int block = 0; block < 2; ++block) sums[row][block] = sums[row][block] + (even[row][block] + odd[row][block]);
  }
}

// What is best in one piece of an argmax, or in all: a row's largest output, and the lowest index of it.
struct Best {
  float value;
  int32_t index;

  ALWAYS_INLINE bool is_behind(const Best& other) const {
    if (value != value) return false;
    return other.value > value || other.value != other.value || (other.value == value && other.index < index);
  }
};

// What an argmax's pieces have found, [piece][row]; any number of threads add to it.
struct PieceResults {
  Best* pieces;
  int64_t num_pieces;
};

// Pairs of blocks that a thread takes at once: half a MiB of weights at most. A piece of an argmax ends with a reduction,
// so it has at least eight.
constexpr int64_t kSmallestArgmaxPiece = 8;
constexpr int64_t kMaxArgmaxRows = 32;  // at once: fewer than any panel, whose number would multiply the pieces

ALWAYS_INLINE int64_t smallest_piece(const PackedLinear& layer) {
  return layer.epilogue == Epilogue::kArgmax ? kSmallestArgmaxPiece : 1;
}
ALWAYS_INLINE int64_t largest_piece(const PackedLinear& layer) {
  return larger(smallest_piece(layer), (1 << 18) / (2 * kBlockOutputs * layer.in_features));
}

ALWAYS_INLINE Best best_of_lanes(const BestOutputs& best, int64_t row) {
  Best found = {best.values[row * kLanes], best.indices[row * kLanes]};
  for (int64_t lane = row * kLanes + 1; lane < (row + 1) * kLanes; ++lane) {
    const Best other = {best.values[lane], best.indices[lane]};
    if (found.is_behind(other)) found = other;
  }
  return found;
}

// Runs `body(begin, end, sink, scratch)` over 0..count, panels of rows times pairs of blocks, on all threads. `scratch` is
// the thread's own, of `scratch_nbytes`. For an argmax rows.out is a PieceResults.
template <class Body>
ALWAYS_INLINE void for_pieces(const PackedLinear& layer, const LinearRows& rows, int64_t count, int64_t scratch_nbytes,
                              const Body& body) {
  const bool is_argmax = layer.epilogue == Epilogue::kArgmax;
  const int64_t best_nbytes = is_argmax ? rows.num_rows * BestOutputs::kRowNbytes : 0;
  parallel_for_shrinking(count, smallest_piece(layer), largest_piece(layer), [&](int64_t begin, int64_t end) {
    const FlushDenormals flush;
    char* scratch = static_cast<char*>(thread_scratch(kScratchWorker, static_cast<size_t>(scratch_nbytes + best_nbytes)));
    float* values = reinterpret_cast<float*>(scratch + scratch_nbytes);
    const BestOutputs best = {values, reinterpret_cast<int32_t*>(values + rows.num_rows * kLanes)};
    if (is_argmax) best.clear(rows.num_rows);
    body(begin, end, OutputSink(layer, rows, best), scratch);
    if (!is_argmax) return;
    PieceResults& results = *static_cast<PieceResults*>(rows.out);
    Best* found = results.pieces + __atomic_fetch_add(&results.num_pieces, 1, __ATOMIC_RELAXED) * rows.num_rows;
    for (int64_t row = 0; row < rows.num_rows; ++row) found[row] = best_of_lanes(best, row);
  });
}

template <class Weights, int ROWS>
ALWAYS_INLINE void linear_row_group(const OutputSink& sink, const BlockPair& blocks, const float* split, int64_t row,
                                    int64_t output, int64_t in_features) {
  f32x16 sums[ROWS][2];
  multiply_blocks<Weights, ROWS>(sums, split + row * in_features, blocks, in_features);
  for (int index = 0; index < ROWS; ++index) sink.put(row + index, output, sums[index][0], sums[index][1]);
}

template <class Weights>
void linear_rows(const PackedLinear& layer, const LinearRows& rows) {
  const int64_t size = layer.in_features;
  float* split = static_cast<float*>(thread_scratch(kScratchCaller, static_cast<size_t>(rows.num_rows * size) * 4));
  for (int64_t row = 0; row < rows.num_rows; ++row)
    split_row(split + row * size, split + row * size + size / 2, rows.x + row * rows.x_stride, size);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  for_pieces(layer, rows, num_pairs, 0, [&](int64_t begin, int64_t end, const OutputSink& sink, char*) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const int64_t output = pair * 2 * kBlockOutputs;
      const BlockPair blocks = BlockPair::at(layer, output, Weights());
      int64_t row = 0;
      for (; row + 4 <= rows.num_rows; row += 4) linear_row_group<Weights, 4>(sink, blocks, split, row, output, size);
      for (; row < rows.num_rows; ++row) linear_row_group<Weights, 1>(sink, blocks, split, row, output, size);
    }
  });
}

// Joins the pieces of a layer whose epilogue is an argmax; compute(results) has filled them.
template <class Compute>
ALWAYS_INLINE void argmax_of_pieces(const PackedLinear& layer, int64_t num_rows, int64_t* indices, float* values,
                                    const Compute& compute) {
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  const int64_t max_pieces = ceil_div(num_pairs, kSmallestArgmaxPiece);
  const size_t nbytes = static_cast<size_t>(max_pieces * num_rows) * sizeof(Best);
  PieceResults results = {static_cast<Best*>(thread_scratch(kScratchLayer, nbytes)), 0};
  compute(&results);
  for (int64_t row = 0; row < num_rows; ++row) {
    Best best = results.pieces[row];
    for (int64_t piece = 1; piece < results.num_pieces; ++piece) {
      const Best& other = results.pieces[piece * num_rows + row];
      if (best.is_behind(other)) best = other;
    }
    indices[row] = best.index;
    values[row] = best.value;
  }
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
