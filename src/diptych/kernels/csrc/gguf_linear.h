// Linear layers over a GGUF file's own blocks (gguf_format.h), never expanded but for what is being multiplied. Inputs stay
// bfloat16 and sums float32: for every scale's 16 or 32 inputs the integers' dot product, even and odd inputs apart, then
// multiplied by the scale and added up. Nothing is rounded that the file has not rounded.
//
// One row reads each code once, into registers. More rows share a block that has been expanded to bfloat16 in the cache; both
// take the same sums in the same order, as tile instructions do (gguf_tiles.h).
#pragma once

#include "gguf_expand.h"
#include "linear.h"
#include "thread_pool.h"

namespace diptych {
namespace DIPTYCH_ISA {

// Sixteen outputs; data is null for those that pad an odd number of blocks.
struct GgufBlock {
  const uint8_t* data;
  GgufFormat format;
};

ALWAYS_INLINE GgufBlock block_of(const GgufPart& part, int64_t index, int64_t in_features) {
  return {static_cast<const uint8_t*>(part.blocks) + index * block_nbytes(shape_of(part.format), in_features), part.format};
}

ALWAYS_INLINE bool is_gated(const PackedLinear& layer) {
  return layer.epilogue == Epilogue::kGatedGelu || layer.epilogue == Epilogue::kGatedSilu;
}

struct GgufBlockPair {
  GgufBlock blocks[2];
};

// The blocks of packed columns pair * 32 .. pair * 32 + 31.
inline GgufBlockPair block_pair(const PackedLinear& layer, int64_t pair) {
  GgufBlockPair found = {};
  if (is_gated(layer)) {
    for (int i = 0; i < 2; ++i) found.blocks[i] = block_of(layer.parts[i], pair, layer.in_features);
    return found;
  }
  for (int i = 0; i < 2; ++i) {
    int64_t index = pair * 2 + i;
    for (int64_t part = 0; part < layer.num_parts; ++part) {
      if (index < layer.parts[part].num_blocks) {
        found.blocks[i] = block_of(layer.parts[part], index, layer.in_features);
        break;
      }
      index -= layer.parts[part].num_blocks;
    }
  }
  return found;
}

// Calls `body` with the format as a constant: a type whose `value` it is.
template <GgufFormat FORMAT>
struct ConstantFormat {
  static constexpr GgufFormat value = FORMAT;
};
template <class Body>
ALWAYS_INLINE void with_format(GgufFormat format, const Body& body) {
  switch (format) {
    case GgufFormat::kQ4_0: return body(ConstantFormat<GgufFormat::kQ4_0>());
    case GgufFormat::kQ4_1: return body(ConstantFormat<GgufFormat::kQ4_1>());
    case GgufFormat::kQ5_0: return body(ConstantFormat<GgufFormat::kQ5_0>());
    case GgufFormat::kQ5_1: return body(ConstantFormat<GgufFormat::kQ5_1>());
    case GgufFormat::kQ8_0: return body(ConstantFormat<GgufFormat::kQ8_0>());
    case GgufFormat::kQ2_K: return body(ConstantFormat<GgufFormat::kQ2_K>());
    case GgufFormat::kQ3_K: return body(ConstantFormat<GgufFormat::kQ3_K>());
    case GgufFormat::kQ4_K: return body(ConstantFormat<GgufFormat::kQ4_K>());
    case GgufFormat::kQ5_K: return body(ConstantFormat<GgufFormat::kQ5_K>());
    case GgufFormat::kQ6_K: return body(ConstantFormat<GgufFormat::kQ6_K>());
    case GgufFormat::kIQ4_NL: return body(ConstantFormat<GgufFormat::kIQ4_NL>());
    case GgufFormat::kIQ4_XS: return body(ConstantFormat<GgufFormat::kIQ4_XS>());
  }
}

// Rows as the kernels want them: `split` is the split_row form, [row][2][in / 2]; `sums` those of their inputs, or null where
// no format asks for them: of 16 each and then of 32 each, [row][sums_per_row].
struct GgufRows {
  const float* split;
  const float* sums;
};

constexpr int64_t kSumInputs = 16;
constexpr int64_t sums_per_row(int64_t in_features) { return in_features / kSumInputs + in_features / (2 * kSumInputs); }

ALWAYS_INLINE void sum_row(float* sums, const bfloat16* x, int64_t in_features) {
  const int64_t num_short = in_features / kSumInputs;
  for (int64_t i = 0; i < num_short; ++i) sums[i] = sum_lanes(load(x + i * kSumInputs));
  for (int64_t i = 0; i < num_short / 2; ++i) sums[num_short + i] = sums[2 * i] + sums[2 * i + 1];
}

// Sums of 16 or of 32 inputs, of a row's.
ALWAYS_INLINE const float* sums_of(const float* row_sums, int64_t scale_inputs, int64_t in_features) {
  return scale_inputs == kSumInputs ? row_sums : row_sums + in_features / kSumInputs;
}

// Fetches what one row needs later: codes further on in a block, or in the one that takes its place in the next pair, and of
// that one the scales. These lie behind the codes and are needed with the first of them.
template <GgufFormat FORMAT>
ALWAYS_INLINE void prefetch_cell(const uint8_t* block, int64_t cell, int64_t in_features, int64_t next_block) {
  constexpr FormatShape shape = shape_of(FORMAT);
  constexpr int64_t ahead_nbytes = 2048, nbytes = cell_nbytes(shape), scales_nbytes = scale_group_nbytes(shape);
  constexpr int64_t scales_a_cell = shape.has_super_scale ? scales_nbytes / (kSuperInputs / kCellInputs) : scales_nbytes;
  const int64_t at = cell * nbytes + ahead_nbytes, end = codes_nbytes(shape, in_features);
  const uint8_t* codes = block + (at < end ? at : at - end + next_block);
  for (int64_t line = 0; line < nbytes; line += kVectorNbytes) __builtin_prefetch(codes + line);
  const uint8_t* scales = block + next_block + end + cell * scales_a_cell;
  for (int64_t line = 0; line < scales_a_cell; line += kVectorNbytes) __builtin_prefetch(scales + line);
}

// One row's products with PAIRS pairs of inputs of a cell of each block, even and odd inputs apart, added up. Blocks take turns:
// each sum is a chain of additions, and four chains keep the arithmetic busy where two do not.
template <GgufFormat FORMAT, int PAIRS, int BLOCKS>
ALWAYS_INLINE void cell_dots(f32x16 (&dots)[BLOCKS], const uint8_t* const (&cells)[BLOCKS], int first,
                             const float* even_inputs, const float* odd_inputs) {
  f32x16 even[BLOCKS] = {}, odd[BLOCKS] = {};
#pragma GCC unroll 16
  for (int k = 0; k < PAIRS; ++k) {
#pragma GCC unroll 2
    for (int block = 0; block < BLOCKS; ++block) {
      const PairValues values = pair_values<FORMAT>(cells[block], first + k);
      even[block] = even[block] + values.even * even_inputs[first + k];
      odd[block] = odd[block] + values.odd * odd_inputs[first + k];
    }
  }
#pragma GCC unroll 2
  for (int block = 0; block < BLOCKS; ++block) dots[block] = even[block] + odd[block];
}

// One row against BLOCKS blocks of a format: two streams of memory are faster than one. next_block: bytes from a block to the
// one that the same stream reads next.
template <GgufFormat FORMAT, int BLOCKS>
__attribute__((noinline)) void multiply_row(f32x16* results, const uint8_t* const* blocks, const GgufRows& row,
                                            int64_t in_features, int64_t next_block) {
  constexpr FormatShape shape = shape_of(FORMAT);
  constexpr int scales_a_cell = static_cast<int>(kCellInputs) / shape.scale_inputs;
  constexpr int pairs = kPairsPerCell / scales_a_cell;
  const float* sums = shape.has_offset ? sums_of(row.sums, shape.scale_inputs, in_features) : nullptr;
  f32x16 totals[BLOCKS] = {};
  for (int64_t cell = 0; cell < in_features / kCellInputs; ++cell) {
    const float* even_inputs = row.split + cell * kPairsPerCell;
    const float* odd_inputs = even_inputs + in_features / 2;
    const uint8_t* cells[BLOCKS];
#pragma GCC unroll 2
    for (int block = 0; block < BLOCKS; ++block) {
      cells[block] = blocks[block] + cell * cell_nbytes(shape);
      prefetch_cell<FORMAT>(blocks[block], cell, in_features, next_block);
    }
#pragma GCC unroll 2
    for (int part = 0; part < scales_a_cell; ++part) {
      const int64_t index = cell * scales_a_cell + part;
      f32x16 dots[BLOCKS];
      cell_dots<FORMAT, pairs>(dots, cells, part * pairs, even_inputs, odd_inputs);
#pragma GCC unroll 2
      for (int block = 0; block < BLOCKS; ++block) {
        const ScaleOffset factors = scale_at<FORMAT>(blocks[block] + codes_nbytes(shape, in_features), index);
        totals[block] = totals[block] + dots[block] * factors.scale;
        if (shape.has_offset) totals[block] = totals[block] + factors.offset * sums[index];
      }
    }
  }
  for (int block = 0; block < BLOCKS; ++block) results[block] = totals[block];
}

// One row against a pair of blocks.
inline void multiply_row_by_pair(f32x16 (&results)[2], const GgufBlockPair& pair, const GgufRows& row, int64_t in_features,
                                 bool is_gated) {
  const GgufBlock &first = pair.blocks[0], &second = pair.blocks[1];
  if (second.data != nullptr && second.format == first.format) {
    const uint8_t* const both[2] = {first.data, second.data};
    with_format(first.format, [&](auto format) {
      constexpr GgufFormat kind = decltype(format)::value;
      const int64_t nbytes = block_nbytes(shape_of(kind), in_features);
      multiply_row<kind, 2>(results, both, row, in_features, is_gated ? nbytes : 2 * nbytes);
    });
    return;
  }
  for (int i = 0; i < 2; ++i) {
    const GgufBlock& block = pair.blocks[i];
    if (block.data == nullptr) continue;
    with_format(block.format, [&](auto format) {
      constexpr GgufFormat kind = decltype(format)::value;
      multiply_row<kind, 1>(results + i, &block.data, row, in_features, block_nbytes(shape_of(kind), in_features));
    });
  }
}

// A block in bfloat16: pairs of inputs as in linear.h; then scales and offsets, 16 for every 16 or 32 inputs.
struct ExpandedBlock {
  uint32_t* words;
  float* scales;
  float* offsets;
  int64_t scale_inputs;
  bool has_offset;
};

// Memory for an expanded block, in floats of its parts.
constexpr int64_t expanded_nbytes(int64_t in_features) {
  return in_features / 2 * kVectorNbytes + in_features / kSumInputs * kVectorNbytes * 2;
}

template <GgufFormat FORMAT>
__attribute__((noinline)) void expand_block(ExpandedBlock& expanded, const uint8_t* block, int64_t in_features) {
  constexpr FormatShape shape = shape_of(FORMAT);
  const uint8_t* scales = block + codes_nbytes(shape, in_features);
  expanded.scale_inputs = shape.scale_inputs;
  expanded.has_offset = shape.has_offset;
  for (int64_t cell = 0; cell < in_features / kCellInputs; ++cell) {
    const uint8_t* codes = block + cell * cell_nbytes(shape);
#pragma GCC unroll 16
    for (int pair = 0; pair < kPairsPerCell; ++pair) {
      const u32x16 words = pair_words<FORMAT>(codes, pair);
      __builtin_memcpy(expanded.words + (cell * kPairsPerCell + pair) * kLanes, &words, sizeof words);
    }
  }
  for (int64_t index = 0; index < in_features / shape.scale_inputs; ++index) {
    const ScaleOffset factors = scale_at<FORMAT>(scales, index);
    store(expanded.scales + index * kLanes, factors.scale);
    if (shape.has_offset) store(expanded.offsets + index * kLanes, factors.offset);
  }
}

// Expands a block into `memory`, of expanded_nbytes.
inline ExpandedBlock expanded_in(void* memory, const GgufBlock& block, int64_t in_features) {
  ExpandedBlock expanded = {};
  expanded.words = static_cast<uint32_t*>(memory);
  expanded.scales = reinterpret_cast<float*>(expanded.words + in_features / 2 * kLanes);
  expanded.offsets = expanded.scales + in_features / kSumInputs * kLanes;
  with_format(block.format, [&](auto format) { expand_block<decltype(format)::value>(expanded, block.data, in_features); });
  return expanded;
}

// ROWS adjacent rows against an expanded block.
template <int ROWS>
__attribute__((noinline)) void multiply_expanded(f32x16* results, const ExpandedBlock& block, const GgufRows& rows,
                                                 int64_t in_features) {
  const int64_t half = in_features / 2, pairs = block.scale_inputs / 2;
  const float* sums = block.has_offset ? sums_of(rows.sums, block.scale_inputs, in_features) : nullptr;
  const int64_t per_row = sums_per_row(in_features);
  for (int row = 0; row < ROWS; ++row) results[row] = f32x16{};
  for (int64_t index = 0; index < in_features / block.scale_inputs; ++index) {
    f32x16 even[ROWS] = {}, odd[ROWS] = {};
    for (int64_t pair = index * pairs; pair < (index + 1) * pairs; ++pair) {
      const PairValues values = separated(load_bits(block.words + pair * kLanes));
      for (int row = 0; row < ROWS; ++row) {
        even[row] = even[row] + values.even * rows.split[row * 2 * half + pair];
        odd[row] = odd[row] + values.odd * rows.split[row * 2 * half + half + pair];
      }
    }
    const f32x16 scale = load(block.scales + index * kLanes);
    for (int row = 0; row < ROWS; ++row) results[row] = results[row] + (even[row] + odd[row]) * scale;
    if (!block.has_offset) continue;
    const f32x16 offset = load(block.offsets + index * kLanes);
    for (int row = 0; row < ROWS; ++row) results[row] = results[row] + offset * sums[row * per_row + index];
  }
}

inline bool any_has_offset(const PackedLinear& layer) {
  for (int64_t part = 0; part < layer.num_parts; ++part)
    if (shape_of(layer.parts[part].format).has_offset) return true;
  return false;
}

// The rows' sums, in scratch; null where no format asks for them.
inline const float* row_sums(const PackedLinear& layer, const LinearRows& rows) {
  if (!any_has_offset(layer)) return nullptr;
  const int64_t per_row = sums_per_row(layer.in_features);
  float* sums = static_cast<float*>(thread_scratch(kScratchSums, static_cast<size_t>(rows.num_rows * per_row) * 4));
  parallel_for(rows.num_rows, larger<int64_t>(1, 16384 / layer.in_features), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row)
      sum_row(sums + row * per_row, rows.x + row * rows.x_stride, layer.in_features);
  });
  return sums;
}

