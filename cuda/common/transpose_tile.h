// A tile of 128 x 128 codes on its way to both layouts: what kernels that write data and data_t in one read share.
//
// A thread holds 8 rows of one 16-byte vector of columns. It stores the codes as they are, transposes them in registers
// by byte permutes, and passes 8 codes of each of its columns through shared memory to the threads that store data_t,
// 16 bytes a lane. transpose_plan.h has the index arithmetic.
#ifndef JAXFP8_CUDA_COMMON_TRANSPOSE_TILE_H_
#define JAXFP8_CUDA_COMMON_TRANSPOSE_TILE_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "cuda/common/memory.h"
#include "cuda/common/stream_plan.h"
#include "cuda/common/transpose_plan.h"

namespace jaxfp8::cuda {

constexpr int kRows = 8;  // rows a thread holds

// How a thread reaches the rows of x and data. Vectors need aligned pointers and rows of whole vectors.
enum class Access {
  kWholeTile,  // vectors, all of them inside the matrix: loads without predicates stay in one batch
  kEdgeTile,   // vectors, some of them outside
  kElements,   // element by element
};
template <Access kAccess>
using AccessTag = std::integral_constant<Access, kAccess>;

// The share of a tile that a thread has: `kRows` rows of one vector of columns.
template <int kVector>
struct TileShare {
  static constexpr int kColumnGroups = kTileSide / kVector;
  static constexpr int kRowGroups = kTileSide / kRows;
  static constexpr int kRowGroupsAtOnce = kBlockSize / kColumnGroups;
  static_assert(kColumnGroups % 16 == 0 && kRowGroups == 16, "the swizzle assumes half-warps along a row");

  int column_group;
  int row_group;

  __device__ __forceinline__ int FirstRow() const { return row_group * kRows; }
  __device__ __forceinline__ int FirstColumn() const { return column_group * kVector; }
  // Columns of row `r` inside the matrix, if positive.
  __device__ __forceinline__ int Valid(const Tile& tile, int r) const {
    return FirstRow() + r < tile.rows ? tile.columns - FirstColumn() : 0;
  }
};

// Four words of four codes, as a 4 x 4 matrix of bytes.
__device__ __forceinline__ void Transpose4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Up to kCount elements at `x`; those at or beyond `valid` are zero, which changes no amax.
template <int kCount, class In>
__device__ __forceinline__ Bytes<kCount * sizeof(In)> LoadElements(const In* x, int valid) {
  Bytes<kCount * sizeof(In)> out = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < valid) {
      constexpr int kPerWord = 4 / sizeof(In);
      const uint32_t bits = Load<static_cast<int>(sizeof(In))>(x + i).words[0];
      out.words[i / kPerWord] |= bits << (32 / kPerWord * (i % kPerWord));
    }
  }
  return out;
}

// One vector of x, `valid` of its elements inside the matrix.
template <Access kAccess, class In>
__device__ __forceinline__ Bytes<16> LoadVector(const In* x, int valid) {
  if constexpr (kAccess == Access::kElements) return LoadElements<16 / sizeof(In)>(x, valid);
  if (kAccess == Access::kEdgeTile && valid <= 0) return {};
  return Load<16>(x);
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* address, const Bytes<kBytes>& codes, int valid) {
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) address[i] = static_cast<uint8_t>(codes.words[i / 4] >> (8 * (i % 4)));
  }
}

// The codes of one vector of x.
template <Access kAccess, int kBytes>
__device__ __forceinline__ void StoreVector(uint8_t* address, const Bytes<kBytes>& codes, int valid) {
  if constexpr (kAccess == Access::kElements) {
    StoreCodes(address, codes, valid);
  } else if (kAccess == Access::kWholeTile || valid > 0) {
    Store(address, codes);
  }
}

