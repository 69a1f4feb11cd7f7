// amax_to_scale: one thread an amax; one block unless there are hundreds.
#include "cuda/kernels/amax_to_scale.h"

#include <cuda_runtime.h>

#include "common/scale.h"
#include "cuda/common/launch.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) AmaxToScaleKernel(AmaxToScaleParams params) {
  const int64_t i = int64_t{blockIdx.x} * kBlockSize + threadIdx.x;
  if (i >= params.count) return;
  const ScalePair pair = AmaxToScale(params.amax[i], params.stored[i], params.numerator);
  params.scale[i] = pair.scale;
  params.scale_inv[i] = pair.scale_inv;
}

}  // namespace

cudaError_t LaunchAmaxToScale(const AmaxToScaleParams& params, cudaStream_t stream) {
  if (params.count == 0) return cudaSuccess;
  const int64_t blocks = (params.count - 1) / kBlockSize + 1;
  return Launch(AmaxToScaleKernel, blocks, kBlockSize, stream, params);
}

}  // namespace jaxfp8::cuda
