// quantize_norm: statistics, normalised values and the codes of both layouts from one read of x.
//
// No code of a row is known before all of the row has been read. So a block takes a strip of 16 whole rows, the fewest
// that make a 16-byte piece of data_t, and keeps it in shared memory as it came: 128 KiB at n = 4096 in bf16. First a
// warp takes a row, for its mean and variance; then a thread takes four columns of all rows, and their codes, transposed
// in its registers, are the pieces of data_t. A strip that does not fit is read again, from the L2 cache if that holds
// the strips of all multiprocessors.
//
// The statistics are f32 sums: 128 of n / 128 terms each, and a tree over those. The variance is that of the
// centered values, from a second look at the row.
#include "cuda/kernels/quantize_norm.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "common/scale.h"
#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/dynamic_shared.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kStripRows = 16;
constexpr int kWarps = kStripRows;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kVectorsInFlight = 8;
constexpr int kColumns = 4;  // of a thread: a word of codes in each row
// What the static variables of the kernel may take of a block's shared memory.
constexpr int64_t kStaticBytes = 1024;

// Where the second look at a row finds it.
enum class Source {
  kShared,    // in shared memory
  kGlobal,    // where it came from
  kElements,  // there, element by element: unaligned, or rows that are not whole vectors
};

// Two blocks on a multiprocessor, where the shared memory allows it, so that one reads while the other writes. That
// caps the registers at 64 a thread, which more vectors in flight or the unaligned variant would not fit.
constexpr int MinBlocks(Source source) { return source == Source::kElements ? 1 : 2; }

struct Statistics {
  float mean;  // 0 for RMSNorm
  float inverse;
};

template <class In>
struct KernelParams {
  const In* x;
  const float* scale;
  int64_t scale_stride;
  const float* gamma;
  const float* beta;
  int64_t parameter_stride;
  uint8_t* data;
  uint8_t* data_t;  // null: not wanted
  float* amax;
  int64_t groups;
  int64_t m;
  int64_t n;
  int64_t group_strips;
  float epsilon;
  bool centered;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

__device__ __forceinline__ float SumOverWarp(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    x = __fadd_rn(x, __shfl_xor_sync(0xffffffffu, x, distance));
  }
  return x;
}

// The sum over a row, by a warp: of its values, or of the squares of their distances from `center`.
class RowSum {
 public:
  template <bool kSquares>
  __device__ __forceinline__ void Add(float x, float center, int i) {
    if constexpr (kSquares) {
      const float distance = __fsub_rn(x, center);
      sums_[i % 4] = __fmaf_rn(distance, distance, sums_[i % 4]);
    } else {
      sums_[i % 4] = __fadd_rn(sums_[i % 4], x);
    }
  }
  __device__ __forceinline__ float Total() const {
    return SumOverWarp(__fadd_rn(__fadd_rn(sums_[0], sums_[1]), __fadd_rn(sums_[2], sums_[3])));
  }

 private:
  float sums_[4] = {};
};

// One look at a row in device memory; with `kKeep`, also a copy of it.
template <class In, bool kSquares, bool kKeep>
__device__ __forceinline__ float SumOfVectors(const In* row, int64_t n, float center, In* keep) {
  constexpr int kVector = 16 / sizeof(In);
  const int vectors = static_cast<int>(n) / kVector;
  RowSum sum;
  const auto add = [&](const Bytes<16>& loaded, int vector) {
    if constexpr (kKeep) StoreShared(keep + vector * kVector, loaded);
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum.Add<kSquares>(Widen<In>(loaded.words, e), center, e);
  };
  int vector = threadIdx.x % kWarpSize;
#pragma unroll 1
  for (; vector + (kVectorsInFlight - 1) * kWarpSize < vectors; vector += kVectorsInFlight * kWarpSize) {
    Bytes<16> loaded[kVectorsInFlight];
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) loaded[i] = Load<16>(row + (vector + i * kWarpSize) * kVector);
#pragma unroll
    for (int i = 0; i < kVectorsInFlight; ++i) add(loaded[i], vector + i * kWarpSize);
  }
#pragma unroll 1
  for (; vector < vectors; vector += kWarpSize) add(Load<16>(row + vector * kVector), vector);
  return sum.Total();
}

// A second look at a row that is kept: a lane reads what it wrote.
template <class In>
__device__ __forceinline__ float SumOfKeptSquares(const In* kept, int64_t n, float center) {
  constexpr int kVector = 16 / sizeof(In);
  RowSum sum;
#pragma unroll 1
  for (int vector = threadIdx.x % kWarpSize; vector < static_cast<int>(n) / kVector; vector += kWarpSize) {
    const Bytes<16> loaded = LoadShared<16>(kept + vector * kVector);
#pragma unroll
    for (int e = 0; e < kVector; ++e) sum.Add<true>(Widen<In>(loaded.words, e), center, e);
  }
  return sum.Total();
}