inline GgufRows split_rows(const PackedLinear& layer, const LinearRows& rows) {
  const int64_t size = layer.in_features;
  float* split = static_cast<float*>(thread_scratch(kScratchCaller, static_cast<size_t>(rows.num_rows * size) * 4));
  for (int64_t row = 0; row < rows.num_rows; ++row)
    split_row(split + row * size, split + row * size + size / 2, rows.x + row * rows.x_stride, size);
  return {split, row_sums(layer, rows)};
}

inline void gguf_one_row(const PackedLinear& layer, const LinearRows& rows) {
  const GgufRows row = split_rows(layer, rows);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  for_pieces(layer, rows, num_pairs, 0, [&](int64_t begin, int64_t end, const OutputSink& sink, char*) {
    for (int64_t pair = begin; pair < end; ++pair) {
      f32x16 sums[2] = {};
      multiply_row_by_pair(sums, block_pair(layer, pair), row, layer.in_features, is_gated(layer));
      sink.put(0, pair * 2 * kBlockOutputs, sums[0], sums[1]);
    }
  });
}

// Adjacent rows of `all`, from `row` on. Without sums there are none to point to.
ALWAYS_INLINE GgufRows rows_from(const GgufRows& all, int64_t row, int64_t in_features) {
  return {all.split + row * in_features, all.sums == nullptr ? nullptr : all.sums + row * sums_per_row(in_features)};
}

