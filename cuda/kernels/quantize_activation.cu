// quantize_activation: tiles of an activation of x, computed between the loads and the codes.
#include "cuda/kernels/quantize_activation.h"

#include <cuda_runtime.h>

#include "cuda/common/activation.h"
#include "cuda/common/tile_kernel.h"

namespace jaxfp8::cuda {
namespace {

template <class T, class Activate>
struct Activated {
  using In = T;
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr int kInputs = Activate::kInputs;
  static constexpr bool kQuantizesInput = false;
  static constexpr bool kSumsColumns = false;
  static constexpr int kParts = 1;
  static constexpr int kBlocks = kTileBlocks;
  struct Columns {};
  struct Row {
    Bytes<16> x[kInputs];
  };

  const In* x;
  Activate activate;

  template <Access kAccess>
  __device__ __forceinline__ Columns LoadColumns(const MatrixShare<In, kAccess>&) const {
    return {};
  }
  template <Access kAccess>
  __device__ __forceinline__ Row Load(const MatrixShare<In, kAccess>& share, int r) const {
    Row row;
#pragma unroll
    for (int k = 0; k < kInputs; ++k) row.x[k] = share.template Load<kInputs>(x, r, k);
    return row;
  }
  __device__ __forceinline__ void Values(const Columns&, const Row& row, float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float inputs[kInputs];
#pragma unroll
      for (int k = 0; k < kInputs; ++k) inputs[k] = Widen<In>(row.x[k].words, i);
      values[i] = activate.Of(inputs);
    }
  }
};

}  // namespace

cudaError_t LaunchQuantizeActivation(const QuantizeActivationParams& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    status = DispatchActivation(params.activation, params.clamp, [&](auto activate) {
      const Activated<In, decltype(activate)> producer = {static_cast<const In*>(params.x), activate};
      return LaunchTiles(params, producer, true, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
