// Tile registers: configuration, and fences that the compiler needs. Included by the AMX sources only.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace diptych {
namespace DIPTYCH_ISA {

// The layout that ldtilecfg reads (palette 1).
struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_nbytes[16] = {};
  uint8_t num_rows[16] = {};
};

constexpr int kNumTiles = 8;

// Tile instructions are opaque to the compiler, which would otherwise drop or move plain stores across them.
inline __attribute__((always_inline)) void tile_fence() { asm volatile("" ::: "memory"); }

// All tiles 16 rows of 64 bytes, for as long as it lives; released then, so that the kernel need not save them.
class TileScope {
 public:
  TileScope() {
    TileConfig config;
    for (int tile = 0; tile < kNumTiles; ++tile) {
      config.row_nbytes[tile] = 64;
      config.num_rows[tile] = 16;
    }
    tile_fence();
    asm volatile("ldtilecfg %0" : : "m"(config) : "memory");
  }
  ~TileScope() { _tile_release(); }
  TileScope(const TileScope&) = delete;
  TileScope& operator=(const TileScope&) = delete;
};

}  // namespace DIPTYCH_ISA
}  // namespace diptych
