// GGUF blocks (gguf_linear.h) with tile instructions: the dot products of a scale's inputs are one tile instruction, and vectors
// scale and add them up meanwhile.
//
// A pair of blocks is expanded once for a panel of rows, and multiplied 256 inputs at a time: their weights then stay in the
// first cache, and so do the 16 rows that meet them. Sums lie in memory from one stretch of inputs to the next.
#pragma once

#include "amx_linear.h"
#include "gguf_linear.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kFewRows = 4;
constexpr int64_t kStretchInputs = 256;

// Tiles 0 to 3 are sums of `rows` rows; 4 and 5 rows, 6 and 7 weights, of `inputs` inputs.
class GgufTileScope {
 public:
  GgufTileScope(int64_t inputs, int64_t rows) {
    TileConfig config;
    for (int tile = 0; tile < kNumTiles; ++tile) {
      const bool is_rows = tile == 4 || tile == 5, is_weights = tile > 5;
      config.row_nbytes[tile] = static_cast<uint16_t>(is_rows ? inputs * 2 : 64);
      config.num_rows[tile] = static_cast<uint8_t>(is_weights ? inputs / 2 : rows);
    }
    tile_fence();
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~GgufTileScope() { _tile_release(); }
  GgufTileScope(const GgufTileScope&) = delete;
  GgufTileScope& operator=(const GgufTileScope&) = delete;
};

// Up to 16 rows and the sums of their inputs; those of rows that are not there repeat the last one's.
struct GgufTileRows {
  TileInputs x;
  const float* sums;
  int64_t sums_stride;
  int64_t num_rows;
};

template <int ROWS>
ALWAYS_INLINE void add_scaled_dots(f32x16 (&totals)[ROWS], const float* dots, const ExpandedBlock& block,
                                   const float* const (&sums)[ROWS], int64_t index) {
  const f32x16 scale = load(block.scales + index * kLanes);
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) totals[row] = totals[row] + load(dots + row * kLanes) * scale;
  if (!block.has_offset) return;
  const f32x16 offset = load(block.offsets + index * kLanes);
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) totals[row] = totals[row] + offset * sums[row][index];
}

// One step of multiply_stretch. Tile instructions take their registers as literals: tile `at` gets the dot products of the
// index-th inputs, the tile before is stored, and the one before that is scaled and added up.
#define DIPTYCH_GGUF_STEP(at, before, two_before, rows_tile, weights_tile)                                        \
  if (index < end) {                                                                                              \
    _tile_zero(at);                                                                                               \
    _tile_loadd(rows_tile, rows.x.rows + index * inputs * 2, rows.x.stride_nbytes);                               \
    _tile_loadd(weights_tile, words + index * inputs * 32, 64);                                                   \
    _tile_dpbf16ps(at, rows_tile, weights_tile);                                                                  \
  }                                                                                                               \
  if (index > begin && index <= end) _tile_stored(before, dots[before], 64);                                      \
  tile_fence();                                                                                                   \
  if (index > begin + 1) add_scaled_dots<ROWS>(totals, dots[two_before], block, sums, index - 2);                 \
  tile_fence();                                                                                                   \
  if (++index == end + 2) break

// Adds the products of the begin-th to end-th scales' inputs to result, [ROWS][16].
template <int ROWS>
__attribute__((noinline)) void multiply_stretch(float* result, const ExpandedBlock& block, const GgufTileRows& rows,
                                                int64_t begin, int64_t end, int64_t in_features) {
  alignas(64) float dots[4][ROWS * kLanes];
  const int64_t inputs = block.scale_inputs;
  const char* words = reinterpret_cast<const char*>(block.words);
  f32x16 totals[ROWS];
  const float* sums[ROWS] = {};
  if (block.has_offset)
    for (int row = 0; row < ROWS; ++row)
      sums[row] = sums_of(rows.sums, inputs, in_features) + smaller<int64_t>(row, rows.num_rows - 1) * rows.sums_stride;
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) totals[row] = load(result + row * kLanes);
  tile_fence();
  for (int64_t index = begin;;) {
    DIPTYCH_GGUF_STEP(0, 3, 2, 4, 6);
    DIPTYCH_GGUF_STEP(1, 0, 3, 5, 7);
    DIPTYCH_GGUF_STEP(2, 1, 0, 4, 6);
    DIPTYCH_GGUF_STEP(3, 2, 1, 5, 7);
  }
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; ++row) store(result + row * kLanes, totals[row]);
}

#undef DIPTYCH_GGUF_STEP

