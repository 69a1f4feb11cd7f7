// quantize_transpose: one read of x, and both layouts of the codes written as whole lines.
//
// A block takes tiles of 128 x 128 (common/transpose_tile.h). A thread loads one 16-byte vector of 8 rows, all in
// flight at once. Shared memory holds codes, not x: 16 KiB a block.
//
// Sums of columns, where they are asked for: a thread adds up its 8 rows, and through shared memory 128 threads add up
// the 16 row groups of a tile. One part a tile, always in the same order; no atomics.
#include "cuda/kernels/quantize_transpose.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "common/column_sums.h"
#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {
namespace {

static_assert(kTileSide == kColumnSumRows, "a tile is a part of the sums");
// Of a row group's sums in shared memory. Half-warps, which have two row groups of 16-bit floats, meet different banks.
constexpr int kSumsStride = kTileSide + 16;
// Blocks on a multiprocessor, which caps the registers. Four leave 64 a thread, without spills: 1024 threads with 128
// bytes each in flight. The variant for single elements keeps 64 loads in as many registers and needs one block's worth.
constexpr int MinBlocks(bool wide_rows) { return wide_rows ? 4 : 1; }

template <class In>
struct KernelParams {
  TransposePlan plan;
  const In* x;
  const float* scale;
  int64_t scale_stride;
  uint8_t* data;
  uint8_t* data_t;
  float* amax;
  float* column_sums;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// Quantizes this thread's share: stores the codes to data, their transpose to `tile_t`, and the sums of the columns to
// `tile_sums`.
template <class In, class Format, bool kSums, Access kAccess>
__device__ __forceinline__ void QuantizeRows(const KernelParams<In>& params, const Tile& tile,
                                             const TileShare<16 / sizeof(In)>& share, const Multiplier& multiply,
                                             AmaxAccumulator& accumulator, uint8_t* tile_t,
                                             float* tile_sums) {
  constexpr int kVector = 16 / sizeof(In);
  const int64_t n = params.plan.n;
  const int64_t offset =
      (tile.group * params.plan.m + tile.row + share.FirstRow()) * n + tile.column + share.FirstColumn();

  Bytes<16> x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) x[r] = LoadVector<kAccess>(params.x + offset + r * n, share.Valid(tile, r));

  [[maybe_unused]] float sums[kVector] = {};
  Bytes<kVector> codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < kVector / 4; ++w) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = Widen<In>(x[r].words, 4 * w + i);
        accumulator.Add(values[i]);
        if constexpr (kSums) sums[4 * w + i] += values[i];
      }
      codes[r].words[w] = QuantizeFour<Format>(values[0], values[1], values[2], values[3], multiply);
    }
    StoreVector<kAccess>(params.data + offset + r * n, codes[r], share.Valid(tile, r));
  }
  if constexpr (kSums) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      tile_sums[share.row_group * kSumsStride + i * share.kColumnGroups + share.column_group] = sums[i];
    }
  }
  PutTransposed(share, codes, tile_t);
}

// Adds up the row groups of one column of the tile.
template <int kVector, class In>
__device__ __forceinline__ void StoreColumnSum(const KernelParams<In>& params, const Tile& tile, int column,
                                               const float* tile_sums) {
  if (column >= tile.columns) return;
  using Share = TileShare<kVector>;
  const float* parts = tile_sums + column % kVector * Share::kColumnGroups + column / kVector;
  float sum = 0.0f;
#pragma unroll
  for (int row_group = 0; row_group < Share::kRowGroups; ++row_group) sum += parts[row_group * kSumsStride];
  const int64_t part = tile.group * ColumnSumParts(params.plan.m) + tile.row / kColumnSumRows;
  params.column_sums[part * params.plan.n + tile.column + column] = sum;
}

template <class In, class Format, bool kWideRows, bool kSums>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(kWideRows))
    QuantizeTransposeKernel(KernelParams<In> params) {
  using Share = TileShare<16 / sizeof(In)>;
  alignas(16) __shared__ uint8_t tile_t[kTileSide * kTileSide];
  [[maybe_unused]] __shared__ float tile_sums[kSums ? kTileSide / kRows * kSumsStride : 1];
  __shared__ BlockAmax<kWarpsPerBlock> block_amax;

  for (int64_t index = blockIdx.x; index < params.plan.tiles; index += gridDim.x) {
    const Tile tile = params.plan.At(index);
    const Multiplier multiply(params.scale[tile.group * params.scale_stride]);
    AmaxAccumulator accumulator;
#pragma unroll 1
    for (int first = 0; first < Share::kRowGroups; first += Share::kRowGroupsAtOnce) {
      const Share share = {static_cast<int>(threadIdx.x % Share::kColumnGroups),
                           first + static_cast<int>(threadIdx.x / Share::kColumnGroups)};
      const auto quantize_rows = [&](auto access) {
        QuantizeRows<In, Format, kSums, decltype(access)::value>(params, tile, share, multiply, accumulator, tile_t,
                                                                 tile_sums);
      };
      if constexpr (!kWideRows) {
        quantize_rows(AccessTag<Access::kElements>{});
      } else if (tile.IsWhole()) {
        quantize_rows(AccessTag<Access::kWholeTile>{});
      } else {
        quantize_rows(AccessTag<Access::kEdgeTile>{});
      }
    }
    block_amax.Put(accumulator.OverWarp());
    __syncthreads();
    if (params.amax != nullptr) block_amax.Raise(params.amax + tile.group);
    if constexpr (kSums) {
      if (threadIdx.x < kTileSide) StoreColumnSum<16 / sizeof(In)>(params, tile, threadIdx.x, tile_sums);
    }
    StoreTransposed<16 / sizeof(In)>(params.plan, tile, tile_t, params.data_t, params.wide_columns);
    __syncthreads();
  }
}

template <class In, class Format, bool kWideRows, bool kSums>
cudaError_t Run(const QuantizeTransposeParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const KernelParams<In> kernel_params = {
      MakeTransposePlan(params.groups, params.m, params.n),
      static_cast<const In*>(params.x),
      params.scale,
      params.scale_stride,
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      params.amax,
      params.column_sums,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
  };
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t blocks = kernel_params.plan.tiles < max_blocks ? kernel_params.plan.tiles : max_blocks;
  return Launch(QuantizeTransposeKernel<In, Format, kWideRows, kSums>, blocks, kBlockSize, stream, kernel_params);
}

}  // namespace

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream) {
  if (params.groups == 0) return cudaSuccess;
  JAXFP8_RETURN_IF_CUDA_ERROR(StartAmax(params.amax, params.amax_so_far, params.groups, stream));
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide_rows = params.n % kVector == 0 && IsAligned(params.x, 16) && IsAligned(params.data, kVector);
      const auto run = [&](auto sums) {
        constexpr bool kSums = decltype(sums)::value;
        return wide_rows ? Run<In, Format, true, kSums>(params, stream) : Run<In, Format, false, kSums>(params, stream);
      };
      status = params.column_sums == nullptr ? run(std::false_type()) : run(std::true_type());
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
