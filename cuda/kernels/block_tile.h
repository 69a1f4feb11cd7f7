// A tile of quantize_blocks_transpose: its elements in registers, its lines and the amaxes of their blocks.
#ifndef JAXFP8_CUDA_KERNELS_BLOCK_TILE_H_
#define JAXFP8_CUDA_KERNELS_BLOCK_TILE_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/convert.h"
#include "cuda/common/packed.h"
#include "cuda/common/transpose_tile.h"
#include "cuda/kernels/quantize_blocks_transpose.h"

namespace jaxfp8::cuda {

// A half of the threads has the rows of a tile, the other its columns.
static_assert(kBlockSize == 2 * kTileSide);
// From one line to the next in shared memory: lanes of neighbouring lines write different banks, 16 bytes each.
constexpr int kStride = kTileSide + 4;
// A block is 2^shift elements along a line, or all of the line.
JAXFP8_HD constexpr int Shift(BlockShape block) { return block == BlockShape::k1x32 ? 5 : 7; }

// A thread's part of a tile.
template <class In>
struct Elements {
  static constexpr int kVector = 16 / sizeof(In);
  using Share = TileShare<kVector>;
  static constexpr int kShares = Share::kRowGroups / Share::kRowGroupsAtOnce;

  __device__ __forceinline__ static Share ShareAt(int i) {
    return {static_cast<int>(threadIdx.x % Share::kColumnGroups),
            i * Share::kRowGroupsAtOnce + static_cast<int>(threadIdx.x / Share::kColumnGroups)};
  }
  // Of its first element in x and data.
  __device__ __forceinline__ static int64_t Offset(const TransposePlan& plan, const Tile& tile, const Share& share) {
    return (tile.group * plan.m + tile.row + share.FirstRow()) * plan.n + tile.column + share.FirstColumn();
  }

  template <Access kAccess>
  __device__ __forceinline__ void Load(const TransposePlan& plan, const Tile& tile, const In* x) {
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const Share share = ShareAt(i);
      const In* first = x + Offset(plan, tile, share);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        vectors[i][r] = LoadVector<kAccess>(first + r * plan.n, share.Valid(tile, r));
      }
    }
  }
  template <bool kWideRows>
  __device__ __forceinline__ void Load(const TransposePlan& plan, const Tile& tile, const In* x) {
    if constexpr (!kWideRows) {
      Load<Access::kElements>(plan, tile, x);
    } else if (tile.IsWhole()) {
      Load<Access::kWholeTile>(plan, tile, x);
    } else {
      Load<Access::kEdgeTile>(plan, tile, x);
    }
  }

  __device__ __forceinline__ void InfinitiesToNan() {
#pragma unroll
    for (auto& rows : vectors) {
#pragma unroll
      for (Bytes<16>& vector : rows) {
#pragma unroll
        for (uint32_t& word : vector.words) word = cuda::InfinitiesToNan<In>(word);
      }
    }
  }

  Bytes<16> vectors[kShares][kRows];
};

// The tiles of a block: blockIdx.x, and every gridDim.x-th after it. It divides once, and not for each tile.
class TileWalk {
 public:
  // In tiles.
  struct At {
    int64_t group;
    int row;
    int column;
  };

  __device__ __forceinline__ explicit TileWalk(const TransposePlan& plan)
      : plan_(plan),
        rows_(static_cast<int>(plan.group_tiles / plan.tile_columns)),
        columns_(static_cast<int>(plan.tile_columns)),
        at_(Position(blockIdx.x)),
        step_(Position(gridDim.x)) {}

  __device__ __forceinline__ Tile Here() const {
    const int64_t row = int64_t{at_.row} * kTileSide, column = int64_t{at_.column} * kTileSide;
    return {at_.group, row, column, Inside(plan_.m - row), Inside(plan_.n - column)};
  }
  __device__ __forceinline__ const At& at() const { return at_; }
  __device__ __forceinline__ void Next() {
    at_.column += step_.column;
    const bool is_next_row = at_.column >= columns_;
    at_.column -= is_next_row ? columns_ : 0;
    at_.row += step_.row + is_next_row;
    const bool is_next_group = at_.row >= rows_;
    at_.row -= is_next_group ? rows_ : 0;
    at_.group += step_.group + is_next_group;
  }

 private:
  __device__ __forceinline__ At Position(int64_t index) const {
    const int64_t group = index / plan_.group_tiles, in_group = index % plan_.group_tiles;
    return {group, static_cast<int>(in_group / plan_.tile_columns), static_cast<int>(in_group % plan_.tile_columns)};
  }
  __device__ __forceinline__ static int Inside(int64_t left) {
    return left < kTileSide ? static_cast<int>(left) : kTileSide;
  }

  const TransposePlan& plan_;
  const int rows_, columns_;  // tiles
  At at_;
  const At step_;
};

// The lines of a layout along which its blocks lie, rows of x for data and columns of x for data_t, and their scales.
struct Lines {
  int64_t count;        // m for data, n for data_t
  const float* amaxes;  // of whole lines, [groups, count]; null where blocks are smaller
  void* scale_inv;      // null where the layout is not written
  // From one group, tile of 128 lines, and tile of 128 elements along them to the next, in scales (scale_mode.h).
  int64_t group_stride;
  int64_t tile_stride;
  int64_t along_stride;
  int64_t tiles_along;
};

