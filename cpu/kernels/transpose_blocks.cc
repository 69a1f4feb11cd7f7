// The transpose_blocks launcher. A code that is shifted is read from a table, one for each shift.
#include "cpu/kernels/transpose_blocks.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "common/fp8_shift.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {
namespace {

// The codes of each shift; every number is 0 from kLast on. Then those of a block whose scale is NaN.
template <class Format>
struct Shifted {
  static constexpr uint32_t kLast = (1u << (7 - Format::kMantissaBits)) + Format::kMantissaBits, kNan = kLast + 1;

  Shifted() {
    for (uint32_t shift = 0; shift <= kLast; ++shift) {
      for (uint32_t code = 0; code < 256; ++code) codes[shift][code] = ShiftDown<Format>(code, shift);
    }
    memset(codes[kNan], Format::kNanCode, 256);
  }

  // By how much codes with a scale are shifted for blocks with the scale `largest`, which is not less.
  static uint32_t Row(uint32_t largest, uint32_t scale) {
    return largest == kNanScaleCode ? kNan : std::min(largest - scale, kLast);
  }

  uint8_t codes[kNan + 1][256];
};

// Eight codes a load and a store: one each would be what the loop waits for.
void LookUp(const uint8_t* table, const uint8_t* in, uint8_t* out, int64_t size) {
  int64_t i = 0;
  for (; i + 8 <= size; i += 8) {
    uint64_t codes, shifted = 0;
    memcpy(&codes, in + i, sizeof(codes));
    for (int bit = 0; bit < 64; bit += 8) shifted |= uint64_t{table[codes >> bit & 0xff]} << bit;
    memcpy(out + i, &shifted, sizeof(shifted));
  }
  for (; i < size; ++i) out[i] = table[in[i]];
}

// The scales of the new blocks, one for all columns of an old one: [groups, blocks along n, blocks along m].
std::vector<uint8_t> LargestScales(TaskPool& pool, const TransposeBlocksParams& params, int64_t down, int64_t across) {
  std::vector<uint8_t> largest(params.groups * across * down);
  ParallelFor(pool, params.groups * down, [&](int64_t index) {
    const int64_t group = index / down, i = index % down;
    const uint8_t* scales = params.scale_inv + group * params.m * across;
    const int64_t end = std::min(params.m, (i + 1) * params.block);
    for (int64_t row = i * params.block; row < end; ++row) {
      for (int64_t j = 0; j < across; ++j) {
        uint8_t& scale = largest[(group * across + j) * down + i];
        scale = std::max(scale, scales[row * across + j]);
      }
    }
  });
  return largest;
}

template <class Format>
void TransposePanel(const TransposeBlocksParams& params, const PanelChunks::Chunk& chunk, const uint8_t* largest,
                    int64_t down, int64_t across, Store store) {
  static const Shifted<Format> shifted;
  alignas(64) uint8_t codes[Panel::kCodes];
  const int64_t m = params.m, n = params.n, block = params.block;
  largest += chunk.group * across * down;
  // 1. Shift the codes of each row, block by block.
  for (int64_t row = chunk.row_begin; row < chunk.row_end; ++row) {
    const uint8_t* in = params.data + (chunk.group * m + row) * n;
    const uint8_t* scales = params.scale_inv + (chunk.group * m + row) * across;
    uint8_t* out = codes + (row - chunk.row_begin) * Panel::kStride;
    PrefetchAhead(params.data + (chunk.group * m + chunk.row_begin) * n + chunk.column_begin, n,
                  chunk.column_end - chunk.column_begin, chunk.row_end - chunk.row_begin, row - chunk.row_begin);
    for (int64_t column = chunk.column_begin; column < chunk.column_end;) {
      const int64_t j = column / block, end = std::min(chunk.column_end, (j + 1) * block);
      const uint32_t shift = Shifted<Format>::Row(largest[j * down + row / block], scales[j]);
      const uint8_t* table = shifted.codes[shift];
      if (shift == 0) {
        memcpy(out, in + column, end - column);
      } else {
        LookUp(table, in + column, out, end - column);
      }
      out += end - column;
      column = end;
    }
  }
  // 2. Transpose them.
  Panel panel = {};
  panel.data_t = params.data_t + (chunk.group * n + chunk.column_begin) * m + chunk.row_begin;
  panel.rows = chunk.row_end - chunk.row_begin;
  panel.columns = chunk.column_end - chunk.column_begin;
  panel.m = m;
  panel.n = n;
  Kernels().write_codes(codes, panel, store);
  // 3. The panels at the top write the scales of their columns.
  if (chunk.row_begin != 0) return;
  for (int64_t column = chunk.column_begin; column < chunk.column_end; ++column) {
    memcpy(params.scale_inv_t + (chunk.group * n + column) * down, largest + column / block * down, down);
  }
}

}  // namespace

void TransposeBlocks(TaskPool& pool, const TransposeBlocksParams& given) {
  TransposeBlocksParams params = given;
  const int64_t size = params.groups * params.m * params.n;
  if (size == 0) return;
  params.block = std::min(params.block, std::max(params.m, params.n));  // products with it do not overflow
  const int64_t down = CeilDiv(params.m, params.block), across = CeilDiv(params.n, params.block);
  const std::vector<uint8_t> largest = LargestScales(pool, params, down, across);
  const Store store = StoreFor(size, kStreamedTranspose);
  PrepareResult(params.data_t, size);
  const PanelChunks chunks(params.groups, params.m, params.n);
  DispatchFp8(params.format, [&](auto format) {
    using Format = typename decltype(format)::type;
    ParallelFor(pool, chunks.count(), [&](int64_t index) {
      TransposePanel<Format>(params, chunks.At(index), largest.data(), down, across, store);
    });
  });
}

}  // namespace jaxfp8::cpu