// What a thread works on: a pair of blocks, expanded, and the sums of a panel of rows, [block][row][16].
struct GgufTilePair {
  ExpandedBlock blocks[2];
  float* results;
  int64_t padded_rows;

  static int64_t nbytes(int64_t panel_rows, int64_t in_features) {
    return 2 * (panel_rows * kLanes * 4 + expanded_nbytes(in_features));
  }

  // scratch: of nbytes(panel_rows); num_rows: of this panel.
  GgufTilePair(const GgufBlockPair& packed, int64_t num_rows, int64_t in_features, char* scratch)
      : blocks(), results(reinterpret_cast<float*>(scratch)), padded_rows(round_up(num_rows, kTileRows)) {
    const int64_t results_nbytes = 2 * padded_rows * kLanes * 4;
    __builtin_memset(results, 0, static_cast<size_t>(results_nbytes));
    for (int i = 0; i < 2; ++i)
      if (packed.blocks[i].data != nullptr)
        blocks[i] = expanded_in(scratch + results_nbytes + i * expanded_nbytes(in_features), packed.blocks[i], in_features);
  }

  float* result(int64_t block, int64_t row) const { return results + (block * padded_rows + row) * kLanes; }
};

// A panel of rows and the sums of all rows' inputs.
struct GgufPanel {
  const RowTiles& x;
  const float* sums;
  int64_t row_begin;
  int64_t row_end;
  int64_t in_features;
};

// All rows of a panel against those of the blocks whose scales belong to `scale_inputs` inputs.
inline void multiply_panel(const GgufTilePair& pair, const GgufPanel& panel, int64_t scale_inputs) {
  const bool are_few = panel.row_end - panel.row_begin <= kFewRows;
  const int64_t per_row = sums_per_row(panel.in_features);
  const GgufTileScope tiles(scale_inputs, are_few ? kFewRows : kTileRows);
  for (int64_t begin = 0; begin < panel.in_features; begin += kStretchInputs) {
    const int64_t first = begin / scale_inputs, last = smaller(begin + kStretchInputs, panel.in_features) / scale_inputs;
    for (int64_t row = panel.row_begin; row < panel.row_end; row += kTileRows) {
      const float* sums = panel.sums == nullptr ? nullptr : panel.sums + row * per_row;
      const GgufTileRows tile = {panel.x.at(row), sums, per_row, smaller(kTileRows, panel.row_end - row)};
      for (int64_t i = 0; i < 2; ++i) {
        if (pair.blocks[i].scale_inputs != scale_inputs) continue;
        float* result = pair.result(i, row - panel.row_begin);
        if (are_few) multiply_stretch<kFewRows>(result, pair.blocks[i], tile, first, last, panel.in_features);
        else multiply_stretch<kTileRows>(result, pair.blocks[i], tile, first, last, panel.in_features);
      }
    }
  }
}

inline void gguf_tiles(const PackedLinear& layer, const LinearRows& rows) {
  const int64_t size = layer.in_features;
  const RowTiles x(rows, size);
  const float* sums = row_sums(layer, rows);
  const int64_t most_rows = larger(kRowBlock, kPanelNbytes / (size * 2));
  const int64_t panel_rows = round_up(ceil_div(rows.num_rows, ceil_div(rows.num_rows, most_rows)), kTileRows);
  const int64_t num_pairs = ceil_div(layer.out_features, 2 * kBlockOutputs);
  const auto piece = [&](int64_t begin, int64_t end, const OutputSink& sink, char* scratch) {
    for (int64_t index = begin; index < end; ++index) {
      const int64_t row_begin = index / num_pairs * panel_rows, output = index % num_pairs * 2 * kBlockOutputs;
      const GgufPanel panel = {x, sums, row_begin, smaller(row_begin + panel_rows, rows.num_rows), size};
      const GgufTilePair pair(block_pair(layer, index % num_pairs), panel.row_end - row_begin, size, scratch);
      for (int64_t scale_inputs = kSumInputs; scale_inputs <= 2 * kSumInputs; scale_inputs *= 2)
        if (pair.blocks[0].scale_inputs == scale_inputs || pair.blocks[1].scale_inputs == scale_inputs)
          multiply_panel(pair, panel, scale_inputs);
      for (int64_t row = 0; row < panel.row_end - row_begin; ++row)
        sink.put(row_begin + row, output, load(pair.result(0, row)), load(pair.result(1, row)));
    }
  };
  const int64_t count = num_pairs * ceil_div(rows.num_rows, panel_rows);
  for_pieces(layer, rows, count, GgufTilePair::nbytes(panel_rows, size), piece);
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
