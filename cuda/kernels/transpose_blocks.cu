// transpose_blocks: one kernel finds the scales of the new blocks, a second shifts and transposes the codes by them.
//
// A block of threads takes tiles of 64 x 64 codes. A thread shifts a patch of 4 x 4, whose columns pass through shared
// memory as words; then it stores 16 codes of a column.
#include "cuda/kernels/transpose_blocks.h"

#include <cuda_runtime.h>

#include "common/fp8_shift.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kSide = 64;
constexpr int kPatch = 4;
constexpr int kPatches = kSide / kPatch;
constexpr int kStored = kSide * kSide / kThreads;  // codes of a column that a thread stores
constexpr int kBlocksPerMultiprocessor = 8;
static_assert(kPatches * kPatches == kThreads && kStored == 16, "a patch and 16 bytes for each thread");

struct Plan {
  TransposeBlocksParams params;
  int64_t down, across;  // blocks along m and n
  int64_t tiles_down, tiles_across;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// A thread for each new scale, which all columns of an old block have.
__global__ void __launch_bounds__(kThreads) LargestScalesKernel(Plan plan) {
  const TransposeBlocksParams& params = plan.params;
  const int64_t count = params.groups * plan.down * plan.across;
  for (int64_t index = int64_t{blockIdx.x} * kThreads + threadIdx.x; index < count;
       index += int64_t{gridDim.x} * kThreads) {
    const int64_t j = index % plan.across, i = index / plan.across % plan.down, group = index / plan.across / plan.down;
    const int64_t row = i * params.block, column = j * params.block;
    const int64_t rows = params.m - row < params.block ? params.m - row : params.block;
    const int64_t columns = params.n - column < params.block ? params.n - column : params.block;
    const uint8_t* scales = params.scale_inv + (group * params.m + row) * plan.across + j;
    uint32_t largest = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const uint32_t scale = Load<1>(scales + r * plan.across).words[0];
      largest = scale > largest ? scale : largest;
    }
    uint8_t* scales_t = params.scale_inv_t + (group * params.n + column) * plan.down + i;
    for (int64_t c = 0; c < columns; ++c) scales_t[c * plan.down] = static_cast<uint8_t>(largest);
  }
}

template <class Format>
__device__ __forceinline__ uint32_t Shifted(uint32_t code, uint32_t largest, uint32_t scale) {
  if (largest == kNanScaleCode) return Format::kNanCode;
  return ShiftDown<Format>(static_cast<uint8_t>(code), largest - scale);
}

// With kWords, four codes of a row are an aligned word and lie in one block, and so do four rows.
template <class Format, bool kWords>
__global__ void __launch_bounds__(kThreads) TransposeBlocksKernel(Plan plan) {
  __shared__ uint32_t tile[kSide][kPatches + 1];  // [column][rows in fours]
  const TransposeBlocksParams& params = plan.params;
  const int64_t m = params.m, n = params.n, block = params.block;
  const int64_t tiles = params.groups * plan.tiles_down * plan.tiles_across;
  for (int64_t index = blockIdx.x; index < tiles; index += gridDim.x) {
    const int64_t group = index / plan.tiles_across / plan.tiles_down;
    const int64_t first_row = index / plan.tiles_across % plan.tiles_down * kSide;
    const int64_t first_column = index % plan.tiles_across * kSide;
    // 1. Shift the codes of a patch.
    const int across = threadIdx.x % kPatches, down = threadIdx.x / kPatches;
    const int64_t row = first_row + down * kPatch, column = first_column + across * kPatch;
    uint32_t columns[kPatch] = {};
    if (row < m && column < n) {
      const int64_t row_block = row / block, column_block = column / block;
      const auto largest_of = [&](int64_t c, int64_t i) {
        return static_cast<uint32_t>(params.scale_inv_t[(group * n + c) * plan.down + i]);
      };
      const uint32_t largest = largest_of(column, row_block);
      for (int r = 0; r < kPatch && row + r < m; ++r) {
        const int64_t line = group * m + row + r;
        const uint32_t scale = Load<1>(params.scale_inv + line * plan.across + column_block).words[0];
        if constexpr (kWords) {
          const uint32_t codes = Load<kPatch>(params.data + line * n + column).words[0];
          for (int c = 0; c < kPatch; ++c) {
            columns[c] |= Shifted<Format>(codes >> (8 * c) & 0xffu, largest, scale) << (8 * r);
          }
        } else {
          for (int c = 0; c < kPatch && column + c < n; ++c) {
            const int64_t j = (column + c) / block;
            const uint32_t code = Load<1>(params.data + line * n + column + c).words[0];
            const uint32_t own = Load<1>(params.scale_inv + line * plan.across + j).words[0];
            columns[c] |= Shifted<Format>(code, largest_of(column + c, (row + r) / block), own) << (8 * r);
          }
        }
      }
    }
    for (int c = 0; c < kPatch; ++c) tile[across * kPatch + c][down] = columns[c];
    __syncthreads();
    // 2. Store a piece of a column.
    const int part = threadIdx.x % (kSide / kStored), line = threadIdx.x / (kSide / kStored);
    const int64_t first = first_row + part * kStored;
    uint8_t* data_t = params.data_t + (group * n + first_column + line) * m + first;
    if (first_column + line < n && first < m) {
      const uint32_t* words = &tile[line][part * kStored / kPatch];
      if (plan.wide_columns) {
        Store<kStored>(data_t, {{words[0], words[1], words[2], words[3]}});
      } else {
        for (int i = 0; i < kStored && first + i < m; ++i) {
          data_t[i] = static_cast<uint8_t>(words[i / kPatch] >> (8 * (i % kPatch)));
        }
      }
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchTransposeBlocks(const TransposeBlocksParams& given, cudaStream_t stream) {
  TransposeBlocksParams params = given;
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  const int64_t longer = params.m > params.n ? params.m : params.n;
  if (params.block > longer) params.block = longer;  // products with it do not overflow
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const auto pieces = [](int64_t size, int64_t piece) { return size / piece + (size % piece != 0); };
  const Plan plan = {params,
                     pieces(params.m, params.block),
                     pieces(params.n, params.block),
                     pieces(params.m, kSide),
                     pieces(params.n, kSide),
                     params.m % kStored == 0 && IsAligned(params.data_t, kStored)};
  const auto blocks = [&](int64_t wanted) {
    const int64_t most = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
    return wanted < most ? wanted : most;
  };
  const int64_t scales = params.groups * plan.down * plan.across;
  JAXFP8_RETURN_IF_CUDA_ERROR(Launch(LargestScalesKernel, blocks(pieces(scales, kThreads)), kThreads, stream, plan));
  const int64_t tiles = params.groups * plan.tiles_down * plan.tiles_across;
  const bool words = params.block % kPatch == 0 && params.n % kPatch == 0 && IsAligned(params.data, kPatch);
  cudaError_t status = cudaErrorInvalidValue;
  DispatchFp8(params.format, [&](auto format) {
    using Format = typename decltype(format)::type;
    status = Launch(words ? TransposeBlocksKernel<Format, true> : TransposeBlocksKernel<Format, false>, blocks(tiles),
                    kThreads, stream, plan);
  });
  return status;
}

}  // namespace jaxfp8::cuda
