// encode_moment: blocks that change, by the lanes of cuda/common/moment.h.
//
// The moment may be the result: a lane writes codes that it has read itself, the first of the eight the amax and the
// exponent.
#include "cuda/kernels/encode_moment.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/moment.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

// What a lane has of a block. From element `count` on, counted from the first of the lane, there are zeros, whose code is
// 0 and which have no part in a span.
template <bool kWide>
struct Elements {
  int64_t offset;
  int count;
  Floats after = {};
  Codes codes = {};

  __device__ __forceinline__ void Read(const EncodeMomentParams& params) {
    ReadCodes<kWide>(params.data + offset, count, codes);
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float* place = params.after + offset + v * kSpan;
      if (kWide && v * kSpan < count) after[v] = Load<4 * kVector>(place);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!kWide && v * kSpan + i < count) after[v].words[i] = Load<4>(place + i).words[0];
      }
    }
  }

  // Whether an element is not what its code stands for, to the bit.
  __device__ __forceinline__ bool Differs(int v, int i, const Factor& amax, const float* fractions) const {
    if (v * kSpan + i >= count) return false;
    const uint32_t code = codes[v] >> (8 * i) & 0xffu;
    const float magnitude = amax * fractions[code & 0x7fu];
    const uint32_t bits = E4M3::IsNan(code) ? 0x7fc00000u : FloatToBits(magnitude);
    return (bits | (code & 0x80u) << 24) != after[v].words[i];
  }
};

// With kWide, vectors of a lane are whole and aligned.
template <bool kRandom, bool kSquared, bool kWide>
__global__ void __launch_bounds__(kBlockSize, kWide ? 4 : 3) EncodeMomentKernel(EncodeMomentParams params, int64_t across) {
  __shared__ Fractions<128> fractions;
  __shared__ CodeSteps steps;
  fractions.Fill();
  steps.Fill();
  __syncthreads();
  const int lane = threadIdx.x % kLanes;
  const int64_t blocks = params.rows * across;
  const int64_t step = int64_t{gridDim.x} * kWarpsPerBlock * kMomentsOfWarp;
  const int64_t first = (int64_t{blockIdx.x} * kBlockSize + threadIdx.x) / kLanes;
  // The place of the block, and the elements before it; how far the next block of these lanes is.
  int64_t row = first / across, column = first - row * across;
  int64_t start = row * params.n + column * kMomentBlock;
  const int64_t rows = step / across, columns = step - rows * across;
  const int64_t elements_on = rows * params.n + columns * kMomentBlock;
  // All lanes of a warp go on together.
  for (int64_t block = first; block - threadIdx.x % kWarpSize / kLanes < blocks; block += step) {
    const bool is_first = lane == 0 && block < blocks;
    const int64_t rest = params.n - column * kMomentBlock - lane * kVector;
    const int count = block >= blocks || rest < 0 ? 0 : static_cast<int>(rest < kMomentBlock ? rest : kMomentBlock);
    Elements<kWide> elements = {start + lane * kVector, count};
    elements.Read(params);
    float amax = is_first ? params.amax[block] : 0.0f;
    int8_t exponent = is_first ? params.exponent[block] : int8_t{0};

    // 1. Compare with what the moment decodes to. Most blocks differ in one of the first elements of lanes.
    const float old_amax = BitsToFloat(OfFirst(FloatToBits(amax) & kAbsMask));
    const int old_exponent = static_cast<int>(OfFirst(static_cast<uint32_t>(exponent)));
    const bool small = old_amax < 1.0f;
    const Factor decode(old_amax < 0x1p-126f ? 0.0f : __fmul_rn(old_amax, small ? 0x1p64f : 1.0f), small, 0.0f);
    const float* old_fractions = fractions.Of(old_exponent);
    uint32_t differs = OverBlock(elements.Differs(0, 0, decode, old_fractions));
    if (__reduce_max_sync(kAllLanes, 1 - differs) != 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) differs |= elements.Differs(v, i, decode, old_fractions);
      }
      differs = OverBlock(differs);
    }

    // 2. Encode.
    MomentEncoder<false, kRandom, kSquared> encoder;
    encoder.Find(elements.after);
    const bool any_roots = encoder.AnyRoots();
    if (differs != 0) {
      const uint32_t key = kRandom ? Load<4>(params.keys + block).words[0] : 0;
      encoder.Encode(elements.after, steps.Of(encoder.exponent), key, any_roots, elements.codes);
      amax = encoder.top;
      exponent = static_cast<int8_t>(encoder.exponent);
    }
    WriteCodes<kWide>(params.next_data + elements.offset, count, elements.codes);
    if (is_first) {
      params.next_amax[block] = amax;
      params.next_exponent[block] = exponent;
    }
    column += columns;
    start += elements_on;
    if (column >= across) {
      column -= across;
      start += params.n - across * kMomentBlock;
    }
  }
}

template <bool kRandom, bool kSquared>
cudaError_t Run(const EncodeMomentParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const int64_t across = params.n / kMomentBlock + (params.n % kMomentBlock != 0);
  const int64_t needed = (params.rows * across - 1) / (kWarpsPerBlock * kMomentsOfWarp) + 1;
  const int64_t most = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const bool wide = params.n % kVector == 0 && IsAligned(params.after, 4 * kVector) &&
                    IsAligned(params.data, kVector) && IsAligned(params.next_data, kVector);
  return Launch(wide ? EncodeMomentKernel<kRandom, kSquared, true> : EncodeMomentKernel<kRandom, kSquared, false>,
                needed < most ? needed : most, kBlockSize, stream, params, across);
}

}  // namespace

cudaError_t LaunchEncodeMoment(const EncodeMomentParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.n == 0) return cudaSuccess;
  const auto run = params.keys != nullptr ? (params.squared ? Run<true, true> : Run<true, false>)
                                          : (params.squared ? Run<false, true> : Run<false, false>);
  return run(params, stream);
}

}  // namespace jaxfp8::cuda
