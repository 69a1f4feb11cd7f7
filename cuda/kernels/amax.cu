// amax: one read, no other traffic.
#include "cuda/kernels/amax.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/launch.h"
#include "cuda/common/stream.h"

namespace jaxfp8::cuda {
namespace {

template <class In>
struct AmaxBody {
  float* amax;
  AmaxAccumulator<In> accumulator;

  __device__ void Begin(int64_t) { accumulator.Reset(); }

  template <int kCount>
  __device__ void Visit(int64_t, const Bytes<kCount * sizeof(In)>& x) {
    accumulator.Add(x);
  }

  __device__ void End(int64_t group, const StreamPlan& plan) { FinishAmax(accumulator, plan, amax + group); }
};

// Blocks on a multiprocessor: said, because ptxas for sm_100 otherwise tries five and spills, and for sm_120 four.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kBlocks = 3;
#else
constexpr int kBlocks = 4;
#endif

template <class In, int kVector>
__global__ void __launch_bounds__(kBlockSize, kBlocks)
    AmaxKernel(StreamPlan plan, const In* __restrict__ x, float* amax) {
  Stream<kVector>(plan, x, AmaxBody<In>{amax, {}});
}

template <class In, int kVector>
cudaError_t Run(const AmaxParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const StreamPlan plan = MakeStreamPlan(params.groups, params.size, kVector, multiprocessors);
  return Launch(AmaxKernel<In, kVector>, plan.Blocks(), kBlockSize, stream, plan, static_cast<const In*>(params.x),
                params.amax);
}

}  // namespace

cudaError_t LaunchAmax(const AmaxParams& params, cudaStream_t stream) {
  JAXFP8_RETURN_IF_CUDA_ERROR(SetZero(params.amax, params.groups, stream));
  if (params.groups == 0 || params.size == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    constexpr int kVector = 16 / sizeof(In);
    const bool wide = IsAligned(params.x, 16) && (params.groups == 1 || params.size % kVector == 0);
    status = wide ? Run<In, kVector>(params, stream) : Run<In, 1>(params, stream);
  });
  return status;
}

}  // namespace jaxfp8::cuda