// Transposes the codes of a thread's rows from `first` on into the tile in shared memory: all 8 rows, 4 or 1.
template <int kVector, int kCount>
__device__ __forceinline__ void PutTransposed(const TileShare<kVector>& share, const Bytes<kVector> (&codes)[kCount],
                                              uint8_t* tile_t, int first = 0) {
  static_assert(kCount == 8 || kCount == 4 || kCount == 1, "one store a column");
#pragma unroll
  for (int w = 0; w < kVector / 4; ++w) {
    uint32_t columns[2][4] = {};  // of rows 0 to 3 and 4 to 7
    if constexpr (kCount == 1) {
#pragma unroll
      for (int i = 0; i < 4; ++i) columns[0][i] = codes[0].words[w] >> (8 * i);
    } else {
#pragma unroll
      for (int r = 0; r < kCount; r += 4) {
        const uint32_t rows[4] = {codes[r].words[w], codes[r + 1].words[w], codes[r + 2].words[w],
                                  codes[r + 3].words[w]};
        Transpose4x4(rows, columns[r / 4]);
      }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = share.FirstColumn() + 4 * w + i;
      uint8_t* const slot = tile_t + SlotOffset(column, share.row_group, SwizzleKey(share.column_group)) + first;
      if constexpr (kCount == 8) {
        *reinterpret_cast<uint2*>(slot) = make_uint2(columns[0][i], columns[1][i]);
      } else if constexpr (kCount == 4) {
        *reinterpret_cast<uint32_t*>(slot) = columns[0][i];
      } else {
        *slot = static_cast<uint8_t>(columns[0][i]);
      }
    }
  }
}

// The 16 codes of pair `pair` in a column of the tile in shared memory.
__device__ __forceinline__ Bytes<16> PairOfCodes(const uint8_t* tile_t, int column, int pair, int key) {
  const uint4 read = *reinterpret_cast<const uint4*>(tile_t + PairOffset(column, pair, key));
  const bool swapped = PairIsSwapped(key);
  return {{swapped ? read.z : read.x, swapped ? read.w : read.y,  //
           swapped ? read.x : read.z, swapped ? read.y : read.w}};
}

// Stores a tile from shared memory to data_t, by all threads of the block: 16 rows of one column at a time. `wide`:
// 16-byte pieces of data_t are aligned, and its rows are whole pieces. Of kParts the tile has the columns of the first,
// then those of the next; in data_t they are n rows apart.
template <int kVector, int kParts = 1>
__device__ __forceinline__ void StoreTransposed(const TransposePlan& plan, const Tile& tile, const uint8_t* tile_t,
                                                uint8_t* data_t, bool wide) {
  constexpr int kPairs = kTileSide / 16;
  constexpr int kWidth = kTileSide / kParts;
  constexpr int kColumnsAtOnce = kBlockSize / kPairs;
  const int first_column = threadIdx.x / kPairs;
  const int pair = threadIdx.x % kPairs;
  const int key = SwizzleKey(first_column / kVector);
  if (wide && plan.is_small && tile.IsWhole<kWidth>()) {
    const uint32_t m = static_cast<uint32_t>(plan.m), n = static_cast<uint32_t>(plan.n);
    const uint64_t row = static_cast<uint64_t>(tile.group * kParts) * n + static_cast<uint32_t>(tile.column) + first_column;
    uint8_t* const first = data_t + row * m + static_cast<uint32_t>(tile.row) + pair * 16;
#pragma unroll
    for (int i = 0; i < kTileSide; i += kColumnsAtOnce) {
      // The key of column first_column + i: no bit of i is set in first_column.
      const Bytes<16> codes = PairOfCodes(tile_t, first_column + i, pair, key ^ SwizzleKey(i / kVector));
      Store(first + (static_cast<uint64_t>(PartOf<kWidth>(i)) * n + ColumnOfPart<kWidth>(i)) * m, codes);
    }
    return;
  }
  uint8_t* const rows = data_t + (tile.group * kParts * plan.n + tile.column) * plan.m + tile.row + pair * 16;
#pragma unroll 1
  for (int column = first_column; column < kTileSide - kWidth + tile.columns; column += kColumnsAtOnce) {
    const int left = tile.rows - pair * 16;
    if (left <= 0) return;
    if (kParts > 1 && ColumnOfPart<kWidth>(column) >= tile.columns) continue;
    const Bytes<16> codes = PairOfCodes(tile_t, column, pair, SwizzleKey(column / kVector));
    uint8_t* const address = rows + (PartOf<kWidth>(column) * plan.n + ColumnOfPart<kWidth>(column)) * plan.m;
    if (wide) {
      Store(address, codes);
    } else {
      StoreCodes(address, codes, left);
    }
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_TRANSPOSE_TILE_H_
