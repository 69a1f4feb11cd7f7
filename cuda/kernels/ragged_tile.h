// How a block of ragged_matmul multiplies a tile: the sums of its threads, and the product of one slice of the contraction.
//
// A tile has kRows rows of a and kColumns of b. Slices of kSlice elements of both pass through kStages stages of shared
// memory, where chunk `chunk` of row `row` is at Offset(row, chunk). The kernel calls, for each slice, Show when the slice
// has arrived for a thread, Start when it has for all of them, and Finish after it has begun the copy of the slice that is
// kAhead slices on; End comes after the last slice. `scales` are those of the slice, of a tile that kHasScales: one for each
// row, then one for each column. A warp holds kRowBlocks blocks of 16 rows and kColumnBlocks of 8 columns
// from FirstRow and FirstColumn on, in the layout of mma.sync's sums.
#ifndef JAXFP8_CUDA_KERNELS_RAGGED_TILE_H_
#define JAXFP8_CUDA_KERNELS_RAGGED_TILE_H_

#include <cstdint>

#include "cuda/common/ptx.h"
#include "cuda/common/ragged_plan.h"
#include "cuda/common/warpgroup.h"

namespace jaxfp8::cuda {

// Sixteen warps, each with 32 x 32 of the tile, multiply by mma.sync. Every GPU with FP8 has it.
template <class A, class B, bool kPrecise>
class WarpTile {
 public:
  static constexpr bool kUsesWarpgroups = false, kHasScales = false;
  static constexpr int kThreads = 512, kRows = kRaggedTile, kColumns = 128;
  static constexpr int kSlice = kRaggedSlice, kStages = 3, kAhead = kStages - 1;
  static constexpr int kRowBlocks = 2, kColumnBlocks = 4;

  static __device__ __forceinline__ int Offset(int row, int chunk) { return RaggedOffset(row, chunk); }
  static __device__ __forceinline__ int FirstRow() { return Warp() / kWarpsAcross * kRowBlocks * 16; }
  static __device__ __forceinline__ int FirstColumn() { return Warp() % kWarpsAcross * kColumnBlocks * 8; }

  __device__ __forceinline__ void Show() {}
  __device__ __forceinline__ void Start(const uint8_t*, const uint8_t*) {}