// Every row against a pair of blocks, four at a time.
inline void multiply_pair(const OutputSink& sink, const GgufRows& x, const ExpandedBlock (&blocks)[2], int64_t num_rows,
                          int64_t size, int64_t output) {
  constexpr int64_t group = 4;
  for (int64_t row = 0; row < num_rows; row += group) {
    const int64_t count = smaller(group, num_rows - row);
    f32x16 sums[2][group] = {};
    for (int i = 0; i < 2; ++i) {
      if (blocks[i].words == nullptr) continue;
      if (count == group) multiply_expanded<group>(sums[i], blocks[i], rows_from(x, row, size), size);
      else
        for (int64_t at = 0; at < count; ++at)
          multiply_expanded<1>(sums[i] + at, blocks[i], rows_from(x, row + at, size), size);
    }
    for (int64_t at = 0; at < count; ++at) sink.put(row + at, output, sums[0][at], sums[1][at]);
  }
}

// Any number of rows, without tile instructions.
inline void gguf_rows(const PackedLinear& layer, const LinearRows& rows) {
  if (rows.num_rows == 1) return gguf_one_row(layer, rows);
  const GgufRows x = split_rows(layer, rows);
  const int64_t size = layer.in_features, nbytes = expanded_nbytes(size);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  for_pieces(layer, rows, num_pairs, 2 * nbytes, [&](int64_t begin, int64_t end, const OutputSink& sink, char* scratch) {
    for (int64_t pair = begin; pair < end; ++pair) {
      const GgufBlockPair both = block_pair(layer, pair);
      ExpandedBlock blocks[2] = {};
      for (int i = 0; i < 2; ++i)
        if (both.blocks[i].data != nullptr) blocks[i] = expanded_in(scratch + i * nbytes, both.blocks[i], size);
      multiply_pair(sink, x, blocks, rows.num_rows, size, pair * 2 * kBlockOutputs);
    }
  });
}

