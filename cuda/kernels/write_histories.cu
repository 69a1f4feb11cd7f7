// write_histories: a block for each group of each quantizer; all of them in one launch, which is what it costs.
#include "cuda/kernels/write_histories.h"

#include <cuda_runtime.h>

#include "cuda/common/launch.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

__global__ void __launch_bounds__(kBlockSize) WriteHistoriesKernel(
    const __grid_constant__ WriteHistoriesParams params) {
  const int64_t histories = params.count * params.groups;
  for (int64_t index = blockIdx.x; index < histories; index += gridDim.x) {
    const int64_t group = index / params.count;
    const WriteHistoriesQuantizer& quantizer = params.quantizers[index - group * params.count];
    const int64_t length = quantizer.length;
    const float* history = quantizer.history + group * length;
    const float* recorded = quantizer.amax + group * quantizer.stride;
    const float amax = *recorded;
    const bool stays = Stays(recorded, quantizer.stride);
    const float scale_inv = quantizer.scale_inv[group * quantizer.stride];
    float* next_history = quantizer.next_history + group * length;
    // Slots move by one, or not at all. Without a use everything is 0.
    const int64_t step = stays ? 0 : 1;
    const uint32_t mask = IsUsed(scale_inv) ? 0xffffffffu : 0;
    const uint32_t newest = threadIdx.x == 0 ? CleanBits(history[0]) : 0;
    // The two histories may be one. What a block writes in one turn it, or an earlier turn, has read before the barrier.
    for (int64_t start = 0; start < length; start += kBlockSize) {
      const int64_t slot = start + threadIdx.x;
      const bool moves = step < slot && slot < length;
      const uint32_t bits = !moves ? 0 : stays ? StayingBits(history[slot]) : CleanBits(history[slot]);
      __syncthreads();
      if (moves) next_history[slot - step] = BitsToFloat(bits & mask);
    }
    // All has been read. Slot 0 goes to the end, and its new amax takes its place.
    if (threadIdx.x == 0) {
      if (!stays) next_history[length - 1] = BitsToFloat(newest & mask);
      next_history[0] = BitsToFloat((stays ? StayingBits(amax) : CleanBits(amax)) & mask);
      quantizer.next_scale[group] = scale_inv;
    }
  }
}

}  // namespace

cudaError_t LaunchWriteHistories(const WriteHistoriesParams& params, cudaStream_t stream) {
  constexpr int64_t kMaxBlocks = 1 << 16;
  const int64_t histories = params.count * params.groups;
  if (histories == 0) return cudaSuccess;
  return Launch(WriteHistoriesKernel, histories < kMaxBlocks ? histories : kMaxBlocks, kBlockSize, stream, params);
}

}  // namespace jaxfp8::cuda