  __device__ __forceinline__ void Finish(const uint8_t* a, const uint8_t* b, const float*) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1  // unrolled, ptxas takes registers for both and spills
    for (int chunk = 0; chunk < kSlice / kRaggedChunk; chunk += 2) {  // 32 elements
      uint32_t columns[kColumnBlocks][2];
#pragma unroll
      for (int j = 0; j < kColumnBlocks; j += 2) {  // both chunks of 8 columns, then of the next 8
        const int row = FirstColumn() + j * 8 + lane / 16 * 8 + lane % 8;
        uint32_t words[4];
        LoadMatrices(b + Offset(row, chunk + lane / 8 % 2), words);
        columns[j][0] = words[0];
        columns[j][1] = words[1];
        columns[j + 1][0] = words[2];
        columns[j + 1][1] = words[3];
      }
#pragma unroll
      for (int i = 0; i < kRowBlocks; ++i) {  // 16 rows of one chunk, then of the other
        uint32_t rows[4];
        LoadMatrices(a + Offset(FirstRow() + i * 16 + lane % 16, chunk + lane / 16), rows);
#pragma unroll
        for (int j = 0; j < kColumnBlocks; ++j) {
          if constexpr (kPrecise) {  // the tensor cores' own sum is of 32 products, and may have fewer bits than f32
            float sum[4] = {};
            MultiplyFp8<A, B>(sum, rows, columns[j]);
#pragma unroll
            for (int c = 0; c < 4; ++c) sums_[i][j][c] += sum[c];
          } else {
            MultiplyFp8<A, B>(sums_[i][j], rows, columns[j]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void End() {}

  // Elements 2 half and 2 half + 1 of a block are neighbours in a row.
  __device__ __forceinline__ float Sum(int i, int j, int element) const { return sums_[i][j][element]; }

 private:
  static constexpr int kWarpsAcross = kColumns / (kColumnBlocks * 8);
  static __device__ __forceinline__ int Warp() { return threadIdx.x / 32; }

  float sums_[kRowBlocks][kColumnBlocks][4] = {};
};

// Two warpgroups, each with 64 rows of the tile and all of its columns, in kParts parts of which each is a product of its own.
// With kPrecise an f32 sum takes over after every slice, 128 elements: that of the first part while the second is multiplied.
// With kScales, which needs kPrecise, a slice's sum is first multiplied by the product of its row's and its column's scale.
template <class A, class B, bool kPrecise, bool kScales = false, int kParts = 2>
class WarpgroupTile {
 public:
  static constexpr bool kUsesWarpgroups = true, kHasScales = kScales;
  static constexpr int kThreads = 2 * kWarpgroupThreads, kRows = 2 * kWarpgroupRows, kColumns = kPrecise ? 192 : 256;
  static constexpr int kSlice = kSwizzledRow, kStages = kPrecise ? 5 : 4;
  static constexpr int kAhead = kPrecise ? kStages - 1 : kStages - 2;  // the last slice's product may be under way
  static constexpr int kRowBlocks = 1, kColumnBlocks = kColumns / 8;

  static __device__ __forceinline__ int Offset(int row, int chunk) { return SwizzledOffset(row, chunk); }
  static __device__ __forceinline__ int FirstRow() { return threadIdx.x / 32 * 16; }
  static __device__ __forceinline__ int FirstColumn() { return 0; }

  __device__ __forceinline__ void Show() { ShowToTensorCores(); }

  __device__ __forceinline__ void Start(const uint8_t* a, const uint8_t* b) {
    const SwizzledRows rows(a + threadIdx.x / kWarpgroupThreads * kWarpgroupRows * kSlice);
    BeginProducts();
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      if (kPrecise && part > 0) CommitProducts();
      Multiply(sums_[part], rows, SwizzledRows(b + part * (kColumns / kParts) * kSlice));
    }
    CommitProducts();
  }

  __device__ __forceinline__ void Finish(const uint8_t*, const uint8_t*, const float* scales) {
    WaitForProducts<kPrecise ? kParts - 1 : 1>();
    if constexpr (kPrecise) {
      TakeOver(0, scales);
      if constexpr (kParts == 2) {
        WaitForProducts<0>();
        TakeOver(1, scales);
      }
    }
  }

  __device__ __forceinline__ void End() {
    WaitForProducts<0>();
#pragma unroll
    for (auto& sums : sums_) UseSums(sums);
  }

  __device__ __forceinline__ float Sum(int, int j, int element) const {
    const int part = j / (kColumnBlocks / kParts), place = j % (kColumnBlocks / kParts) * 4 + element;
    return kPrecise ? totals_[part][place] : sums_[part][place];
  }

 private:
  static constexpr int kSums = kColumns / kParts / 2;  // a thread's, of a part of the columns

  static __device__ __forceinline__ void Multiply(float (&sums)[kSums], SwizzledRows a, SwizzledRows b) {
#pragma unroll
    for (int k = 0; k < kSlice; k += kWarpgroupDepth) {
      StartProduct<A, B>(sums, a.From(k), b.From(k), !kPrecise || k > 0);
    }
  }

  __device__ __forceinline__ void TakeOver(int part, const float* scales) {
    UseSums(sums_[part]);
    if constexpr (kScales) {
      const int lane = threadIdx.x % 32;
      const float* of_rows = scales + FirstRow() + lane / 4;
      const float* of_columns = scales + kRows + part * (kColumns / kParts) + lane % 4 * 2;
      const float of_row[2] = {of_rows[0], of_rows[8]};
#pragma unroll
      for (int i = 0; i < kSums; ++i) {
        const float scale = __fmul_rn(of_row[i % 4 / 2], of_columns[i / 4 * 8 + i % 2]);
        totals_[part][i] = __fmaf_rn(scale, sums_[part][i], totals_[part][i]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < kSums; ++i) totals_[part][i] += sums_[part][i];
    }
  }

  float sums_[kParts][kSums] = {};
  float totals_[kParts][kPrecise ? kSums : 1] = {};
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_RAGGED_TILE_H_
