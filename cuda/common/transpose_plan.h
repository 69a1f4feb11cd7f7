// How quantize_transpose tiles `[groups, m, n]`: index arithmetic only, for host and device.
#ifndef JAXFP8_CUDA_COMMON_TRANSPOSE_PLAN_H_
#define JAXFP8_CUDA_COMMON_TRANSPOSE_PLAN_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

// 128 codes are one 128-byte line of data along a row and one of data_t along a column.
constexpr int kTileSide = 128;

// Where a tile starts, and how much of it lies inside the matrix.
struct Tile {
  int64_t group;
  int64_t row;
  int64_t column;
  int32_t rows;     // 1 to kTileSide
  int32_t columns;  // 1 to kTileSide

  JAXFP8_HD constexpr bool IsWhole() const { return rows == kTileSide && columns == kTileSide; }
};

struct TransposePlan {
  int64_t m;
  int64_t n;
  int64_t tile_columns;  // tiles side by side
  int64_t group_tiles;   // tiles of one group
  int64_t tiles;

  JAXFP8_HD constexpr Tile At(int64_t index) const {
    const int64_t group = index / group_tiles;
    const int64_t in_group = index - group * group_tiles;
    const int64_t row = in_group / tile_columns * kTileSide;
    const int64_t column = in_group % tile_columns * kTileSide;
    return {group, row, column, Inside(m - row), Inside(n - column)};
  }

 private:
  JAXFP8_HD static constexpr int32_t Inside(int64_t left) {
    return left < kTileSide ? static_cast<int32_t>(left) : kTileSide;
  }
};

// All sizes are at least 1.
constexpr TransposePlan MakeTransposePlan(int64_t groups, int64_t m, int64_t n) {
  const int64_t tile_rows = (m - 1) / kTileSide + 1;
  const int64_t tile_columns = (n - 1) / kTileSide + 1;
  return {m, n, tile_columns, tile_rows * tile_columns, groups * tile_rows * tile_columns};
}

// A tile's codes wait in shared memory with the rows of data_t as rows: kTileSide columns of kTileSide bytes each.
//
// Writers hold 8 codes of a column, readers want 16. A column is 16 slots of 8 bytes, and slot s of column c lies at
// place s ^ key(c), where key counts the writers' column groups. So the 16 lanes of a half-warp, which write one slot
// in 16 different column groups, and the 8 lanes of a quarter-warp, which read one column, both meet every bank once.
// Slots 2i and 2i + 1 stay in one 16-byte pair, in swapped order where the key is odd.
JAXFP8_HD constexpr int SwizzleKey(int column_group) { return column_group & 15; }
JAXFP8_HD constexpr int SlotOffset(int column, int slot, int key) { return column * kTileSide + (slot ^ key) * 8; }
JAXFP8_HD constexpr int PairOffset(int column, int pair, int key) {
  return column * kTileSide + (pair ^ (key >> 1)) * 16;
}
JAXFP8_HD constexpr bool PairIsSwapped(int key) { return (key & 1) != 0; }

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_TRANSPOSE_PLAN_H_