// The line of a tile that a thread has.
struct Line {
  bool is_column;
  int index;      // in the tile
  int inside;     // lines of the tile that lie inside the matrix
  int64_t group;
  int tile;   // of 128 lines
  int along;  // of 128 elements along them

  __device__ __forceinline__ Line(const TileWalk::At& at, const Tile& of)
      : is_column(threadIdx.x >= kTileSide),
        index(threadIdx.x % kTileSide),
        inside(is_column ? of.columns : of.rows),
        group(at.group),
        tile(is_column ? at.column : at.row),
        along(is_column ? at.row : at.column) {}
};

// Element `i` of a word of magnitudes, and the largest, as bits of an f32; NaN may be above infinity.
template <class In>
__device__ __forceinline__ uint32_t MagnitudeBits(uint32_t word, int i) {
  return FloatToBits(Widen<In>(&word, i)) & kAbsMask;
}
template <class In>
__device__ __forceinline__ uint32_t LargestBits(uint32_t word) {
  return max(MagnitudeBits<In>(word, 0), MagnitudeBits<In>(word, 4 / sizeof(In) - 1));
}

// Partial amaxes of a tile in shared memory: packed magnitudes, with any sign.
template <class In>
struct TileAmaxes {
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr int kPacked = 4 / sizeof(In);  // elements of a word

  alignas(16) uint32_t rows[kTileSide / kVector][kStride];               // of one vector of a row
  alignas(16) uint32_t columns[kTileSide / kRows][kTileSide / kPacked];  // of 8 rows

  __device__ __forceinline__ void Put(const Elements<In>& x, bool of_columns) {
#pragma unroll
    for (int s = 0; s < Elements<In>::kShares; ++s) {
      const auto share = Elements<In>::ShareAt(s);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t(&words)[4] = x.vectors[s][r].words;
        rows[share.column_group][share.FirstRow() + r] =
            LargerMagnitudes<In>(LargerMagnitudes<In>(words[0], words[1]), LargerMagnitudes<In>(words[2], words[3]));
      }
      if (!of_columns) continue;
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        uint32_t largest = x.vectors[s][0].words[w];
#pragma unroll
        for (int r = 1; r < kRows; ++r) largest = LargerMagnitudes<In>(largest, x.vectors[s][r].words[w]);
        columns[share.row_group][4 * share.column_group + w] = largest;
      }
    }
  }

  // Of the `block`th 2^kShift elements of a row or column, as bits of an f32.
  template <int kShift>
  __device__ __forceinline__ uint32_t OfRow(int block, int row) const {
    const uint32_t largest = Largest<(1 << kShift) / kVector>(&rows[block * ((1 << kShift) / kVector)][row], kStride);
    return LargestBits<In>(largest);
  }
  template <int kShift>
  __device__ __forceinline__ uint32_t OfColumn(int block, int column) const {
    constexpr int kGroups = (1 << kShift) / kRows;
    const uint32_t largest = Largest<kGroups>(&columns[block * kGroups][column / kPacked], kTileSide / kPacked);
    return MagnitudeBits<In>(column % kPacked == 0 ? largest : largest >> 16, 0);
  }

 private:
  template <int kCount>
  __device__ __forceinline__ static uint32_t Largest(const uint32_t* words, int stride) {
    uint32_t largest = words[0];
#pragma unroll
    for (int i = 1; i < kCount; ++i) largest = LargerMagnitudes<In>(largest, words[i * stride]);
    return largest;
  }
};

// The amaxes of blocks that are parts of lines.
template <class In, BlockShape kBlock>
struct Amaxes : TileAmaxes<In> {
  __device__ __forceinline__ uint32_t Of(const Lines&, const Line& line, int block) const {
    constexpr int kShift = Shift(kBlock);
    return line.is_column ? this->template OfColumn<kShift>(block, line.index)
                          : this->template OfRow<kShift>(block, line.index);
  }
};

// Of whole lines: another kernel has found them.
template <class In>
struct Amaxes<In, BlockShape::kRow> {
  __device__ __forceinline__ void Put(const Elements<In>&, bool) {}
  __device__ __forceinline__ uint32_t Of(const Lines& lines, const Line& line, int) const {
    if (line.index >= line.inside) return 0;
    return FloatToBits(lines.amaxes[line.group * lines.count + int64_t{line.tile} * kTileSide + line.index]);
  }
};

// Of the whole tile.
template <class In>
struct Amaxes<In, BlockShape::k128x128> {
  __device__ __forceinline__ void Put(const Elements<In>& x, bool) {
    uint32_t largest = 0;
#pragma unroll
    for (const auto& rows : x.vectors) {
#pragma unroll
      for (const Bytes<16>& vector : rows) {
#pragma unroll
        for (const uint32_t word : vector.words) largest = LargerMagnitudes<In>(largest, word);
      }
    }
    const uint32_t over_warp = __reduce_max_sync(0xffffffffu, LargestBits<In>(largest));
    if (threadIdx.x % kWarpSize == 0) warps[threadIdx.x / kWarpSize] = over_warp;
  }
  __device__ __forceinline__ uint32_t Of(const Lines&, const Line&, int) const {
    uint32_t largest = 0;
#pragma unroll
    for (const uint32_t of_warp : warps) largest = max(largest, of_warp);
    return largest;
  }

  alignas(16) uint32_t warps[kWarpsPerBlock];
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_BLOCK_TILE_H_
