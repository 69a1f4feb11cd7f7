// quantize_norm: tiles of rows that are shifted and scaled, each by numbers of its own, and then by those of its columns.
//
// The statistics of a row are known only after all of it was read, and a line of data_t takes 128 rows: no multiprocessor
// holds as much. So whoever computes x computes them as well, where its rows are at hand.
#include "cuda/kernels/quantize_norm.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/tile_kernel.h"

namespace jaxfp8::cuda {
namespace {

template <class T, bool kHasMean>
struct Normalized {
  using In = T;
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr bool kQuantizesInput = false;
  static constexpr bool kSumsColumns = false;
  static constexpr int kParts = 1;
  static constexpr int kBlocks = kTileBlocks;
  struct Columns {
    float gamma[kVector];
    float beta[kHasMean ? kVector : 1];
  };
  struct Row {
    Bytes<16> x;
    float rstd;
    float mean;
  };

  const In* x;
  const float* statistics;
  const float* gamma;
  const float* beta;
  int64_t parameter_stride;

  template <Access kAccess>
  __device__ __forceinline__ Columns LoadColumns(const MatrixShare<In, kAccess>& share) const {
    const int64_t first = share.group * parameter_stride + share.column;
    Columns columns;
    LoadParameter<kAccess>(gamma + first, share.columns, columns.gamma);
    if constexpr (kHasMean) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) columns.beta[i] = -0.0f;  // adding it changes nothing, not even a zero
      if (beta != nullptr) LoadParameter<kAccess>(beta + first, share.columns, columns.beta);
    }
    return columns;
  }
  template <Access kAccess>
  __device__ __forceinline__ Row Load(const MatrixShare<In, kAccess>& share, int r) const {
    constexpr int kCount = kHasMean ? 2 : 1;
    const Bytes<4 * kCount> of_row = cuda::Load<4 * kCount>(statistics + (share.row + share.RowInside(r)) * kCount);
    return {share.Load(x, r), BitsToFloat(of_row.words[0]), kHasMean ? BitsToFloat(of_row.words[kCount - 1]) : 0.0f};
  }
  __device__ __forceinline__ void Values(const Columns& columns, const Row& row, float (&values)[kVector]) const {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float x_i = Widen<In>(row.x.words, i);
      const float factor = __fmul_rn(row.rstd, columns.gamma[i]);
      values[i] = kHasMean ? __fmaf_rn(__fsub_rn(x_i, row.mean), factor, columns.beta[i]) : __fmul_rn(x_i, factor);
    }
  }

 private:
  // Single columns outside of the matrix have zeros, so that values there are 0, or not finite as the rest of the row.
  template <Access kAccess>
  __device__ __forceinline__ static void LoadParameter(const float* parameter, int valid, float (&out)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; i += 4) {
      Bytes<16> four;
      if constexpr (kAccess == Access::kElements) {
        four = LoadElements<4>(parameter + i, valid - i);
      } else {
        four = cuda::Load<16>(parameter + i);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) out[i + j] = BitsToFloat(four.words[j]);
    }
  }
};

}  // namespace

cudaError_t LaunchQuantizeNorm(const QuantizeNormParams& params, cudaStream_t stream) {
  const bool aligned = IsAligned(params.gamma, 16) && IsAligned(params.beta, 16);
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    using In = typename decltype(in)::type;
    const auto launch = [&](auto has_mean) {
      const Normalized<In, decltype(has_mean)::value> producer = {
          static_cast<const In*>(params.x), params.statistics, params.gamma, params.beta, params.parameter_stride};
      return LaunchTiles(params, producer, aligned, stream);
    };
    status = params.has_mean ? launch(std::true_type{}) : launch(std::false_type{});
  });
  return status;
}

}  // namespace jaxfp8::cuda
