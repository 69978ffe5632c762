// Linear layers over packed weights (linear.h) with tile instructions: 32 rows by 32 outputs at a time.
//
// While the tiles of one block of the result are multiplied, the sums of the block before are finished and stored, between
// the tile instructions: those leave the vector units idle.
#pragma once

#include "amx.h"
#include "linear.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kTileRows = 16;
constexpr int64_t kTileElements = 256;
constexpr int64_t kMaxVectorRows = 1;  // from two rows on tiles are faster, although most of a tile is empty
constexpr int64_t kRowBlock = 2 * kTileRows;
constexpr int64_t kPanelNbytes = 1 << 19;  // rows of x worked on at once: they stay in an L2 cache of 2 MiB beside weights and results
constexpr int64_t kPrefetchNbytes = 8192;

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

// The tiles of a pair of blocks as bfloat16. The first rows to use them call `prepare(tile)` before the tile.
template <class Weights>
class WeightTiles;

// In place; preparing fetches what comes later from memory.
template <>
class WeightTiles<Bfloat16Weights> {
 public:
  static int64_t scratch_nbytes(int64_t) { return 0; }

  WeightTiles(char*, int64_t) {}

  ALWAYS_INLINE void open(const BlockPair& blocks) { blocks_ = blocks; }

  ALWAYS_INLINE void prepare(int64_t tile) const {
    for (int block = 0; block < 2; ++block) {
      const char* from = blocks_.ahead(block, tile * kBfloat16TileNbytes, kPrefetchNbytes);
#pragma GCC unroll 16
      for (int64_t line = 0; line < kBfloat16TileNbytes; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
    }
  }

  ALWAYS_INLINE const char* at(int block, int64_t tile) const {
    return blocks_.weights[block] + tile * kBfloat16TileNbytes;
  }

 private:
  BlockPair blocks_{};
};

// Widened into scratch, two tiles ahead of their use: a tile cannot be read from stores that are still under way.
template <>
class WeightTiles<Int8Weights> {
 public:
  static int64_t scratch_nbytes(int64_t num_tiles) { return 2 * num_tiles * kBfloat16TileNbytes; }

  WeightTiles(char* scratch, int64_t num_tiles) : scratch_(scratch), num_tiles_(num_tiles) {}

  ALWAYS_INLINE void open(const BlockPair& blocks) {
    blocks_ = blocks;
    for (int64_t tile = 0; tile < smaller(kTilesAhead, num_tiles_); ++tile) widen_tiles(tile);
  }

  ALWAYS_INLINE void prepare(int64_t tile) const {
    if (tile + kTilesAhead < num_tiles_) widen_tiles(tile + kTilesAhead);
  }

  ALWAYS_INLINE const char* at(int block, int64_t tile) const {
    return scratch_ + (tile * 2 + block) * kBfloat16TileNbytes;
  }

 private:
  static constexpr int64_t kTilesAhead = 2;

  ALWAYS_INLINE void widen_tiles(int64_t tile) const {
    for (int block = 0; block < 2; ++block) {
      const int64_t offset = tile * Int8Weights::kTileNbytes;
      const char* later = blocks_.ahead(block, offset, kPrefetchNbytes / 2);
      char* to = scratch_ + (tile * 2 + block) * kBfloat16TileNbytes;
#pragma GCC unroll 8
      for (int64_t group = 0; group < kPairsPerTile / 2; ++group) {
        _mm_prefetch(later + group * 64, _MM_HINT_T0);
        u32x16 pairs[2];
        Int8Weights::load_pairs(pairs, blocks_.weights[block] + offset, group);
        __builtin_memcpy(to + group * 128, pairs, sizeof pairs);
      }
    }
    tile_fence();
  }

  BlockPair blocks_{};
  char* scratch_;
  int64_t num_tiles_;
};

// One thread's piece of a GEMM.
template <class Weights>
class TileColumns {
 public:
  TileColumns(const OutputSink& sink, const RowTiles& x, char* scratch, int64_t num_tiles)
      : sink_(sink), x_(x), weights_(scratch, num_tiles), num_tiles_(num_tiles), rows_a_tile_(ceil_div(kRowBlock, num_tiles)) {}

