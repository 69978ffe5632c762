// What adapters (Hu et al. 2021, https://arxiv.org/abs/2106.09685) add to a linear layer: two thin GEMMs for each segment of
// rows, both on one thread, so that a step with many adapters has as many independent pieces and no waiting in between.
//
// A row's result does not depend on the rows beside it, as for any linear layer.
#pragma once

#include "any_linear.h"

namespace diptych {
namespace DIPTYCH_ISA {

// One adapter's part for the rows of one segment; `rows.out` is the first column of the segment's first row.
inline void add_low_rank(const LowRank& part, const LinearRows& rows) {
  const int64_t rank = part.up.in_features;
  const size_t nbytes = static_cast<size_t>(rows.num_rows * rank) * sizeof(bfloat16);
  bfloat16* narrow = static_cast<bfloat16*>(thread_scratch(kScratchLowRank, nbytes));
  if (part.down.num_outputs < rank) __builtin_memset(narrow, 0, nbytes);
  linear_of<Bfloat16Weights>(part.down, {rows.x, narrow, rows.num_rows, rows.x_stride, rank});
  bfloat16* out = static_cast<bfloat16*>(rows.out) + part.column;
  linear_of<Bfloat16Weights>(part.up, {narrow, out, rows.num_rows, rank, rows.out_stride});
}

// What an adapter adds to rows of one segment: every column of `rows.out`, zeros where it adds nothing.
inline void put_low_ranks(const LowRank* parts, int64_t num_parts, const LinearRows& rows) {
  const LowRank* const end = parts + num_parts;
  bool is_whole = num_parts > 0;
  for (const LowRank* part = parts; part < end; ++part) is_whole = is_whole && part->down.weight != nullptr;
  const size_t nbytes = static_cast<size_t>(rows.num_rows * rows.out_stride) * sizeof(bfloat16);
  if (!is_whole) __builtin_memset(rows.out, 0, nbytes);
  for (const LowRank* part = parts; part < end; ++part)
    if (part->down.weight != nullptr) add_low_rank(*part, rows);
}

// rows.out: bfloat16, what to add to each row of the step in packed order. The step's segments are few rows each, and say
// which rows there are.
inline void put_step(const AdaptedLinear& adapted, const AdapterStep& step, const LinearRows& rows) {
  parallel_for(step.num_segments, 1, [&](int64_t begin, int64_t end) {
    const SerialScope serial;
    for (const AdapterSegment* at = step.segments + begin; at < step.segments + end; ++at) {
      bfloat16* out = static_cast<bfloat16*>(rows.out) + at->begin * rows.out_stride;
      put_low_ranks(adapted.parts + at->slot * adapted.num_parts, at->slot < 0 ? 0 : adapted.num_parts,
                    {rows.x + at->begin * rows.x_stride, out, at->count, rows.x_stride, rows.out_stride});
    }
  });
}

// A linear layer with what adapters add to it; without either it is the layer alone.
template <class Linear>
void adapted_linear(const PackedLinear& layer, const AdaptedLinear* adapted, const AdapterStep* step, const LinearRows& rows,
                    const Linear& linear) {
  if (adapted == nullptr || step == nullptr)
    return linear(layer, rows.x, rows.out, rows.num_rows, rows.x_stride, rows.out_stride);
  PackedLinear with = layer;
  with.addend_stride = layer.out_features;
  const size_t nbytes = static_cast<size_t>(rows.num_rows * with.addend_stride) * sizeof(bfloat16);
  void* addend = thread_scratch(kScratchAddend, nbytes);
  put_step(*adapted, *step, {rows.x, addend, rows.num_rows, rows.x_stride, with.addend_stride});
  with.addend = addend;
  linear(with, rows.x, rows.out, rows.num_rows, rows.x_stride, rows.out_stride);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
