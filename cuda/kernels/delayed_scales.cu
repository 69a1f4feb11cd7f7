// delayed_scales: a block for each group of each quantizer; all of them in one launch, which is what it costs.
#include "cuda/kernels/delayed_scales.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/launch.h"

namespace jaxfp8::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) DelayedScalesKernel(const __grid_constant__ DelayedScalesParams params) {
  __shared__ BlockAmax<kWarpsPerBlock> block_amax;
  const int64_t histories = params.count * params.groups;
  for (int64_t index = blockIdx.x; index < histories; index += gridDim.x) {
    const int64_t group = index / params.count;
    const DelayedScalesQuantizer& quantizer = params.quantizers[index - group * params.count];
    const int64_t length = quantizer.length;
    const float* history = quantizer.history + group * length;
    AmaxAccumulator<F32> accumulator;
    for (int64_t slot = threadIdx.x; slot < length; slot += kBlockSize) {
      const uint32_t bits = EntryBits(history[slot]);
      if (slot == 0 || !params.most_recent || bits == kInfBits) accumulator.Add(BitsToFloat(bits));
    }
    block_amax.Put(accumulator.OverWarp());
    __syncthreads();
    const uint32_t largest = block_amax.InFirstWarp();
    if (threadIdx.x == 0) {
      const ScalePair pair = DelayedScale(largest, quantizer.stored[group], quantizer.numerator);
      quantizer.scale[group] = pair.scale;
      quantizer.scale_inv[group] = pair.scale_inv;
      quantizer.amax[group] = 0.0f;
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchDelayedScales(const DelayedScalesParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t histories = params.count * params.groups;
  if (histories == 0) return cudaSuccess;
  return Launch(DelayedScalesKernel, histories < kMaxBlocks ? histories : kMaxBlocks, kBlockSize, stream, params);
}

}  // namespace jaxfp8::cuda
