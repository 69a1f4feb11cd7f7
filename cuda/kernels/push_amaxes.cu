// push_amaxes: one thread an amax; one block unless there are hundreds.
#include "cuda/kernels/push_amaxes.h"

#include <cuda_runtime.h>

#include "cuda/common/launch.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) PushAmaxesKernel(const __grid_constant__ PushAmaxesParams params) {
  const int64_t index = int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  const int64_t group = index / params.count;
  if (group >= params.groups) return;
  const PushAmaxesQuantizer& quantizer = params.quantizers[index - group * params.count];
  quantizer.next_history[group * quantizer.length] = BitsToFloat(CleanBits(quantizer.amax[group]));
}

}  // namespace

cudaError_t LaunchPushAmaxes(const PushAmaxesParams& params, cudaStream_t stream) {
  if (params.groups == 0) return cudaSuccess;
  for (int64_t i = 0; i < params.count; ++i) {
    const PushAmaxesQuantizer& quantizer = params.quantizers[i];
    JAXFP8_RETURN_IF_CUDA_ERROR(
        CopyUnlessAliased(quantizer.next_history, quantizer.history, params.groups * quantizer.length, stream));
  }
  const int64_t blocks = (params.count * params.groups - 1) / kBlockSize + 1;
  return Launch(PushAmaxesKernel, blocks, kBlockSize, stream, params);
}

}  // namespace jaxfp8::cuda
