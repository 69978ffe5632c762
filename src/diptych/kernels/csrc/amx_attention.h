// Attention of one piece with tile instructions: bfloat16, head sizes that are multiples of 32, pages of whole 16 tokens.
//
// Blocks of up to 256 keys, with a running maximum (FlashAttention, Dao et al. 2022, https://arxiv.org/abs/2205.14135).
// Scores are computed transposed, keys by query rows: keys are read from their pages as they lie, and the softmax runs
// down the columns, sixteen query rows abreast. Weights are rounded to bfloat16 for the product with the values.
//
// Tiles of float32 are [16][16]; those of bfloat16 pairs are [16][16][2]. Layouts, outermost first:
//   query    [row tile][D / 32]           16 pairs of dims by 16 query rows
//   scores   [row tile][key tile]         16 keys by 16 query rows
//   weights  [row tile][pair of key tiles]   16 query rows by 16 pairs of keys
//   values   [pair of key tiles][D / 16]  16 pairs of keys by 16 dims, in the order of `interleave`
//   sums     [row tile][D / 16]           16 query rows by 16 dims, in that order
#pragma once

#include "amx.h"
#include "amx_linear.h"
#include "attention.h"

namespace diptych {
namespace DIPTYCH_ISA {

constexpr int64_t kBlockKeys = 256;
constexpr int64_t kBlockKeyTiles = kBlockKeys / kTileRows;

// 16 x 16 elements of 32 bits, transposed; `stride` in elements.
ALWAYS_INLINE void transpose_tile(uint32_t* to, const uint32_t* from, int64_t stride) {
  __m512i rows[16], pairs[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; ++i) rows[i] = _mm512_loadu_si512(from + i * stride);
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    pairs[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
    pairs[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    rows[i] = _mm512_unpacklo_epi64(pairs[i], pairs[i + 2]);
    rows[i + 1] = _mm512_unpackhi_epi64(pairs[i], pairs[i + 2]);
    rows[i + 2] = _mm512_unpacklo_epi64(pairs[i + 1], pairs[i + 3]);
    rows[i + 3] = _mm512_unpackhi_epi64(pairs[i + 1], pairs[i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; ++i) {  // rows[i], [i + 4], ..: column i of each 128-bit lane, for four groups of rows
    const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0x88), b = _mm512_shuffle_i32x4(rows[i], rows[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(rows[i + 8], rows[i + 12], 0xdd);
    _mm512_storeu_si512(to + i * 16, _mm512_shuffle_i32x4(a, c, 0x88));
    _mm512_storeu_si512(to + (i + 4) * 16, _mm512_shuffle_i32x4(b, d, 0x88));
    _mm512_storeu_si512(to + (i + 8) * 16, _mm512_shuffle_i32x4(a, c, 0xdd));
    _mm512_storeu_si512(to + (i + 12) * 16, _mm512_shuffle_i32x4(b, d, 0xdd));
  }
}

// Scratch of one piece, carved from one allocation.
struct TileBuffers {
  char* query;
  float* scores;
  char* weights;
  char* values;
  float* sums;
  float* staging;

  TileBuffers(int64_t num_row_tiles, int64_t size) {
    const int64_t query_nbytes = num_row_tiles * (size / 32) * 1024;
    const int64_t scores_nbytes = num_row_tiles * kBlockKeyTiles * 1024;
    const int64_t weights_nbytes = scores_nbytes / 2;
    const int64_t values_nbytes = kBlockKeyTiles / 2 * (size / 16) * 1024;
    const int64_t sums_nbytes = num_row_tiles * (size / 16) * 1024;
    const int64_t staging_nbytes = num_row_tiles * kTileRows * (size + 2) * 4;
    const int64_t total = query_nbytes + scores_nbytes + weights_nbytes + values_nbytes + sums_nbytes + staging_nbytes;
    query = static_cast<char*>(thread_scratch(kScratchWorker, static_cast<size_t>(total)));
    scores = reinterpret_cast<float*>(query + query_nbytes);
    weights = reinterpret_cast<char*>(scores) + scores_nbytes;
    values = weights + weights_nbytes;
    sums = reinterpret_cast<float*>(values + values_nbytes);
    staging = reinterpret_cast<float*>(reinterpret_cast<char*>(sums) + sums_nbytes);
  }
};

class TilePiece {
 public:
  TilePiece(const AttentionCall& call, const AttentionPiece& piece)
      : call_(call),
        piece_(piece),
        size_(call.layer.head_dim),
        group_(call.group_size()),
        num_rows_((piece.token_end - piece.token_begin) * group_),
        num_row_tiles_(num_rows_ > kTileRows ? round_up(num_rows_, kRowBlock) / kTileRows : 1),
        buffers_(num_row_tiles_, size_) {
    for (int64_t row = 0; row < num_row_tiles_ * kTileRows; ++row) {
      maxima_[row] = kNegativeInfinity;
      weights_[row] = 0.0f;
      // Rows that are not there stand at the last token: finite, and never stored.
      const int64_t token = smaller(piece.token_begin + row / group_, piece.token_end - 1);
      positions_[row] = static_cast<int32_t>(call.position(piece.row, token));
    }
  }

  void attend() {
    pack_query();
    for (int64_t key = first_tile_key(piece_); key < piece_.key_end; key += kBlockKeys)
      attend_block(key, num_block_tiles(piece_, key));
  }

  // The sums in plain order, rows side by side.
  void unpack(const AttentionSums& to) const {
    for (int64_t row = 0; row < num_rows_; ++row) {
      const float* from = buffers_.sums + row / kTileRows * (size_ / 16) * kTileElements + row % kTileRows * 16;
      for (int64_t d = 0; d < size_; d += 32) unpack_32(to.values + row * size_ + d, from + d / 16 * kTileElements);
      to.maxima[row] = maxima_[row];
      to.weights[row] = weights_[row];
    }
  }

  AttentionSums staging() const {
    float* floats = buffers_.staging;
    return {floats, floats + num_rows_ * size_, floats + num_rows_ * (size_ + 1)};
  }

 private:
  void pack_query() {
    alignas(64) uint32_t rows[16][16];
    const bfloat16* query = static_cast<const bfloat16*>(call_.tensors.query);
    for (int64_t tile = 0; tile < num_row_tiles_; ++tile)
      for (int64_t d = 0; d < size_; d += 32) {
        for (int64_t i = 0; i < kTileRows; ++i) {
          const int64_t row = tile * kTileRows + i;
          if (row >= num_rows_) {
            __builtin_memset(rows[i], 0, 64);
            continue;
          }
          const int64_t token = piece_.token_begin + row / group_, head = piece_.kv_head * group_ + row % group_;
          __builtin_memcpy(rows[i], query + token * call_.tensors.query_stride + head * size_ + d, 64);
        }
        uint32_t* to = reinterpret_cast<uint32_t*>(buffers_.query + (tile * (size_ / 32) + d / 32) * 1024);
        transpose_tile(to, rows[0], 16);
      }
  }

  void attend_block(int64_t first_key, int64_t num_key_tiles) {
    const bfloat16* keys[kBlockKeyTiles];
    find_keys(keys, call_, piece_, first_key, num_key_tiles);
    score(keys, num_key_tiles);
    interleave_values(keys, first_key, num_key_tiles);
    for (int64_t tile = 0; tile < num_row_tiles_; ++tile) soften(tile, first_key, num_key_tiles);
    add_values(num_key_tiles / 2);
  }

  float* score_tile(int64_t row_tile, int64_t key_tile) const {
    return buffers_.scores + (row_tile * kBlockKeyTiles + key_tile) * kTileElements;
  }

  // Pointers to the key tiles of a block. Tiles beyond the piece's last repeat it.
  static void find_keys(const bfloat16** keys, const AttentionCall& call, const AttentionPiece& piece, int64_t first_key,
                        int64_t num_key_tiles) {
    for (int64_t tile = 0; tile < num_key_tiles; ++tile) {
      const int64_t key = smaller(first_key + tile * kTileRows, (piece.key_end - 1) / kTileRows * kTileRows);
      keys[tile] = key_address<const bfloat16>(call, piece.row, piece.kv_head, key);
    }
  }

  static int64_t first_tile_key(const AttentionPiece& piece) { return piece.key_begin / kTileRows * kTileRows; }

  static int64_t num_block_tiles(const AttentionPiece& piece, int64_t first_key) {
    return smaller(kBlockKeys, round_up(piece.key_end - first_key, 2 * kTileRows)) / kTileRows;
  }

  void score(const bfloat16* const* keys, int64_t num_key_tiles) {
    const int64_t stride = call_.row_size() * 2;
    const int64_t query_nbytes = size_ / 32 * 1024;
    tile_fence();
    for (int64_t key = 0; key < num_key_tiles; key += 2)
      for (int64_t row = 0; row < num_row_tiles_; row += 2) {
        const char* query = buffers_.query + row * query_nbytes;
        const bool has_second = row + 1 < num_row_tiles_;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int64_t d = 0; d < size_ / 32; ++d) {
          _tile_loadd(4, keys[key] + d * 32, stride);
          _tile_loadd(5, keys[key + 1] + d * 32, stride);
          _tile_loadd(6, query + d * 1024, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 5, 6);
          if (!has_second) continue;
          _tile_loadd(7, query + query_nbytes + d * 1024, 64);
          _tile_dpbf16ps(2, 4, 7);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, score_tile(row, key), 64);
        _tile_stored(1, score_tile(row, key + 1), 64);
        if (!has_second) continue;
        _tile_stored(2, score_tile(row + 1, key), 64);
        _tile_stored(3, score_tile(row + 1, key + 1), 64);
      }
    tile_fence();
  }

  // Pairs of value rows, element by element, so that a pair of keys is one multiplication. What lies outside the piece's
  // keys may be anything, even NaN, and becomes zero.
  void interleave_values(const bfloat16* const* keys, int64_t first_key, int64_t num_key_tiles) {
    const int64_t stride = call_.row_size();
    const __m512i zero = _mm512_setzero_si512();
    for (int64_t tile = 0; tile < num_key_tiles; ++tile) {
      const bfloat16* values = keys[tile] + call_.layer.value_offset;
      for (int64_t i = 0; i < kTileRows; i += 2) {
        const int64_t key = first_key + tile * kTileRows + i;
        const bool has_upper = key >= piece_.key_begin && key < piece_.key_end;
        const bool has_lower = key + 1 >= piece_.key_begin && key + 1 < piece_.key_end;
        const bfloat16* upper = values + i * stride;
        char* to = buffers_.values + tile / 2 * (size_ / 16) * 1024 + ((tile % 2) * 8 + i / 2) * 64;
        for (int64_t d = 0; d < size_; d += 32) {
          const __m512i a = has_upper ? _mm512_loadu_si512(upper + d) : zero;
          const __m512i b = has_lower ? _mm512_loadu_si512(upper + stride + d) : zero;
          _mm512_storeu_si512(to + d / 16 * 1024, _mm512_unpacklo_epi16(a, b));
          _mm512_storeu_si512(to + (d / 16 + 1) * 1024, _mm512_unpackhi_epi16(a, b));
        }
      }
    }
  }

  // Undoes the order of unpacklo/unpackhi: two tiles' rows of 16 hold dims 0-3, 8-11, .. and 4-7, 12-15, ..
  static void unpack_32(float* to, const float* from) {
    const __m512 low = _mm512_loadu_ps(from), high = _mm512_loadu_ps(from + kTileElements);
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    _mm512_storeu_ps(to, _mm512_permutex2var_ps(low, first, high));
    _mm512_storeu_ps(to + 16, _mm512_permutex2var_ps(low, second, high));
  }

  // Whether every row of the tile sees every key of a key tile.
  bool sees_all(int64_t row_tile, int64_t key) const {
    const int64_t oldest = positions_[row_tile * kTileRows], newest = positions_[row_tile * kTileRows + kTileRows - 1];
    return key >= piece_.key_begin && key + kTileRows <= piece_.key_end && key + kTileRows - 1 <= oldest &&
           key >= call_.first_key(newest);
  }

  f32x16 hidden_as_infinite(f32x16 scores, i32x16 positions, int64_t key) const {
    i32x16 is_hidden = positions < static_cast<int32_t>(key);
    if (call_.layer.window > 0) is_hidden |= positions >= static_cast<int32_t>(key + call_.layer.window);
    if (key < piece_.key_begin || key >= piece_.key_end) is_hidden = ~i32x16{};
    return is_hidden ? splat(kNegativeInfinity) : scores;
  }

  // One row tile's scores become weights; its sums are scaled to the new maxima.
  void soften(int64_t row_tile, int64_t first_key, int64_t num_key_tiles) {
    float* scores = score_tile(row_tile, 0);
    const f32x16 before = load(maxima_ + row_tile * kTileRows);
    const f32x16 highest = finish_scores(scores, row_tile, first_key, num_key_tiles, before);
    const f32x16 base = highest > splat(kNegativeInfinity) ? highest : f32x16{};  // rows that see nothing here yet
    const f32x16 total = weigh(scores, row_tile, num_key_tiles, base);
    const f32x16 factors = exponential(before - base);
    store(weights_ + row_tile * kTileRows, load(weights_ + row_tile * kTileRows) * factors + total);
    store(maxima_ + row_tile * kTileRows, highest);
    scale_sums(row_tile, factors);
  }

  f32x16 finish_scores(float* scores, int64_t row_tile, int64_t first_key, int64_t num_key_tiles, f32x16 highest) const {
    i32x16 positions;
    __builtin_memcpy(&positions, positions_ + row_tile * kTileRows, sizeof positions);
    for (int64_t tile = 0; tile < num_key_tiles; ++tile) {
      const int64_t key = first_key + tile * kTileRows;
      const bool is_plain = sees_all(row_tile, key);
      for (int64_t i = 0; i < kTileRows; ++i) {
        float* at = scores + (tile * kTileRows + i) * kTileRows;
        f32x16 finished = finished_scores(load(at), call_.layer);
        if (!is_plain) finished = hidden_as_infinite(finished, positions, key + i);
        store(at, finished);
        highest = maximum(finished, highest);
      }
    }
    return highest;
  }

  f32x16 weigh(const float* scores, int64_t row_tile, int64_t num_key_tiles, f32x16 base) {
    alignas(64) uint32_t pairs[kTileElements];
    f32x16 total = {};
    for (int64_t tile = 0; tile < num_key_tiles; tile += 2) {
      for (int64_t i = 0; i < kTileRows; ++i) {
        const float* at = scores + (tile * kTileRows + 2 * i) * kTileRows;
        const f32x16 even = exponential(load(at) - base), odd = exponential(load(at + kTileRows) - base);
        total = total + (even + odd);
        const u32x16 low = __builtin_convertvector(to_bfloat16(even), u32x16);
        const u32x16 high = __builtin_convertvector(to_bfloat16(odd), u32x16);
        const u32x16 pair = low | (high << 16);
        __builtin_memcpy(pairs + i * 16, &pair, sizeof pair);
      }
      char* to = buffers_.weights + (row_tile * (kBlockKeyTiles / 2) + tile / 2) * 1024;
      transpose_tile(reinterpret_cast<uint32_t*>(to), pairs, 16);
    }
    return total;
  }

  void scale_sums(int64_t row_tile, f32x16 factors) {
    if (is_first_) return;
    bool changes = false;
    for (int64_t row = 0; row < kTileRows; ++row) changes |= factors[row] != 1.0f;
    if (!changes) return;
    float* sums = buffers_.sums + row_tile * (size_ / 16) * kTileElements;
    for (int64_t tile = 0; tile < size_ / 16; ++tile)
      for (int64_t row = 0; row < kTileRows; ++row) {
        float* at = sums + tile * kTileElements + row * 16;
        store(at, load(at) * factors[row]);
      }
  }

  void add_values(int64_t num_pairs) {
    const int64_t num_dim_tiles = size_ / 16;
    tile_fence();
    for (int64_t row = 0; row < num_row_tiles_; row += 2) {
      const char* weights = buffers_.weights + row * (kBlockKeyTiles / 2) * 1024;
      const bool has_second = row + 1 < num_row_tiles_;
      for (int64_t d = 0; d < num_dim_tiles; d += 2) {
        float* sums = buffers_.sums + (row * num_dim_tiles + d) * kTileElements;
        float* second = sums + num_dim_tiles * kTileElements;
        begin_sums(sums, second, has_second);
        for (int64_t pair = 0; pair < num_pairs; ++pair) {
          const char* values = buffers_.values + (pair * num_dim_tiles + d) * 1024;
          _tile_loadd(4, weights + pair * 1024, 64);
          _tile_loadd(6, values, 64);
          _tile_loadd(7, values + 1024, 64);
          _tile_dpbf16ps(0, 4, 6);
          _tile_dpbf16ps(1, 4, 7);
          if (!has_second) continue;
          _tile_loadd(5, weights + (kBlockKeyTiles / 2 + pair) * 1024, 64);
          _tile_dpbf16ps(2, 5, 6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums, 64);
        _tile_stored(1, sums + kTileElements, 64);
        if (!has_second) continue;
        _tile_stored(2, second, 64);
        _tile_stored(3, second + kTileElements, 64);
      }
    }
    tile_fence();
    is_first_ = false;
  }

  void begin_sums(const float* sums, const float* second, bool has_second) const {
    if (is_first_) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
      return;
    }
    _tile_loadd(0, sums, 64);
    _tile_loadd(1, sums + kTileElements, 64);
    if (!has_second) return;
    _tile_loadd(2, second, 64);
    _tile_loadd(3, second + kTileElements, 64);
  }

  const AttentionCall& call_;
  const AttentionPiece& piece_;
  int64_t size_;
  int64_t group_;
  int64_t num_rows_;
  int64_t num_row_tiles_;
  TileBuffers buffers_;
  bool is_first_ = true;
  alignas(64) float maxima_[kMaxQueryRows + kRowBlock];
  alignas(64) float weights_[kMaxQueryRows + kRowBlock];
  alignas(64) int32_t positions_[kMaxQueryRows + kRowBlock];
};

inline bool fits_tiles(const AttentionLayer& layer) {
  return layer.dtype == Dtype::kBfloat16 && layer.head_dim % 32 == 0 && layer.page_size % kTileRows == 0 &&
         layer.num_heads / layer.num_kv_heads <= kMaxQueryRows;
}

inline void attention_tiles(const AttentionCall& call) {
  attend_step<bfloat16>(call, [&](const AttentionPiece& piece, const AttentionSums& partials) {
    const TileScope tiles;
    TilePiece attended(call, piece);
    attended.attend();
    const AttentionSums sums = sums_of(call, piece, partials, attended.staging());
    attended.unpack(sums);
    if (piece.partial < 0) store_attended<bfloat16>(call, piece, sums);
  });
}

}  // namespace DIPTYCH_ISA
}  // namespace diptych
