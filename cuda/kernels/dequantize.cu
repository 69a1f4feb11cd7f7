// dequantize: code * scale_inv in f32, rounded once. The mirror of quantize: a lane stores 16 bytes and loads less.
#include "cuda/kernels/dequantize.h"

#include <cuda_runtime.h>

#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/stream.h"

namespace jaxfp8::cuda {
namespace {

template <class Format, class Out>
struct DequantizeBody {
  const float* scale_inv;
  int64_t scale_stride;
  Out* out;
  float factor = 1.0f;

  __device__ void Begin(int64_t group) { factor = scale_inv[group * scale_stride]; }

  template <int kCount>
  __device__ void Visit(int64_t offset, const Bytes<kCount>& codes) {
    constexpr int kPerWord = 4 / sizeof(Out);
    Bytes<kCount * sizeof(Out)> values;
#pragma unroll
    for (int i = 0; i < kCount; i += kPerWord) {
      // Where a word holds one value, or the last half of it is padding, the second argument is ignored.
      const float low = __fmul_rn(WidenCode<Format>(codes.words, i), factor);
      const float high = i + 1 < kCount ? __fmul_rn(WidenCode<Format>(codes.words, i + 1), factor) : 0.0f;
      values.words[i / kPerWord] = Narrow<Out>(low, high);
    }
    Store(out + offset, values);
  }

  __device__ void End(int64_t, const StreamPlan&) {}
};

template <class Format, class Out, int kVector>
__global__ void __launch_bounds__(kBlockSize)
    DequantizeKernel(StreamPlan plan, const uint8_t* __restrict__ data, const float* __restrict__ scale_inv,
                     int64_t scale_stride, Out* __restrict__ out) {
  Stream<kVector>(plan, data, DequantizeBody<Format, Out>{scale_inv, scale_stride, out});
}

template <class Format, class Out, int kVector>
cudaError_t Run(const DequantizeParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const StreamPlan plan = MakeStreamPlan(params.groups, params.size, kVector, multiprocessors);
  return Launch(DequantizeKernel<Format, Out, kVector>, plan.Blocks(), kBlockSize, stream, plan,
                static_cast<const uint8_t*>(params.data), params.scale_inv, params.scale_stride,
                static_cast<Out*>(params.out));
}

}  // namespace

cudaError_t LaunchDequantize(const DequantizeParams& params, cudaStream_t stream) {
  if (params.groups == 0 || params.size == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchFp8(params.format, [&](auto format) {
    DispatchHighPrecision(params.dtype, [&](auto out) {
      using Format = typename decltype(format)::type;
      using Out = typename decltype(out)::type;
      constexpr int kVector = 16 / sizeof(Out);
      const bool wide = IsAligned(params.data, kVector) && IsAligned(params.out, 16) &&
                        (params.groups == 1 || params.size % kVector == 0);
      status = wide ? Run<Format, Out, kVector>(params, stream) : Run<Format, Out, 1>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
