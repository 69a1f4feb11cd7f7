// quantize_activation: the activation in registers between one read of x and the codes.
//
// The tiles, and data_t by way of shared memory, are those of quantize_transpose (common/transpose_tile.h). A gated
// activation reads two vectors for one of codes, so a thread takes its 8 rows in two batches of four: 8 loads in flight
// either way.
#include "cuda/kernels/quantize_activation.h"

#include <cuda_runtime.h>

#include "cuda/common/activation.h"
#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {
namespace {

// Blocks on a multiprocessor, which caps the registers: at 64 a thread, 1024 threads have 128 bytes each in flight. For
// f32 those are too few on sm_89.
template <class In>
constexpr int kMinBlocks = sizeof(In) == 4 ? 3 : 4;

template <class In>
struct KernelParams {
  TransposePlan plan;
  const In* x;
  const float* scale;
  int64_t scale_stride;
  uint8_t* data;
  uint8_t* data_t;  // null: not wanted
  float* amax;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// The codes of one vector of h = activation(x).
template <class In, class Format, class Activate>
__device__ __forceinline__ Bytes<16 / sizeof(In)> Codes(const Bytes<16> (&x)[Activate::kInputs],
                                                        const Multiplier& multiply, AmaxAccumulator& accumulator) {
  constexpr int kVector = 16 / sizeof(In);
  Bytes<kVector> codes;
#pragma unroll
  for (int w = 0; w < kVector / 4; ++w) {
    float values[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float inputs[Activate::kInputs];
#pragma unroll
      for (int k = 0; k < Activate::kInputs; ++k) inputs[k] = Widen<In>(x[k].words, 4 * w + i);
      values[i] = Activate::Of(inputs);
      accumulator.Add(values[i]);
    }
    codes.words[w] = QuantizeFour<Format>(values[0], values[1], values[2], values[3], multiply);
  }
  return codes;
}

// Quantizes a thread's share: stores the codes to data, and their transpose to `tile_t`.
template <class In, class Format, class Activate, Access kAccess>
__device__ __forceinline__ void QuantizeRows(const KernelParams<In>& params, const Tile& tile,
                                             const TileShare<16 / sizeof(In)>& share, const Multiplier& multiply,
                                             AmaxAccumulator& accumulator, uint8_t* tile_t) {
  constexpr int kVector = 16 / sizeof(In);
  constexpr int kInputs = Activate::kInputs;
  const int64_t n = params.plan.n;
  const int64_t first_row = tile.group * params.plan.m + tile.row + share.FirstRow();
  const int64_t column = tile.column + share.FirstColumn();

  const auto load_row = [&](int r, Bytes<16>(&x)[kInputs]) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      x[k] = LoadVector<kAccess>(params.x + ((first_row + r) * kInputs + k) * n + column, share.Valid(tile, r));
    }
  };
  const auto quantize_row = [&](int r, const Bytes<16>(&x)[kInputs]) {
    const Bytes<kVector> codes = Codes<In, Format, Activate>(x, multiply, accumulator);
    StoreVector<kAccess>(params.data + (first_row + r) * n + column, codes, share.Valid(tile, r));
    return codes;
  };

  if constexpr (kAccess == Access::kElements) {
#pragma unroll 1
    for (int r = 0; r < kRows; ++r) {
      Bytes<16> x[kInputs];
      load_row(r, x);
      const Bytes<kVector> codes = quantize_row(r, x);
      if (params.data_t != nullptr) PutRowTransposed(share, r, codes, tile_t);
    }
  } else {
    constexpr int kBatch = kRows / kInputs;
    Bytes<kVector> codes[kRows];
#pragma unroll
    for (int first = 0; first < kRows; first += kBatch) {
      Bytes<16> x[kBatch][kInputs];
#pragma unroll
      for (int r = 0; r < kBatch; ++r) load_row(first + r, x[r]);
#pragma unroll
      for (int r = 0; r < kBatch; ++r) codes[first + r] = quantize_row(first + r, x[r]);
    }
    if (params.data_t != nullptr) PutTransposed(share, codes, tile_t);
  }
}

template <class In, class Format, class Activate, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, kMinBlocks<In>)
    QuantizeActivationKernel(KernelParams<In> params) {
  using Share = TileShare<16 / sizeof(In)>;
  alignas(16) __shared__ uint8_t tile_t[kTileSide * kTileSide];
  __shared__ BlockAmax<kWarpsPerBlock> block_amax;

  for (int64_t index = blockIdx.x; index < params.plan.tiles; index += gridDim.x) {
    const Tile tile = params.plan.At(index);
    const Multiplier multiply(params.scale[tile.group * params.scale_stride]);
    AmaxAccumulator accumulator;
#pragma unroll 1
    for (int first = 0; first < Share::kRowGroups; first += Share::kRowGroupsAtOnce) {
      const Share share = {static_cast<int>(threadIdx.x % Share::kColumnGroups),
                           first + static_cast<int>(threadIdx.x / Share::kColumnGroups)};
      const auto quantize_rows = [&](auto access) {
        QuantizeRows<In, Format, Activate, decltype(access)::value>(params, tile, share, multiply, accumulator, tile_t);
      };
      if constexpr (!kWideRows) {
        quantize_rows(AccessTag<Access::kElements>{});
      } else if (tile.IsWhole()) {
        quantize_rows(AccessTag<Access::kWholeTile>{});
      } else {
        quantize_rows(AccessTag<Access::kEdgeTile>{});
      }
    }
    block_amax.Put(accumulator.OverWarp());
    __syncthreads();
    block_amax.Raise(params.amax + tile.group);
    if (params.data_t != nullptr) {
      StoreTransposed<16 / sizeof(In)>(params.plan, tile, tile_t, params.data_t, params.wide_columns);
    }
    __syncthreads();
  }
}

template <class In, class Format, class Activate, bool kWideRows>
cudaError_t Run(const QuantizeActivationParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const KernelParams<In> kernel_params = {
      MakeTransposePlan(params.groups, params.m, params.n),
      static_cast<const In*>(params.x),
      params.scale,
      params.scale_stride,
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      params.amax,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
  };
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t blocks = kernel_params.plan.tiles < max_blocks ? kernel_params.plan.tiles : max_blocks;
  return Launch(QuantizeActivationKernel<In, Format, Activate, kWideRows>, blocks, kBlockSize, stream, kernel_params);
}

template <class Visitor>
cudaError_t Dispatch(Activation activation, Visitor&& visit) {
  switch (activation) {
    case Activation::kGelu: return visit(Plain<Gelu>{});
    case Activation::kSilu: return visit(Plain<Silu>{});
    case Activation::kRelu: return visit(Plain<Relu>{});
    case Activation::kSiluGated: return visit(Gated<Silu>{});
    case Activation::kGeluGated: return visit(Gated<Gelu>{});
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t LaunchQuantizeActivation(const QuantizeActivationParams& params, cudaStream_t stream) {
  JAXFP8_RETURN_IF_CUDA_ERROR(CopyUnlessAliased(params.amax, params.amax_so_far, params.groups, stream));
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide_rows = params.n % kVector == 0 && IsAligned(params.x, 16) && IsAligned(params.data, kVector);
      status = Dispatch(params.activation, [&](auto activate) {
        using Activate = decltype(activate);
        return wide_rows ? Run<In, Format, Activate, true>(params, stream)
                         : Run<In, Format, Activate, false>(params, stream);
      });
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