  // Rows row_begin..row_end against the two blocks that begin at packed column `output`.
  ALWAYS_INLINE void add(const BlockPair& blocks, int64_t output, int64_t row_begin, int64_t row_end) {
    weights_.open(blocks);
    for (int64_t row = row_begin; row < row_end; row += kRowBlock) {
      const int64_t num_rows = smaller(kRowBlock, row_end - row);
      const bool is_first = row == row_begin, has_lower = num_rows > kTileRows;
      float* sums = sums_[is_odd_];
      if (has_lower && is_first) multiply<true, true>(sums, row);
      else if (has_lower) multiply<false, true>(sums, row);
      else if (is_first) multiply<true, false>(sums, row);
      else multiply<false, false>(sums, row);
      finish();
      pending_ = {row, output, 0, num_rows, sums};
      is_odd_ ^= 1;
    }
  }

  // What has been multiplied last.
  ALWAYS_INLINE void finish() { put_rows(kRowBlock); }

 private:
  // A block of the result that has been multiplied; rows from `next` on are still to be put.
  struct Pending {
    int64_t row;
    int64_t output;
    int64_t next;
    int64_t num_rows;
    const float* sums;
  };

  ALWAYS_INLINE void put_rows(int64_t count) {
    const int64_t end = smaller(pending_.next + count, pending_.num_rows);
    for (; pending_.next < end; ++pending_.next) {
      const int64_t index = pending_.next;
      const float* from = pending_.sums + index / kTileRows * 2 * kTileElements + index % kTileRows * kBlockOutputs;
      sink_.put(pending_.row + index, pending_.output, load(from), load(from + kTileElements));
    }
  }

  // 32 x 32 sums as four tiles: rows 0-15 of block 0, of block 1, then rows 16-31 of both; or the first two of these.
  template <bool IS_FIRST, bool HAS_LOWER>
  ALWAYS_INLINE void multiply(float* sums, int64_t row) {
    const TileInputs upper = x_.at(row), lower = x_.at(HAS_LOWER ? row + kTileRows : row);
    tile_fence();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t tile = 0; tile < num_tiles_; ++tile) {
      if (IS_FIRST) weights_.prepare(tile);
      _tile_loadd(4, upper.rows + tile * 64, upper.stride_nbytes);
      _tile_loadd(6, weights_.at(0, tile), 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, weights_.at(1, tile), 64);
      _tile_dpbf16ps(1, 4, 7);
      if (HAS_LOWER) {
        _tile_loadd(5, lower.rows + tile * 64, lower.stride_nbytes);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      put_rows(rows_a_tile_);
    }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + kTileElements, 64);
    if (HAS_LOWER) {
      _tile_stored(2, sums + 2 * kTileElements, 64);
      _tile_stored(3, sums + 3 * kTileElements, 64);
    }
    tile_fence();
  }

  const OutputSink& sink_;
  const RowTiles& x_;
  WeightTiles<Weights> weights_;
  const int64_t num_tiles_;
  const int64_t rows_a_tile_;
  Pending pending_{};
  int is_odd_ = 0;
  alignas(64) float sums_[2][4 * kTileElements];
};

template <class Weights>
void linear_tiles(const PackedLinear& layer, const LinearRows& rows) {
  const RowTiles x(rows, layer.in_features);
  const int64_t num_tiles = layer.in_features / kTileInputs;
  const int64_t panel_rows = larger(kRowBlock, kPanelNbytes / (layer.in_features * 2) / kRowBlock * kRowBlock);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  const int64_t count = num_pairs * ceil_div(rows.num_rows, panel_rows);
  const auto piece = [&](int64_t begin, int64_t end, const OutputSink& sink, char* scratch) {
    const TileScope tiles;
    TileColumns<Weights> columns(sink, x, scratch, num_tiles);
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row = index / num_pairs * panel_rows, output = index % num_pairs * 2 * kBlockOutputs;
      columns.add(BlockPair::at(layer, output, Weights()), output, row, smaller(row + panel_rows, rows.num_rows));
    }
    columns.finish();
  };
  for_pieces(layer, rows, count, WeightTiles<Weights>::scratch_nbytes(num_tiles), piece);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
