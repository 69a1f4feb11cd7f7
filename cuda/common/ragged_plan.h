// Ragged products as tiles: which part of the output a block computes, found from the sizes of the groups on the device.
//
// Host and device code, so that the arithmetic is tested where a GPU is not needed.
#ifndef JAXFP8_CUDA_COMMON_RAGGED_PLAN_H_
#define JAXFP8_CUDA_COMMON_RAGGED_PLAN_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

constexpr int kRaggedTile = 128;   // rows of an output tile
constexpr int kRaggedSlice = 64;   // elements of the contraction that mma.sync's tiles take at a time, a row of 64 bytes
constexpr int kRaggedChunk = 16;   // bytes that move at once
constexpr int kRaggedBlock = 128;  // elements of the contraction with one scale, where operands have scales of blocks

// How many blocks a dimension has.
JAXFP8_HD int32_t RaggedBlocks(int32_t size) { return (size + kRaggedBlock - 1) / kRaggedBlock; }

// Where chunk `chunk` of row `row` of a slice is in shared memory. Eight rows of one chunk, which the tensor cores' loads
// read together, and two whole rows, which the copies write together, are in different banks.
JAXFP8_HD int RaggedOffset(int row, int chunk) {
  return row * kRaggedSlice + ((chunk ^ ((row >> 1) & 3)) * kRaggedChunk);
}

// No dimension may be above this: sizes of groups have 32 bits as well, and registers are scarce. Products of dimensions
// have 64.
constexpr int64_t kRaggedMaxSize = (int64_t{1} << 31) - 1024;

struct RaggedPlan {
  bool contraction;  // what the groups cut: the rows of a, or the contraction
  int32_t members;   // independent products
  int32_t groups;
  int32_t rows;     // a is [members, rows, length]
  int32_t columns;  // b is [members, groups, columns, length]; [members, columns, length] where the groups cut length
  int32_t length;
  int32_t column_tile = kRaggedTile;

  JAXFP8_HD static int64_t RowTiles(int32_t rows) { return (rows + kRaggedTile - 1) / kRaggedTile; }
  JAXFP8_HD int64_t ColumnTiles() const { return (columns + column_tile - 1) / column_tile; }

  // Rows beyond the last group are one more, of zeros.
  JAXFP8_HD int32_t Parts() const { return contraction ? groups : groups + 1; }

  // At least as many as there are tiles, whatever the sizes.
  int64_t MaxTiles() const {
    const int64_t row_tiles = contraction ? groups * RowTiles(rows) : RowTiles(rows) + Parts();
    return members * row_tiles * ColumnTiles();
  }
};

// A tile of the output, and what it is the product of.
struct RaggedRange {
  int32_t member;
  int32_t group;
  int32_t row;      // its first, in a
  int32_t row_end;  // of the group, not of the tile
  int32_t column;   // its first
  int32_t begin;    // of the contraction
  int32_t end;
};

// Finds tiles by index. A block asks for indices that grow, so that it passes each group once.
class RaggedWalk {
 public:
  JAXFP8_HD RaggedWalk(const RaggedPlan& plan, const int32_t* sizes) : plan_(plan), sizes_(sizes) { Enter(); }

  // False where there is no such tile, nor a later one.
  JAXFP8_HD bool Find(int64_t index, RaggedRange* range) {
    while (index >= first_ + tiles_) {
      first_ += tiles_;
      start_ += size_;
      if (++part_ == plan_.Parts()) {
        part_ = 0;
        start_ = 0;
        if (++member_ >= plan_.members) return false;
      }
      Enter();
    }
    const int64_t tile = index - first_;
    const int64_t row_tiles = RaggedPlan::RowTiles(plan_.contraction ? plan_.rows : size_);
    // Rows first: blocks at work at the same time share columns of b.
    const int32_t row = static_cast<int32_t>(tile % row_tiles) * kRaggedTile;
    range->member = member_;
    range->group = part_;
    range->row = plan_.contraction ? row : start_ + row;
    range->row_end = plan_.contraction ? plan_.rows : start_ + size_;
    range->column = static_cast<int32_t>(tile / row_tiles) * plan_.column_tile;
    range->begin = plan_.contraction ? start_ : 0;
    range->end = plan_.contraction ? start_ + size_ : part_ < plan_.groups ? plan_.length : 0;
    return true;
  }

 private:
  JAXFP8_HD void Enter() {
    if (plan_.members == 0 || plan_.Parts() == 0) {
      size_ = tiles_ = 0;
      return;
    }
    const int32_t left = (plan_.contraction ? plan_.length : plan_.rows) - start_;
    size_ = left;
    if (part_ < plan_.groups) {
      const int32_t wanted = sizes_[int64_t{member_} * plan_.groups + part_];
      size_ = wanted < 0 ? 0 : wanted < left ? wanted : left;  // nothing is read or written outside, whatever they say
    }
    tiles_ = RaggedPlan::RowTiles(plan_.contraction ? plan_.rows : size_) * plan_.ColumnTiles();
  }

  const RaggedPlan& plan_;
  const int32_t* sizes_;
  int32_t member_ = 0;
  int32_t part_ = 0;
  int32_t start_ = 0;  // of this group: a row, or a place in the contraction
  int32_t size_;
  int64_t first_ = 0;  // tile of this group
  int64_t tiles_;
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_RAGGED_PLAN_H_