// One row of a table: the output `lane` of a block, scaled and rounded.
template <GgufFormat FORMAT>
void read_output(bfloat16* out, const uint8_t* block, int64_t lane, int64_t in_features) {
  constexpr FormatShape shape = shape_of(FORMAT);
  const uint8_t* scales = block + codes_nbytes(shape, in_features);
  for (int64_t i = 0; i < in_features; i += 2) {
    const ScaleOffset factors = scale_at<FORMAT>(scales, i / shape.scale_inputs);
    const uint8_t* cell = block + i / kCellInputs * cell_nbytes(shape);
    const PairValues pair = pair_values<FORMAT>(cell, static_cast<int>(i % kCellInputs / 2));
    bfloat16 even[kLanes], odd[kLanes];
    store(even, pair.even * factors.scale + factors.offset);
    store(odd, pair.odd * factors.scale + factors.offset);
    out[i] = even[lane];
    out[i + 1] = odd[lane];
  }
}

// Rows of a layer's weight, times scale: an embedding.
inline void embed_gguf(bfloat16* out, const int64_t* token_ids, const PackedLinear& table, int64_t num_tokens,
                       int64_t size, int64_t out_stride, float scale, bool is_scaled) {
  parallel_for(num_tokens, 4, [&](int64_t begin, int64_t end) {
    for (int64_t token = begin; token < end; ++token) {
      const int64_t row = token_ids[token];
      bfloat16* to = out + token * out_stride;
      const GgufBlock block = block_of(table.parts[0], row / kBlockOutputs, size);
      with_format(block.format, [&](auto format) {
        read_output<decltype(format)::value>(to, block.data, row % kBlockOutputs, size);
      });
      if (!is_scaled) continue;
      for (int64_t i = 0; i < size; i += kLanes) store_some(to + i, load_some(to + i, size - i) * scale, size - i);
    }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
