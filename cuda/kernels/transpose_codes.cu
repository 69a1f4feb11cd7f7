// transpose_codes: tiles of 128 x 128 codes go through shared memory, as bytes (transpose_tile.h).
#include "cuda/kernels/transpose_codes.h"

#include <cuda_runtime.h>

#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {
namespace {

// 64 bytes a thread in flight, half as many as quantize_transpose has, and twice the threads.
constexpr int kVector = 8;
constexpr int kBlocks = 8;
using Place = TileShare<kVector>;
static_assert(Place::kRowGroupsAtOnce == Place::kRowGroups, "a thread has one share of a tile");

struct Task {
  TransposePlan plan;
  const uint8_t* data;
  uint8_t* data_t;
  bool wide_rows;     // vectors of data are aligned, and its rows are whole vectors
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

__global__ void __launch_bounds__(kBlockSize, kBlocks) TransposeCodesKernel(const __grid_constant__ Task task) {
  alignas(16) __shared__ uint8_t codes_t[kTileSide * kTileSide];
  const Place place = {static_cast<int>(threadIdx.x % Place::kColumnGroups),
                       static_cast<int>(threadIdx.x / Place::kColumnGroups)};
  const int64_t n = task.plan.n;
  for (int64_t index = blockIdx.x; index < task.plan.tiles; index += gridDim.x) {
    const Tile tile = task.plan.At(index);
    const int64_t row = tile.group * task.plan.m + tile.row + place.FirstRow();
    const uint8_t* const first = task.data + row * n + tile.column + place.FirstColumn();
    if (task.wide_rows && tile.IsWhole()) {
      Bytes<kVector> codes[kRows];
#pragma unroll
      for (int r = 0; r < kRows; ++r) codes[r] = Load<kVector>(first + r * n);
      PutTransposed(place, codes, codes_t);
    } else {
#pragma unroll 1
      for (int r = 0; r < kRows; ++r) {
        const Bytes<kVector> codes[1] = {LoadElements<kVector>(first + r * n, place.Valid(tile, r))};
        PutTransposed(place, codes, codes_t, r);
      }
    }
    __syncthreads();
    StoreTransposed<kVector>(task.plan, tile, codes_t, task.data_t, task.wide_columns);
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchTransposeCodes(const TransposeCodesParams& params, cudaStream_t stream) {
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const TransposePlan plan = MakeTransposePlan(params.groups, params.m, params.n);
  const Task task = {plan, params.data, params.data_t, params.n % kVector == 0 && IsAligned(params.data, kVector),
                     params.m % 16 == 0 && IsAligned(params.data_t, 16)};
  const int64_t most = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  return Launch(TransposeCodesKernel, plan.tiles < most ? plan.tiles : most, kBlockSize, stream, task);
}

}  // namespace jaxfp8::cuda
