// How a tile kernel tiles `[groups, m, n]`: index arithmetic only, for host and device.
#ifndef JAXFP8_CUDA_COMMON_TRANSPOSE_PLAN_H_
#define JAXFP8_CUDA_COMMON_TRANSPOSE_PLAN_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

// 128 codes are one 128-byte line of data along a row and one of data_t along a column.
constexpr int kTileSide = 128;

// Where a tile starts, and how much of it lies inside the matrix. A tile may hold several parts of a result, the same
// columns of each: `kWidth` columns, which together are kTileSide.
struct Tile {
  int64_t group;
  int64_t row;
  int64_t column;
  int32_t rows;     // 1 to kTileSide
  int32_t columns;  // 1 to kWidth

  template <int kWidth = kTileSide>
  JAXFP8_HD constexpr bool IsWhole() const {
    return rows == kTileSide && columns == kWidth;
  }
};

// Of column `column` of a tile with parts of kWidth columns: its part, and its place there. Nothing, where there is one.
template <int kWidth>
JAXFP8_HD constexpr int PartOf(int column) {
  return kWidth == kTileSide ? 0 : column / kWidth;
}
template <int kWidth>
JAXFP8_HD constexpr int ColumnOfPart(int column) {
  return kWidth == kTileSide ? column : column % kWidth;
}

// Division of numbers below 2^31 by one that is known before the launch: a product and a shift. A thread needs two
// divisions a tile, and those of the hardware would be a tenth of its instructions.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr explicit Divisor(uint32_t divisor) : divisor_(divisor) {
    while (uint64_t{1} << (shift_ - 31) < divisor) ++shift_;
    // Rounded up by less than 1, which makes quotients too large by less than 1 / divisor.
    multiplier_ = static_cast<uint32_t>(((uint64_t{1} << shift_) + divisor - 1) / divisor);
  }
  JAXFP8_HD constexpr uint32_t Divide(uint32_t dividend) const {
    return static_cast<uint32_t>((uint64_t{dividend} * multiplier_) >> shift_);
  }
  JAXFP8_HD constexpr uint32_t value() const { return divisor_; }

 private:
  uint32_t divisor_ = 1;
  uint32_t multiplier_ = 1u << 31;
  uint32_t shift_ = 31;
};

struct TransposePlan {
  int64_t m;
  int64_t n;
  int64_t tile_rows;     // tiles one below the other
  int64_t tile_columns;  // tiles side by side
  int64_t tiles;         // of all groups
  int32_t last_rows;     // of the lowest tiles
  int32_t last_columns;  // of the rightmost tiles
  bool is_small;         // 32 bits hold groups, m, n and tiles, but not elements
  Divisor by_columns;    // if it is small
  Divisor by_group;      // likewise; the tiles of a group

  template <int kWidth = kTileSide>
  JAXFP8_HD constexpr Tile At(int64_t index) const {
    if (is_small) return AtSmall<kWidth>(index);
    const int64_t row_of_tiles = index / tile_columns;
    const int64_t group = row_of_tiles / tile_rows;
    return Make<kWidth>(group, row_of_tiles - group * tile_rows, index - row_of_tiles * tile_columns);
  }

  template <int kWidth = kTileSide>
  JAXFP8_HD constexpr Tile AtSmall(int64_t index) const {
    const uint32_t group = by_group.Divide(static_cast<uint32_t>(index));
    const uint32_t in_group = static_cast<uint32_t>(index) - group * by_group.value();
    const uint32_t tile_row = by_columns.Divide(in_group);
    return Make<kWidth>(group, tile_row, in_group - tile_row * by_columns.value());
  }

 private:
  template <int kWidth, class Index>
  JAXFP8_HD constexpr Tile Make(Index group, Index tile_row, Index tile_column) const {
    return {static_cast<int64_t>(group), static_cast<int64_t>(tile_row * kTileSide),
            static_cast<int64_t>(tile_column * kWidth),
            tile_row == static_cast<Index>(tile_rows - 1) ? last_rows : kTileSide,
            tile_column == static_cast<Index>(tile_columns - 1) ? last_columns : kWidth};
  }
};

// All sizes are at least 1; `width` is the kWidth of At.
constexpr TransposePlan MakeTransposePlan(int64_t groups, int64_t m, int64_t n, int64_t width = kTileSide) {
  const int64_t tile_rows = (m - 1) / kTileSide + 1;
  const int64_t tile_columns = (n - 1) / width + 1;
  const int64_t tiles = groups * tile_rows * tile_columns;
  const bool is_small = (groups | m | n | tiles) >> 31 == 0;
  return {m,
          n,
          tile_rows,
          tile_columns,
          tiles,
          static_cast<int32_t>(m - (tile_rows - 1) * kTileSide),
          static_cast<int32_t>(n - (tile_columns - 1) * width),
          is_small,
          is_small ? Divisor(static_cast<uint32_t>(tile_columns)) : Divisor(),
          is_small ? Divisor(static_cast<uint32_t>(tile_rows * tile_columns)) : Divisor()};
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
