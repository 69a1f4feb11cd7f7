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

void QuantizeTranspose(TaskPool& pool, Dtype in, Dtype format, const void* x, Scales scales, int64_t groups, int64_t m,
                       int64_t n, uint8_t* data, uint8_t* data_t, const float* amax_so_far, float* amax,
                       float* column_sums) {
  StartAmax(amax, amax_so_far, groups);
  const int64_t width = ByteWidth(in);
  const Store store = StoreFor(groups * m * n, kStreamedTranspose);
  PrepareResult(data, groups * m * n);
  PrepareResult(data_t, groups * m * n);
  const PanelChunks chunks(groups, m, n);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const PanelChunks::Chunk chunk = chunks.At(index);
    const int64_t group_offset = chunk.group * m * n;
    const int64_t offset = group_offset + chunk.row_begin * n + chunk.column_begin;
    const int64_t offset_t = group_offset + chunk.column_begin * m + chunk.row_begin;
    Panel panel;
    panel.x = static_cast<const char*>(x) + offset * width;
    panel.data = data + offset;
    panel.data_t = data_t + offset_t;
    panel.rows = chunk.row_end - chunk.row_begin;
    panel.columns = chunk.column_end - chunk.column_begin;
    panel.m = m;
    panel.n = n;
    const float scale = scales[chunk.group];
    const auto kernel = KernelsForQuantize(scale).quantize_transpose[HighPrecisionIndex(in)][Fp8Index(format)];
    const uint32_t bits = kernel(panel, scale, store);
    if (amax != nullptr) RaiseAmax(&amax[chunk.group], bits);
    if (column_sums != nullptr) {
      const int64_t part = chunk.group * ColumnSumParts(m) + chunk.row_begin / kColumnSumRows;
      Kernels().column_sums[HighPrecisionIndex(in)](panel, column_sums + part * n + chunk.column_begin);
    }
  });
}

}  // namespace jaxfp8::cpu
