// bfloat16 linear layers over packed weights (linear.h) with tile instructions: 32 rows by 32 outputs at a time.
#pragma once

#include "amx.h"
#include "linear.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileElements = 256;
constexpr int64_t kMaxVectorRows = 4;  // up to here linear_rows is as fast: the weights' way from memory decides
constexpr int64_t kRowBlock = 2 * kTileRows;
constexpr int64_t kPanelNbytes = 1 << 20;  // rows of x worked on at once: they stay in half of an L2 cache of 2 MiB
constexpr int64_t kPrefetchNbytes = 8192;

ALWAYS_INLINE void prefetch_tile(const char* from) {
#pragma GCC unroll 16
  for (int line = 0; line < 16; ++line) _mm_prefetch(from + kPrefetchNbytes + line * 64, _MM_HINT_T0);
}

// Sixteen rows of inputs: in place, or the padded copy of the last rows.
struct TileInputs {
  const char* rows;
  int64_t stride_nbytes;
};

// Row tiles of x. Tiles read 16 rows whether there or not, so the last, incomplete ones are copied and filled with zeros.
class RowTiles {
 public:
  RowTiles(const LinearRows& rows, int64_t in_features)
      : rows_(rows), num_whole_(rows.num_rows / kTileRows * kTileRows), tail_stride_(in_features * 2 + 64) {
    const int64_t num_left = rows.num_rows - num_whole_;
    if (num_left == 0) return;
    tail_ = static_cast<char*>(thread_scratch(kScratchCaller, static_cast<size_t>(tail_stride_ * kTileRows)));
    const size_t row_nbytes = static_cast<size_t>(in_features) * 2;
    for (int64_t row = 0; row < kTileRows; ++row) {
      char* to = tail_ + row * tail_stride_;
      if (row < num_left) __builtin_memcpy(to, rows.x + (num_whole_ + row) * rows.x_stride, row_nbytes);
      else __builtin_memset(to, 0, row_nbytes);
    }
  }

  TileInputs at(int64_t row) const {
    if (row >= num_whole_) return {tail_, tail_stride_};
    return {reinterpret_cast<const char*>(rows_.x + row * rows_.x_stride), rows_.x_stride * 2};
  }

 private:
  const LinearRows& rows_;
  int64_t num_whole_;
  int64_t tail_stride_;  // not a multiple of 4 KiB: rows fall into different cache sets
  char* tail_ = nullptr;
};

// 32 x 32 sums as four tiles: rows 0-15 of block 0, of block 1, then rows 16-31 of both. PREFETCH: the weights come from
// memory, as they do for the first rows; later rows find them in the cache.
template <bool PREFETCH>
ALWAYS_INLINE void multiply_four_tiles(float* sums, TileInputs upper, TileInputs lower, const char* const (&weights)[2],
                                       int64_t in_features) {
  tile_fence();
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t tile = 0; tile < in_features / kTileInputs; ++tile) {
    if (PREFETCH) {
      prefetch_tile(weights[0] + tile * 1024);
      prefetch_tile(weights[1] + tile * 1024);
    }
    _tile_loadd(4, upper.rows + tile * 64, upper.stride_nbytes);
    _tile_loadd(6, weights[0] + tile * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights[1] + tile * 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
    _tile_loadd(5, lower.rows + tile * 64, lower.stride_nbytes);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileElements, 64);
  _tile_stored(2, sums + 2 * kTileElements, 64);
  _tile_stored(3, sums + 3 * kTileElements, 64);
  tile_fence();
}

// 16 x 32 sums as two tiles. Bound by memory when rows are few, so the weights are fetched well ahead.
ALWAYS_INLINE void multiply_two_tiles(float* sums, TileInputs x, const char* const (&weights)[2], int64_t in_features) {
  tile_fence();
  _tile_zero(0);
  _tile_zero(1);
  for (int64_t tile = 0; tile < in_features / kTileInputs; ++tile) {
    prefetch_tile(weights[0] + tile * 1024);
    prefetch_tile(weights[1] + tile * 1024);
    _tile_loadd(4, x.rows + tile * 64, x.stride_nbytes);
    _tile_loadd(6, weights[0] + tile * 1024, 64);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(7, weights[1] + tile * 1024, 64);
    _tile_dpbf16ps(1, 4, 7);
  }
  _tile_stored(0, sums, 64);
  _tile_stored(1, sums + kTileElements, 64);
  tile_fence();
}

// Rows row_begin..row_end against the two blocks that begin at packed column `output`.
ALWAYS_INLINE void linear_column(const PackedLinear& layer, const LinearRows& rows, const RowTiles& x, int64_t row_begin,
                                 int64_t row_end, int64_t output) {
  alignas(64) float sums[4 * kTileElements];
  const char* first = static_cast<const char*>(layer.weight) + output * layer.in_features * 2;
  const bool has_second = output + kBlockOutputs < layer.out_features;
  const char* const weights[2] = {first, has_second ? first + kBlockOutputs * layer.in_features * 2 : first};
  for (int64_t row = row_begin; row < row_end; row += kRowBlock) {
    const int64_t num_rows = smaller(kRowBlock, row_end - row);
    if (num_rows > kTileRows) {
      const TileInputs upper = x.at(row), lower = x.at(row + kTileRows);
      if (row == row_begin) multiply_four_tiles<true>(sums, upper, lower, weights, layer.in_features);
      else multiply_four_tiles<false>(sums, upper, lower, weights, layer.in_features);
    } else multiply_two_tiles(sums, x.at(row), weights, layer.in_features);
    for (int64_t index = 0; index < num_rows; ++index) {
      const float* from = sums + index / kTileRows * 2 * kTileElements + index % kTileRows * kBlockOutputs;
      store_block_pair(layer, rows, row + index, output, load(from), load(from + kTileElements));
    }
  }
}

inline void linear_tiles(const PackedLinear& layer, const LinearRows& rows) {
  const RowTiles x(rows, layer.in_features);
  const int64_t panel_rows = larger(kRowBlock, kPanelNbytes / (layer.in_features * 2) / kRowBlock * kRowBlock);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  const int64_t grain = block_pairs_per_piece(layer, num_pairs);
  const int64_t pieces_per_panel = ceil_div(num_pairs, grain);
  const int64_t num_panels = ceil_div(rows.num_rows, panel_rows);
  parallel_for(num_panels * pieces_per_panel, 1, [&](int64_t begin, int64_t end) {
    const TileScope tiles;
    const FlushDenormals flush;
    for (int64_t piece = begin; piece < end; ++piece) {
      const int64_t row_begin = piece / pieces_per_panel * panel_rows;
      const int64_t row_end = smaller(row_begin + panel_rows, rows.num_rows);
      const int64_t first_pair = piece % pieces_per_panel * grain;
      for (int64_t pair = first_pair; pair < smaller(first_pair + grain, num_pairs); ++pair)
        linear_column(layer, rows, x, row_begin, row_end, pair * 2 * kBlockOutputs);
    }
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
