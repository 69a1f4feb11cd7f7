// quantize_transpose: one read of x, and both layouts of the codes written as whole lines.
//
// A block takes tiles of 128 x 128. A thread loads one 16-byte vector of 8 rows (all in flight at once), stores the
// codes as they are, transposes them in registers by byte permutes, and passes 8 codes of each of its columns through
// shared memory to the threads that store data_t, 16 bytes a lane. Shared memory holds codes, not x: 16 KiB a block.
#include "cuda/kernels/quantize_transpose.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/transpose_plan.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kRows = 8;  // rows a thread holds
// Blocks on a multiprocessor, which caps the registers. Four leave 64 a thread, without spills: 1024 threads with 128
// bytes each in flight. The unaligned variant needs more for its addresses.
constexpr int MinBlocks(bool wide_rows) { return wide_rows ? 4 : 2; }

// How a thread reaches the rows of x and data. Vectors need aligned pointers and rows of whole vectors.
enum class Access {
  kWholeTile,  // vectors, all of them inside the matrix: loads without predicates stay in one batch
  kEdgeTile,   // vectors, some of them outside
  kElements,   // element by element
};
template <Access kAccess>
using AccessTag = std::integral_constant<Access, kAccess>;

template <class In>
struct KernelParams {
  TransposePlan plan;
  const In* x;
  const float* scale;
  int64_t scale_stride;
  uint8_t* data;
  uint8_t* data_t;
  float* amax;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// Four words of four codes, as a 4 x 4 matrix of bytes.
__device__ __forceinline__ void Transpose4x4(const uint32_t (&rows)[4], uint32_t (&columns)[4]) {
  const uint32_t low01 = __byte_perm(rows[0], rows[1], 0x5140);
  const uint32_t low23 = __byte_perm(rows[2], rows[3], 0x5140);
  const uint32_t high01 = __byte_perm(rows[0], rows[1], 0x7362);
  const uint32_t high23 = __byte_perm(rows[2], rows[3], 0x7362);
  columns[0] = __byte_perm(low01, low23, 0x5410);
  columns[1] = __byte_perm(low01, low23, 0x7632);
  columns[2] = __byte_perm(high01, high23, 0x5410);
  columns[3] = __byte_perm(high01, high23, 0x7632);
}

// Up to kCount elements at `x`; those at or beyond `valid` are zero, which changes no amax.
template <int kCount, class In>
__device__ __forceinline__ Bytes<16> LoadElements(const In* x, int valid) {
  Bytes<16> out = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    if (i < valid) {
      constexpr int kPerWord = 4 / sizeof(In);
      const uint32_t bits = Load<static_cast<int>(sizeof(In))>(x + i).words[0];
      out.words[i / kPerWord] |= bits << (32 / kPerWord * (i % kPerWord));
    }
  }
  return out;
}

template <int kBytes>
__device__ __forceinline__ void StoreCodes(uint8_t* address, const Bytes<kBytes>& codes, int valid) {
#pragma unroll
  for (int i = 0; i < kBytes; ++i) {
    if (i < valid) address[i] = static_cast<uint8_t>(codes.words[i / 4] >> (8 * (i % 4)));
  }
}

// Quantizes this thread's 8 rows of one vector of columns: stores the codes to data, and their transpose to `tile_t`.
template <class In, class Format, Access kAccess>
__device__ __forceinline__ void QuantizeRows(const KernelParams<In>& params, const Tile& tile, int column_group,
                                             int row_group, const Multiplier& multiply, AmaxAccumulator& accumulator,
                                             uint8_t* tile_t) {
  constexpr int kVector = 16 / sizeof(In);
  const int first_row = row_group * kRows;
  const int first_column = column_group * kVector;
  const int valid_columns = tile.columns - first_column;
  const int64_t n = params.plan.n;
  const int64_t offset = (tile.group * params.plan.m + tile.row + first_row) * n + tile.column + first_column;

  Bytes<16> x[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    const In* address = params.x + offset + r * n;
    const int valid = first_row + r < tile.rows ? valid_columns : 0;
    if constexpr (kAccess == Access::kWholeTile) {
      x[r] = Load<16>(address);
    } else if constexpr (kAccess == Access::kEdgeTile) {
      x[r] = {};
      if (valid > 0) x[r] = Load<16>(address);
    } else {
      x[r] = LoadElements<kVector>(address, valid);
    }
  }

  Bytes<kVector> codes[kRows];
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
#pragma unroll
    for (int w = 0; w < kVector / 4; ++w) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = Widen<In>(x[r].words, 4 * w + i);
        accumulator.Add(values[i]);
      }
      codes[r].words[w] = QuantizeFour<Format>(values[0], values[1], values[2], values[3], multiply);
    }
    uint8_t* address = params.data + offset + r * n;
    const int valid = first_row + r < tile.rows ? valid_columns : 0;
    if constexpr (kAccess == Access::kElements) {
      StoreCodes(address, codes[r], valid);
    } else if (kAccess == Access::kWholeTile || valid > 0) {
      Store(address, codes[r]);
    }
  }

