// The quantize_blocks_transpose launcher.
//
// A panel of x that has whole blocks is read once: amaxes, scales and codes, band by band. Where blocks are longer than
// a panel, all panels raise the amaxes of their blocks first, and x is read again.
#include "cpu/kernels/quantize_blocks_transpose.h"

#include <algorithm>
#include <vector>

#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/prefetch.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {
namespace {

using Params = QuantizeBlocksTransposeParams;
using Chunk = PanelChunks::Chunk;

// Blocks of x with a scale each, and where their codes and scales go: to a layout, or to both where blocks are square.
struct Pass {
  int64_t height, width;        // of a block, in rows and columns of x
  int64_t down, across;         // how many blocks there are
  void *data, *scale_inv;       // or null
  void *data_t, *scale_inv_t;   // or null
  bool is_long;                 // blocks do not lie in one panel each
  std::vector<float> amaxes{};  // [groups, down, across] of those
};

// A panel of whole blocks where there can be one.
struct PanelSize {
  PanelSize(const Params& params, int64_t height, int64_t width)
      : rows(PanelChunks::kRows), columns(PanelChunks::kColumns) {
    if (params.data_t != nullptr) return;  // which wants whole lines of its own
    if (height <= rows) rows -= rows % height;
    if (width <= columns) columns -= columns % width;
    if (params.m > 1) return;
    rows = 1;
    constexpr int64_t kRowColumns = PanelChunks::kRows * PanelChunks::kColumns;
    columns = kRowColumns - (width <= kRowColumns ? kRowColumns % width : 0);
  }

  bool Has(const Params& params, int64_t height, int64_t width) const {
    return (rows >= params.m || rows % height == 0) && (columns >= params.n || columns % width == 0);
  }

  int64_t rows, columns;
};

// Calls visit(band, row, column) for the bands of a panel, which begin there.
template <class Visitor>
void ForEachBand(const Params& params, const Pass& pass, const Chunk& chunk, const Visitor& visit) {
  constexpr int64_t kColumns = BlockBand::kColumns;
  const int64_t most = pass.width < kColumns ? kColumns - kColumns % pass.width : pass.width;
  const int64_t element = ByteWidth(params.dtype), stride = params.n * element;
  const auto* x = static_cast<const char*>(params.x) + chunk.group * params.m * stride;
  const auto* panel = x + chunk.row_begin * stride + chunk.column_begin * element;
  const int64_t rows = chunk.row_end - chunk.row_begin;
  BlockBand band;
  band.n = params.n;
  band.width = pass.width;
  for (int64_t row = chunk.row_begin; row < chunk.row_end; row += band.rows) {
    band.rows = std::min(chunk.row_end - row, pass.height - row % pass.height);
    // A single row is long.
    for (int64_t r = row; r < row + band.rows && rows > 1; ++r) {
      PrefetchAhead(panel, stride, (chunk.column_end - chunk.column_begin) * element, rows, r - chunk.row_begin);
    }
    for (int64_t column = chunk.column_begin; column < chunk.column_end; column += band.columns) {
      band.columns = std::min(chunk.column_end - column, most);
      band.first = pass.width - column % pass.width;
      band.x = x + row * stride + column * element;
      visit(band, row, column);
    }
  }
}

// Raises the amaxes of blocks that do not lie in one panel each.
void RaiseAmaxes(const Params& params, const Chunk& chunk, Pass* pass) {
  ForEachBand(params, *pass, chunk, [&](const BlockBand& band, int64_t row, int64_t column) {
    uint32_t amaxes[BlockBand::kColumns];
    Kernels().band_amaxes[HighPrecisionIndex(params.dtype)](band, amaxes);
    const int64_t first = column / pass->width, last = (column + band.columns - 1) / pass->width;
    float* cells = &pass->amaxes[(chunk.group * pass->down + row / pass->height) * pass->across + first];
    for (int64_t k = 0; k <= last - first; ++k) RaiseAmax(&cells[k], std::min(amaxes[k], kInfBits));
  });
}

// Writes scales `stride` apart.
void WriteScales(BlockScaling scaling, const uint32_t* scales, int64_t count, int64_t stride, int64_t place, void* to) {
  if (to == nullptr) return;
  for (int64_t k = 0; k < count; ++k, place += stride) {
    if (IsE8M0(scaling)) {
      static_cast<uint8_t*>(to)[place] = static_cast<uint8_t>(scales[k]);
    } else {
      static_cast<uint32_t*>(to)[place] = scales[k];
    }
  }
}

void QuantizePanel(const Params& params, const Pass& pass, const Chunk& chunk, Store store) {
  alignas(64) uint8_t codes[Panel::kCodes];
  const int dtype = HighPrecisionIndex(params.dtype);
  ForEachBand(params, pass, chunk, [&](const BlockBand& band, int64_t row, int64_t column) {
    const int64_t i = row / pass.height, j = column / pass.width;
    const int64_t count = (column + band.columns - 1) / pass.width - j + 1;
    const int64_t group = chunk.group * pass.down * pass.across;
    uint32_t amaxes[BlockBand::kColumns], scales[BlockBand::kColumns];
    if (pass.is_long) {
      memcpy(amaxes, &pass.amaxes[group + i * pass.across + j], count * sizeof(float));
    } else {
      Kernels().band_amaxes[dtype](band, amaxes);
    }
    uint8_t* band_codes = codes + (row - chunk.row_begin) * Panel::kStride + column - chunk.column_begin;
    Kernels().quantize_band[dtype][Fp8Index(params.format)](band, params.scaling, amaxes, scales, band_codes,
                                                            Panel::kStride);
    // The panel with the first element of a block writes its scale.
    const int64_t skip = column % pass.width == 0 ? 0 : 1;
    if (row % pass.height != 0) return;
    WriteScales(params.scaling, scales + skip, count - skip, 1, group + i * pass.across + j + skip, pass.scale_inv);
    WriteScales(params.scaling, scales + skip, count - skip, pass.down, group + (j + skip) * pass.down + i,
                pass.scale_inv_t);
  });
  const int64_t matrix = chunk.group * params.m * params.n;
  Panel panel = {};
  panel.rows = chunk.row_end - chunk.row_begin;
  panel.columns = chunk.column_end - chunk.column_begin;
  panel.m = params.m;
  panel.n = params.n;
  if (pass.data != nullptr) {
    panel.data = static_cast<uint8_t*>(pass.data) + matrix + chunk.row_begin * params.n + chunk.column_begin;
  }
  if (pass.data_t != nullptr) {
    panel.data_t = static_cast<uint8_t*>(pass.data_t) + matrix + chunk.column_begin * params.m + chunk.row_begin;
  }
  Kernels().write_codes(codes, panel, store);
}

int64_t BlockSize(int64_t block, int64_t size) { return block == 0 || block > size ? size : block; }

}  // namespace

