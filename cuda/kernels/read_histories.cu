// read_histories: a block for each group of each quantizer; all of them in one launch, which is what it costs.
#include "cuda/kernels/read_histories.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/launch.h"

namespace jaxfp8::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) ReadHistoriesKernel(const __grid_constant__ ReadHistoriesParams params) {
  __shared__ BlockAmax<kWarpsPerBlock> block_amax;
  const int64_t histories = params.count * params.groups;
  for (int64_t index = blockIdx.x; index < histories; index += gridDim.x) {
    const int64_t group = index / params.count;
    const ReadHistoriesQuantizer& quantizer = params.quantizers[index - group * params.count];
    const float* history = quantizer.history + group * quantizer.length;
    AmaxAccumulator<F32> accumulator;
    for (int64_t slot = threadIdx.x; slot < quantizer.length; slot += kBlockSize) {
      accumulator.Add(BitsToFloat(EntryBits(history[slot])));
    }
    block_amax.Put(accumulator.OverWarp());
    __syncthreads();
    const uint32_t largest = block_amax.InFirstWarp();
    if (threadIdx.x == 0) {
      WriteReading(largest, history[0], quantizer.stored[group], quantizer.numerator,
                   quantizer.reading + group * quantizer.stride);
    }
    __syncthreads();
  }
}

}  // namespace

cudaError_t LaunchReadHistories(const ReadHistoriesParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t histories = params.count * params.groups;
  if (histories == 0) return cudaSuccess;
  return Launch(ReadHistoriesKernel, histories < kMaxBlocks ? histories : kMaxBlocks, kBlockSize, stream, params);
}

}  // namespace jaxfp8::cuda
