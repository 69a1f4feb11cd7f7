// quantize: one read of x and one write of the codes, with the amax on the way.
//
// A lane loads 16 bytes, so that loads are coalesced and wide. It stores what those become, 8 bytes or (from f32) 4: a
// warp's store still covers whole 128-byte lines, and no shuffle is needed to make it wider.
#include "cuda/kernels/quantize.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/stream.h"

namespace jaxfp8::cuda {
namespace {

template <class In, class Format>
struct QuantizeBody {
  const float* scale;
  int64_t scale_stride;
  uint8_t* data;
  float* amax;  // null: not wanted
  int64_t amax_stride;
  AmaxAccumulator<In> accumulator;
  Multiplier multiply{1.0f};

  __device__ void Begin(int64_t group) {
    accumulator.Reset();
    multiply = Multiplier(scale[group * scale_stride]);
  }

  template <int kCount>
  __device__ void Visit(int64_t offset, const Bytes<kCount * sizeof(In)>& x) {
    accumulator.Add(x);
    float values[(kCount + 3) / 4 * 4] = {};
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Widen<In>(x.words, i);
    Bytes<kCount> codes;
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      codes.words[i / 4] =
          QuantizeFour<Format>(values[i], values[i + 1], values[i + 2], values[i + 3], multiply);
    }
    Store(data + offset, codes);
  }

  __device__ void End(int64_t group, const StreamPlan& plan) {
    FinishAmax(accumulator, plan, amax == nullptr ? nullptr : amax + group * amax_stride);
  }
};

template <class In, class Format, int kVector>
__global__ void __launch_bounds__(kBlockSize)
    QuantizeKernel(StreamPlan plan, const In* __restrict__ x, const float* __restrict__ scale, int64_t scale_stride,
                   uint8_t* __restrict__ data, float* amax, int64_t amax_stride) {
  Stream<kVector>(plan, x, QuantizeBody<In, Format>{scale, scale_stride, data, amax, amax_stride, {}});
}

template <class In, class Format, int kVector>
cudaError_t Run(const QuantizeParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const StreamPlan plan = MakeStreamPlan(params.groups, params.size, kVector, multiprocessors);
  return Launch(QuantizeKernel<In, Format, kVector>, plan.Blocks(), kBlockSize, stream, plan,
                static_cast<const In*>(params.x), params.scale, params.scale_stride,
                static_cast<uint8_t*>(params.data), params.amax, params.amax_stride);
}

}  // namespace

cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream) {
  const int64_t amaxes = AmaxCount(params.amax_stride, params.groups);
  JAXFP8_RETURN_IF_CUDA_ERROR(StartAmax(params.amax, params.amax_so_far, amaxes, stream));
  if (params.groups == 0 || params.size == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide = IsAligned(params.x, 16) && IsAligned(params.data, kVector) &&
                        (params.groups == 1 || params.size % kVector == 0);
      status = wide ? Run<In, Format, kVector>(params, stream) : Run<In, Format, 1>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