template <class In, bool kSquares>
__device__ __forceinline__ float SumOfElements(const In* row, int64_t n, float center) {
  RowSum sum;
  for (int64_t first = threadIdx.x % kWarpSize; first < n; first += 4 * kWarpSize) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int64_t element = first + i * kWarpSize;
      if (element >= n) continue;
      const auto loaded = Load<static_cast<int>(sizeof(In))>(row + element);
      sum.Add<kSquares>(Widen<In>(loaded.words, 0), center, i);
    }
  }
  return sum.Total();
}

template <class In, Source kSource, bool kSquares>
__device__ __forceinline__ float SumOfRow(const In* row, int64_t n, float center, In* keep) {
  if constexpr (kSource == Source::kElements) {
    return SumOfElements<In, kSquares>(row, n, center);
  } else {
    return SumOfVectors<In, kSquares, kSource == Source::kShared>(row, n, center, keep);
  }
}

// By a warp; all lanes have the result.
template <class In, Source kSource>
__device__ __forceinline__ Statistics OfRow(const KernelParams<In>& params, const In* row, In* keep) {
  const int64_t n = params.n;
  const float count = static_cast<float>(n);
  float mean = 0.0f, squares;
  if (params.centered) {
    mean = __fdiv_rn(SumOfRow<In, kSource, false>(row, n, 0.0f, keep), count);
    if constexpr (kSource == Source::kShared) {
      squares = SumOfKeptSquares(keep, n, mean);
    } else {
      squares = SumOfRow<In, kSource, true>(row, n, mean, keep);
    }
  } else {
    squares = SumOfRow<In, kSource, true>(row, n, 0.0f, keep);
  }
  return {mean, __frsqrt_rn(__fadd_rn(__fdiv_rn(squares, count), params.epsilon))};
}

// Normalises and quantizes four columns of a strip.
template <class In, class Format, Source kSource>
__device__ __forceinline__ void QuantizeColumns(const KernelParams<In>& params, int64_t group, int64_t first_row,
                                                int rows, int64_t column, const In* kept,
                                                const Statistics* statistics, const Multiplier& multiply,
                                                AmaxAccumulator& accumulator) {
  constexpr int kBytes = kColumns * static_cast<int>(sizeof(In));
  const int64_t n = params.n;
  const int valid = n - column < kColumns ? static_cast<int>(n - column) : kColumns;
  const int64_t parameters = group * params.parameter_stride + column;
  const int64_t offset = (group * params.m + first_row) * n + column;

  const auto load_parameter = [&](const float* parameter) {
    if constexpr (kSource == Source::kElements) return LoadElements<kColumns>(parameter + parameters, valid);
    return Load<16>(parameter + parameters);
  };
  const Bytes<16> gamma = load_parameter(params.gamma);
  const bool has_beta = params.beta != nullptr;
  Bytes<16> beta = {};
  if (has_beta) beta = load_parameter(params.beta);

  const auto load_row = [&](int r) -> Bytes<kBytes> {
    if constexpr (kSource == Source::kShared) {
      return LoadShared<kBytes>(kept + r * static_cast<int>(n) + static_cast<int>(column));
    } else if constexpr (kSource == Source::kGlobal) {
      return Load<kBytes>(params.x + offset + r * n);
    } else {
      return LoadElements<kColumns>(params.x + offset + r * n, valid);
    }
  };
  const auto quantize_row = [&](int r, const Bytes<kBytes>& x) {
    const Statistics row = statistics[r];
    float values[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const float centered = __fsub_rn(Widen<In>(x.words, c), row.mean);
      const float factor = __fmul_rn(row.inverse, BitsToFloat(gamma.words[c]));
      values[c] = has_beta ? __fmaf_rn(centered, factor, BitsToFloat(beta.words[c])) : __fmul_rn(centered, factor);
      accumulator.Add(values[c]);  // 0 in columns outside, where gamma and beta are 0
    }
    const Bytes<kColumns> codes = {{QuantizeFour<Format>(values[0], values[1], values[2], values[3], multiply)}};
    StoreVector<kSource == Source::kElements ? Access::kElements : Access::kWholeTile>(params.data + offset + r * n,
                                                                                      codes, valid);
    return codes.words[0];
  };

  // Four rows at a time, not unrolled: the addresses of sixteen would fill the registers.
  Bytes<kStripRows> codes_t[kColumns] = {};
#pragma unroll 1
  for (int first = 0; first < kStripRows; first += 4) {
    uint32_t columns[4] = {};
    if constexpr (kSource == Source::kElements) {
#pragma unroll 1
      for (int i = 0; i < 4 && first + i < rows; ++i) {
        const uint32_t codes = quantize_row(first + i, load_row(first + i));
#pragma unroll
        for (int c = 0; c < kColumns; ++c) columns[c] |= (codes >> (8 * c) & 0xffu) << (8 * i);
      }
    } else {
      Bytes<kBytes> x[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < rows) x[i] = load_row(first + i);
      }
      uint32_t codes[4] = {};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        if (first + i < rows) codes[i] = quantize_row(first + i, x[i]);
      }
      Transpose4x4(codes, columns);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {  // the oldest word moves to the front
      uint32_t(&words)[4] = codes_t[c].words;
      words[0] = words[1];
      words[1] = words[2];
      words[2] = words[3];
      words[3] = columns[c];
    }
  }

  if (params.data_t == nullptr) return;
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
    if (kSource == Source::kElements && c >= valid) continue;
    uint8_t* address = params.data_t + (group * n + column + c) * params.m + first_row;
    if (params.wide_columns) {
      Store(address, codes_t[c]);
    } else {
      StoreCodes(address, codes_t[c], rows);
    }
  }
}

