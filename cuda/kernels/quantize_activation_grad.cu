// quantize_activation_grad: tiles of the gradient of an activation, computed between the loads and the codes.
//
// Of a gated activation a tile has 64 columns of the gradient of the gate and the same of the other half. Threads of both
// load the same bytes in one instruction, so memory is read once; each computes its own half.
#include "cuda/kernels/quantize_activation_grad.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/activation.h"
#include "cuda/common/tile_kernel.h"

namespace jaxfp8::cuda {
namespace {

template <class T, class Activate, bool kSums>
struct ActivationGradient {
  using In = T;
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr int kParts = Activate::kInputs;
  // With 64 registers a thread some would be spilled: a row has 16 bytes more in flight than that of an activation. With
  // 80, some of a gated activation's are on Blackwell.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
  static constexpr int kBlocks = kSums || kParts > 1 ? 2 : 3;
#else
  static constexpr int kBlocks = kSums ? 2 : 3;
#endif
  static constexpr bool kQuantizesInput = false;
  static constexpr bool kSumsColumns = kSums;
  struct Columns {
    int part;
  };
  struct Row {
    Bytes<16> x[kParts];
    Bytes<16> grad;
  };

  const In* x;
  const In* grad;
  float* column_sums;
  Activate activate;

  template <Access kAccess>
  __device__ __forceinline__ Columns LoadColumns(const MatrixShare<In, kAccess, kParts>& share) const {
    return {share.part};
  }
  template <Access kAccess>
  __device__ __forceinline__ Row Load(const MatrixShare<In, kAccess, kParts>& share, int r) const {
    Row row;
#pragma unroll
    for (int k = 0; k < kParts; ++k) row.x[k] = share.template Load<kParts>(x, r, k);
    row.grad = share.Load(grad, r);
    return row;
  }
  __device__ __forceinline__ void Values(const Columns& columns, const Row& row, float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      float inputs[kParts];
#pragma unroll
      for (int k = 0; k < kParts; ++k) inputs[k] = Widen<In>(row.x[k].words, i);
      values[i] = activate.Gradient(Widen<In>(row.grad.words, i), inputs, columns.part);
    }
  }
};

}  // namespace

cudaError_t LaunchQuantizeActivationGrad(const QuantizeActivationGradParams& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    status = DispatchActivation(params.activation, params.clamp, [&](auto activate) {
      const auto launch = [&](auto has_sums) {
        const ActivationGradient<In, decltype(activate), decltype(has_sums)::value> producer = {
            static_cast<const In*>(params.x), static_cast<const In*>(params.grad), params.column_sums, activate};
        return LaunchTiles(params, producer, IsAligned(params.grad, 16), stream);
      };
      return params.column_sums == nullptr ? launch(std::false_type{}) : launch(std::true_type{});
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