void QuantizeBlocksTranspose(TaskPool& pool, const QuantizeBlocksTransposeParams& given) {
  Params params = given;
  const int64_t size = params.groups * params.m * params.n;
  if (size == 0) return;
  const bool transposes = params.data_t != nullptr, is_square = params.block_rows == params.block_columns;
  int64_t height = BlockSize(params.block_rows, params.m), width = BlockSize(params.block_columns, params.n);
  if (!transposes && height == 1 && params.n % width == 0) {  // whole blocks follow each other from row to row
    params.n = size;
    params.groups = params.m = 1;
  }
  const PanelSize panel(params, height, width);
  std::vector<Pass> passes;
  const auto add = [&](int64_t height, int64_t width, bool direct, bool transposed) {
    passes.push_back({height, width, CeilDiv(params.m, height), CeilDiv(params.n, width),
                      direct ? params.data : nullptr, direct ? params.scale_inv : nullptr,
                      transposed ? params.data_t : nullptr, transposed ? params.scale_inv_t : nullptr,
                      !panel.Has(params, height, width)});
  };
  add(height, width, true, is_square);
  if (transposes && !is_square) {
    add(BlockSize(params.block_columns, params.m), BlockSize(params.block_rows, params.n), false, true);
  }

  const PanelChunks chunks(params.groups, params.m, params.n, panel.rows, panel.columns);
  bool any_long = false;
  for (Pass& pass : passes) {
    any_long |= pass.is_long;
    if (pass.is_long) pass.amaxes.assign(params.groups * pass.down * pass.across, 0.0f);
  }
  if (any_long) {
    ParallelFor(pool, chunks.count(), [&](int64_t index) {
      const ScopedIeee ieee;
      for (Pass& pass : passes) {
        if (pass.is_long) RaiseAmaxes(params, chunks.At(index), &pass);
      }
    });
  }
  const Store store = StoreFor(size, transposes ? kStreamedTranspose : kStreamedSpan);
  PrepareResult(params.data, size);
  if (transposes) PrepareResult(params.data_t, size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    for (const Pass& pass : passes) QuantizePanel(params, pass, chunks.At(index), store);
  });
}

}  // namespace jaxfp8::cpu
