// The launchers and the index arithmetic of cuda/, as C functions for ctypes.
#include "cuda/common/stream_plan.h"
#include "cuda/common/transpose_plan.h"
#include "cuda/kernels/amax.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/quantize.h"
#include "cuda/kernels/quantize_transpose.h"
#include "cuda/kernels/ragged_matmul.h"
#include "cuda/kernels/transpose_codes.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using jaxfp8::Dtype;

EXPORT int launch_amax(int dtype, const void* x, float* amax, int64_t groups, int64_t size) {
  return jaxfp8::cuda::LaunchAmax({static_cast<Dtype>(dtype), x, amax, groups, size}, nullptr);
}

EXPORT int launch_quantize(int dtype, int format, const void* x, const float* scale, int64_t scale_stride, void* data,
                           const float* amax_so_far, float* amax, int64_t groups, int64_t size) {
  return jaxfp8::cuda::LaunchQuantize({static_cast<Dtype>(dtype), static_cast<Dtype>(format), x, scale, scale_stride,
                                       data, amax_so_far, amax, 1, groups, size},
                                      nullptr);
}

EXPORT int launch_quantize_transpose(int dtype, int format, const void* x, const float* scale, int64_t scale_stride,
                                     void* data, void* data_t, float* amax, float* column_sums, int64_t groups,
                                     int64_t m, int64_t n) {
  const jaxfp8::TileParams params = {static_cast<Dtype>(dtype), static_cast<Dtype>(format), x, scale, scale_stride, data,
                                     data_t, nullptr, amax, 1, groups, m, n};
  return jaxfp8::cuda::LaunchQuantizeTranspose({params, column_sums}, nullptr);
}

EXPORT int launch_transpose_codes(const uint8_t* data, uint8_t* data_t, int64_t groups, int64_t m, int64_t n) {
  return jaxfp8::cuda::LaunchTransposeCodes({data, data_t, groups, m, n}, nullptr);
}

EXPORT int launch_dequantize(int format, int dtype, const void* data, const float* scale_inv, int64_t scale_stride,
                             void* out, int64_t groups, int64_t size) {
  return jaxfp8::cuda::LaunchDequantize({static_cast<Dtype>(format), static_cast<Dtype>(dtype), data, scale_inv,
                                         scale_stride, out, groups, size},
                                        nullptr);
}

EXPORT void stream_plan(int64_t groups, int64_t size, int vector, int multiprocessors, int64_t* out) {
  const jaxfp8::cuda::StreamPlan plan = jaxfp8::cuda::MakeStreamPlan(groups, size, vector, multiprocessors);
  const int64_t values[] = {plan.vectors, plan.tiles, plan.workers, plan.slots, plan.Blocks(), plan.BlockHasOneGroup()};
  for (int i = 0; i < 6; ++i) out[i] = values[i];
}

EXPORT int64_t transpose_tiles(int64_t groups, int64_t m, int64_t n) {
  return jaxfp8::cuda::MakeTransposePlan(groups, m, n).tiles;
}

EXPORT void transpose_tile(int64_t groups, int64_t m, int64_t n, int64_t index, int64_t* out) {
  const jaxfp8::cuda::Tile tile = jaxfp8::cuda::MakeTransposePlan(groups, m, n).At(index);
  const int64_t values[] = {tile.group, tile.row, tile.column, tile.rows, tile.columns};
  for (int i = 0; i < 5; ++i) out[i] = values[i];
}

EXPORT int slot_offset(int column, int slot, int column_group) {
  return jaxfp8::cuda::SlotOffset(column, slot, jaxfp8::cuda::SwizzleKey(column_group));
}

EXPORT int pair_offset(int column, int pair, int column_group) {
  return jaxfp8::cuda::PairOffset(column, pair, jaxfp8::cuda::SwizzleKey(column_group));
}

static jaxfp8::cuda::RaggedPlan RaggedPlanOf(int64_t contraction, int64_t members, int64_t groups, int64_t rows,
                                             int64_t columns, int64_t length) {
  const auto size = [](int64_t value) { return static_cast<int32_t>(value); };
  return {contraction != 0, size(members), size(groups), size(rows), size(columns), size(length)};
}

EXPORT int launch_ragged_matmul(int a_dtype, int b_dtype, int out_dtype, const void* a, const void* b,
                                const float* a_scale_inv, const float* b_scale_inv, int64_t a_scale_stride,
                                int64_t b_scale_stride, const int32_t* group_sizes, void* out, int64_t precise,
                                int64_t blocks, int64_t tma, int64_t contraction, int64_t members, int64_t groups,
                                int64_t rows, int64_t columns, int64_t length) {
  return jaxfp8::cuda::LaunchRaggedMatmul(
      {RaggedPlanOf(contraction, members, groups, rows, columns, length), static_cast<Dtype>(a_dtype),
       static_cast<Dtype>(b_dtype), static_cast<Dtype>(out_dtype), a, b, a_scale_inv, b_scale_inv, a_scale_stride,
       b_scale_stride, group_sizes, out, precise != 0, blocks != 0, tma != 0},
      nullptr);
}

EXPORT int64_t ragged_tiles(int64_t contraction, int64_t members, int64_t groups, int64_t rows, int64_t columns,
                            int64_t length) {
  return RaggedPlanOf(contraction, members, groups, rows, columns, length).MaxTiles();
}

// The tile with an index: member, group, row, row_end, column, begin, end. False beyond the last.
EXPORT int ragged_tile(const int32_t* sizes, int64_t contraction, int64_t members, int64_t groups, int64_t rows,
                       int64_t columns, int64_t length, int64_t index, int64_t* out) {
  const jaxfp8::cuda::RaggedPlan plan = RaggedPlanOf(contraction, members, groups, rows, columns, length);
  jaxfp8::cuda::RaggedRange range;
  if (!jaxfp8::cuda::RaggedWalk(plan, sizes).Find(index, &range)) return 0;
  const int64_t values[] = {range.member, range.group, range.row, range.row_end, range.column, range.begin, range.end};
  for (int i = 0; i < 7; ++i) out[i] = values[i];
  return 1;
}

EXPORT int ragged_offset(int row, int chunk) { return jaxfp8::cuda::RaggedOffset(row, chunk); }
