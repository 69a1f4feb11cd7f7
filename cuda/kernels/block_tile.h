// A tile of quantize_blocks_transpose: its elements in registers, its lines and the amaxes of their blocks.
#ifndef JAXFP8_CUDA_KERNELS_BLOCK_TILE_H_
#define JAXFP8_CUDA_KERNELS_BLOCK_TILE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/convert.h"
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
  // Of its first element in x and data. In small matrices a product of two sizes costs one instruction.
  template <bool kWideRows>
  __device__ __forceinline__ static int64_t Offset(const TransposePlan& plan, const Tile& tile, const Share& share) {
    using Size = std::conditional_t<kWideRows, uint32_t, int64_t>;
    const uint64_t row = static_cast<uint64_t>(static_cast<Size>(tile.group)) * static_cast<Size>(plan.m) +
                         static_cast<Size>(tile.row) + share.FirstRow();
    return row * static_cast<Size>(plan.n) + static_cast<Size>(tile.column) + share.FirstColumn();
  }

  template <bool kWideRows>
  __device__ __forceinline__ void Load(const TransposePlan& plan, const Tile& tile, const In* x) {
    if constexpr (!kWideRows) {
      LoadAs<Access::kElements>(plan, tile, x);
    } else if (tile.IsWhole()) {
      LoadAs<Access::kWholeTile>(plan, tile, x);
    } else {
      LoadAs<Access::kEdgeTile>(plan, tile, x);
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

 private:
  template <Access kAccess>
  __device__ __forceinline__ void LoadAs(const TransposePlan& plan, const Tile& tile, const In* x) {
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const Share share = ShareAt(i);
      const In* first = x + Offset<kAccess != Access::kElements>(plan, tile, share);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        vectors[i][r] = LoadVector<kAccess>(first + r * plan.n, share.Valid(tile, r));
      }
    }
  }
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

  __device__ __forceinline__ explicit Line(const Tile& at)
      : is_column(threadIdx.x >= kTileSide),
        index(threadIdx.x % kTileSide),
        inside(is_column ? at.columns : at.rows),
        group(at.group),
        tile(static_cast<int>((is_column ? at.column : at.row) / kTileSide)),
        along(static_cast<int>((is_column ? at.row : at.column) / kTileSide)) {}
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
