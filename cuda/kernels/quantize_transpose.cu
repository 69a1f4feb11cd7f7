// quantize_transpose: tiles of x as it is, and sums of its columns where they are asked for. quantize_pair: tiles with 64
// columns of each of two matrices.
#include "cuda/kernels/quantize_transpose.h"

#include <cuda_runtime.h>

#include "cuda/common/tile_kernel.h"

namespace jaxfp8::cuda {
namespace {

template <class T, bool kSums, int kMatrices = 1>
struct Identity {
  using In = T;
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr bool kQuantizesInput = true;
  static constexpr bool kSumsColumns = kSums;
  static constexpr int kParts = kMatrices;
  static constexpr int kBlocks = kTileBlocks;
  struct Columns {};
  struct Row {
    Bytes<16> x;
  };

  const In* x;
  float* column_sums;
  const In* second;  // of two matrices

  template <Access kAccess>
  __device__ __forceinline__ Columns LoadColumns(const MatrixShare<In, kAccess, kParts>&) const {
    return {};
  }
  template <Access kAccess>
  __device__ __forceinline__ Row Load(const MatrixShare<In, kAccess, kParts>& share, int r) const {
    return {share.Load(kParts == 1 || share.part == 0 ? x : second, r)};
  }
  __device__ __forceinline__ void Values(const Columns&, const Row& row, float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) values[i] = Widen<In>(row.x.words, i);
  }
};

}  // namespace

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    const In* const x = static_cast<const In*>(params.x);
    status = params.column_sums == nullptr
                 ? LaunchTiles(params, Identity<In, false>{x, nullptr, nullptr}, true, stream)
                 : LaunchTiles(params, Identity<In, true>{x, params.column_sums, nullptr}, true, stream);
  });
  return status;
}

cudaError_t LaunchQuantizePair(const QuantizePairParams& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    const Identity<In, false, 2> pair = {static_cast<const In*>(params.x), nullptr, static_cast<const In*>(params.second)};
    status = LaunchTiles(params, pair, IsAligned(params.second, 16), stream);
  });
  return status;
}

}  // namespace jaxfp8::cuda