#pragma unroll
  for (int w = 0; w < kVector / 4; ++w) {
    const uint32_t top[4] = {codes[0].words[w], codes[1].words[w], codes[2].words[w], codes[3].words[w]};
    const uint32_t bottom[4] = {codes[4].words[w], codes[5].words[w], codes[6].words[w], codes[7].words[w]};
    uint32_t top_t[4], bottom_t[4];
    Transpose4x4(top, top_t);
    Transpose4x4(bottom, bottom_t);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = first_column + 4 * w + i;
      uint8_t* slot = tile_t + SlotOffset(column, row_group, SwizzleKey(column_group));
      *reinterpret_cast<uint2*>(slot) = make_uint2(top_t[i], bottom_t[i]);
    }
  }
}

// Stores 16 rows of one column of the tile.
template <int kVector, class In>
__device__ __forceinline__ void StoreColumn(const KernelParams<In>& params, const Tile& tile, int column, int pair,
                                            const uint8_t* tile_t) {
  const int first_row = pair * 16;
  if (column >= tile.columns || first_row >= tile.rows) return;
  const int key = SwizzleKey(column / kVector);
  const uint4 read = *reinterpret_cast<const uint4*>(tile_t + PairOffset(column, pair, key));
  const bool swapped = PairIsSwapped(key);
  const Bytes<16> codes = {{swapped ? read.z : read.x, swapped ? read.w : read.y,  //
                            swapped ? read.x : read.z, swapped ? read.y : read.w}};
  const int64_t m = params.plan.m;
  uint8_t* address = params.data_t + (tile.group * params.plan.n + tile.column + column) * m + tile.row + first_row;
  if (params.wide_columns) {
    Store(address, codes);
  } else {
    StoreCodes(address, codes, tile.rows - first_row);
  }
}

template <class In, class Format, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(kWideRows))
    QuantizeTransposeKernel(KernelParams<In> params) {
  constexpr int kVector = 16 / sizeof(In);
  constexpr int kColumnGroups = kTileSide / kVector;
  constexpr int kRowGroups = kTileSide / kRows;
  constexpr int kRowGroupsAtOnce = kBlockSize / kColumnGroups;
  constexpr int kPairs = kTileSide / 16;
  static_assert(kColumnGroups % 16 == 0 && kRowGroups == 16, "the swizzle assumes half-warps along a row");

  alignas(16) __shared__ uint8_t tile_t[kTileSide * kTileSide];
  __shared__ BlockAmax block_amax;
  const int column_group = threadIdx.x % kColumnGroups;

  for (int64_t index = blockIdx.x; index < params.plan.tiles; index += gridDim.x) {
    const Tile tile = params.plan.At(index);
    const Multiplier multiply(params.scale[tile.group * params.scale_stride]);
    AmaxAccumulator accumulator;
#pragma unroll 1
    for (int first = 0; first < kRowGroups; first += kRowGroupsAtOnce) {
      const int row_group = first + threadIdx.x / kColumnGroups;
      const auto quantize_rows = [&](auto access) {
        QuantizeRows<In, Format, decltype(access)::value>(params, tile, column_group, row_group, multiply, accumulator,
                                                          tile_t);
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
#pragma unroll
    for (int i = 0; i < kTileSide * kPairs; i += kBlockSize) {
      const int piece = i + threadIdx.x;
      StoreColumn<kVector>(params, tile, piece / kPairs, piece % kPairs, tile_t);
    }
    __syncthreads();
  }
}

template <class In, class Format, bool kWideRows>
cudaError_t Run(const QuantizeTransposeParams& params, cudaStream_t stream) {
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
  return Launch(QuantizeTransposeKernel<In, Format, kWideRows>, blocks, kBlockSize, stream, kernel_params);
}

}  // namespace

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream) {
  if (params.groups == 0) return cudaSuccess;
  JAXFP8_RETURN_IF_CUDA_ERROR(CopyUnlessAliased(params.amax, params.amax_so_far, params.groups, stream));
  if (params.m == 0 || params.n == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide_rows = params.n % kVector == 0 && IsAligned(params.x, 16) && IsAligned(params.data, kVector);
      status = wide_rows ? Run<In, Format, true>(params, stream) : Run<In, Format, false>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
