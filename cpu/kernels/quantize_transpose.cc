// The quantize_transpose launcher.
#include "cpu/kernels/quantize_transpose.h"

#include "common/column_sums.h"
#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {

static_assert(PanelChunks::kRows == kColumnSumRows, "a panel is a part of the sums");

void QuantizeTranspose(TaskPool& pool, const QuantizeTransposeParams& params) {
  StartAmax(params.amax, params.amax_so_far, AmaxCount(params.amax_stride, params.groups));
  const int64_t m = params.m, n = params.n;
  const int64_t width = ByteWidth(params.dtype);
  const int64_t bytes = params.groups * m * n;
  const Store store = StoreFor(bytes, kStreamedTranspose);
  PrepareResult(params.data, bytes);
  PrepareResult(params.data_t, bytes);
  const PanelChunks chunks(params.groups, m, n);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const PanelChunks::Chunk chunk = chunks.At(index);
    const int64_t group_offset = chunk.group * m * n;
    const int64_t offset = group_offset + chunk.row_begin * n + chunk.column_begin;
    const int64_t offset_t = group_offset + chunk.column_begin * m + chunk.row_begin;
    Panel panel;
    panel.x = static_cast<const char*>(params.x) + offset * width;
    panel.data = static_cast<uint8_t*>(params.data) + offset;
    panel.data_t = static_cast<uint8_t*>(params.data_t) + offset_t;
    panel.rows = chunk.row_end - chunk.row_begin;
    panel.columns = chunk.column_end - chunk.column_begin;
    panel.m = m;
    panel.n = n;
    const float scale = params.scale[chunk.group * params.scale_stride];
    const int dtype = HighPrecisionIndex(params.dtype);
    const auto kernel = KernelsForQuantize(scale).quantize_transpose[dtype][Fp8Index(params.format)];
    const uint32_t bits = kernel(panel, scale, store);
    if (params.amax != nullptr) RaiseAmax(&params.amax[chunk.group * params.amax_stride], bits);
    if (params.column_sums != nullptr) {
      const int64_t part = chunk.group * ColumnSumParts(m) + chunk.row_begin / kColumnSumRows;
      Kernels().column_sums[dtype](panel, params.column_sums + part * n + chunk.column_begin);
    }
  });
}

}  // namespace jaxfp8::cpu