template <class In, class Format, Source kSource>
__global__ void __launch_bounds__(kThreads, MinBlocks(kSource)) QuantizeNormKernel(KernelParams<In> params) {
  __shared__ Statistics statistics[kStripRows];
  __shared__ BlockAmax<kWarps> block_amax;
  In* const kept = reinterpret_cast<In*>(DynamicShared());
  const int warp = threadIdx.x / kWarpSize;

  for (int64_t strip = blockIdx.x; strip < params.groups * params.group_strips; strip += gridDim.x) {
    const int64_t group = strip / params.group_strips;
    const int64_t first_row = (strip - group * params.group_strips) * kStripRows;
    const int64_t left = params.m - first_row;
    const int rows = left < kStripRows ? static_cast<int>(left) : kStripRows;

    if (warp < rows) {
      const In* row = params.x + (group * params.m + first_row + warp) * params.n;
      const Statistics of_row = OfRow<In, kSource>(params, row, kept + warp * params.n);
      if (threadIdx.x % kWarpSize == 0) statistics[warp] = of_row;
    }
    __syncthreads();

    const Multiplier multiply(params.scale[group * params.scale_stride]);
    AmaxAccumulator accumulator;
#pragma unroll 1
    for (int64_t column = int64_t{threadIdx.x} * kColumns; column < params.n; column += kThreads * kColumns) {
      QuantizeColumns<In, Format, kSource>(params, group, first_row, rows, column, kept, statistics, multiply,
                                           accumulator);
    }
    block_amax.Put(accumulator.OverWarp());
    __syncthreads();
    block_amax.Raise(params.amax + group);  // the next Put comes after the __syncthreads() above
  }
}

template <class In, class Format, Source kSource>
cudaError_t Run(const QuantizeNormParams& params, int64_t shared_bytes, int64_t shared_limit,
                cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const int64_t group_strips = (params.m - 1) / kStripRows + 1;
  const KernelParams<In> kernel_params = {
      static_cast<const In*>(params.x),
      params.scale,
      params.scale_stride,
      params.gamma,
      params.beta,
      params.parameter_stride,
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      params.amax,
      params.groups,
      params.m,
      params.n,
      group_strips,
      params.epsilon,
      params.centered,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
  };
  // Strips that are read again should still be in the L2 cache: no more of them at a time than needed.
  const int64_t blocks_each = kSource == Source::kShared ? kBlocksPerMultiprocessor : 1;
  const int64_t max_blocks = multiprocessors * blocks_each;
  const int64_t strips = params.groups * group_strips;
  const int64_t blocks = strips < max_blocks ? strips : max_blocks;
  const auto kernel = QuantizeNormKernel<In, Format, kSource>;
  if (kSource == Source::kShared) {
    // The limit and not what this call needs: another thread may be launching a larger one.
    const int limit = static_cast<int>(shared_limit);
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, limit));
  }
  return LaunchWithShared(kernel, blocks, kThreads, shared_bytes, stream, kernel_params);
}

template <class In, class Format>
cudaError_t RunFromWhereItFits(const QuantizeNormParams& params, cudaStream_t stream) {
  constexpr int kVector = 16 / sizeof(In);
  // Within a row the vector paths count in 32 bits.
  const bool wide = params.n % kVector == 0 && params.n < (int64_t{1} << 30) && IsAligned(params.x, 16) && IsAligned(params.data, kColumns) &&
                    IsAligned(params.gamma, 16) && IsAligned(params.beta, 16);
  if (!wide) return Run<In, Format, Source::kElements>(params, 0, 0, stream);
  int64_t limit = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(SharedBytesOfBlock(&limit));
  limit -= kStaticBytes;
  const int64_t row_bytes = params.n * static_cast<int64_t>(sizeof(In));
  if (row_bytes > limit / kStripRows) return Run<In, Format, Source::kGlobal>(params, 0, 0, stream);
  return Run<In, Format, Source::kShared>(params, row_bytes * kStripRows, limit, stream);
}

}  // namespace

cudaError_t LaunchQuantizeNorm(const QuantizeNormParams& params, cudaStream_t stream) {
  JAXFP8_RETURN_IF_CUDA_ERROR(CopyUnlessAliased(params.amax, params.amax_so_far, params.groups, stream));
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      status = RunFromWhereItFits<In, Format>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
