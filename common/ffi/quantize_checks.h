// The buffers that all ops have in common that quantize with a scale, checked.
#ifndef JAXFP8_COMMON_FFI_QUANTIZE_CHECKS_H_
#define JAXFP8_COMMON_FFI_QUANTIZE_CHECKS_H_

#include <cstdint>

#include "common/column_sums.h"
#include "common/ffi/checks.h"
#include "common/params.h"

namespace jaxfp8 {

// Checks scale, amax_so_far and amax, each f32 [1] for all groups or [g], and data fp8 of the shape `dims` = [g, ...], and
// sets their fields and those of `x`, which is checked already. Where x lacks g, data does too. An amax_so_far of f32 [0]
// stands for zeros, and a caller who does not want the amax asks for f32 [0].
template <class Params>
ffi::Error ToQuantized(const char* op, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                       ffi::AnyBuffer data, ffi::AnyBuffer amax, std::initializer_list<int64_t> dims, Params* params) {
  const int64_t groups = *dims.begin();
  JAXFP8_RETURN_IF_ERROR(CheckScale({op, "scale", scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmaxOrNone({op, "amax_so_far", amax_so_far}, groups));
  const Operand data_operand{op, "data", data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  const size_t lacks_groups = x.dimensions().size() < dims.size();
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_operand, {dims.begin() + lacks_groups, dims.size() - lacks_groups}));
  const Operand amax_operand{op, "amax", amax};
  JAXFP8_RETURN_IF_ERROR(CheckAmaxOrNone(amax_operand, groups));
  if (!IsNone(amax) && !IsNone(amax_so_far)) {
    JAXFP8_RETURN_IF_ERROR(CheckShape(amax_operand, amax_so_far.dimensions()));
  }

  params->dtype = ToDtype(x.element_type());
  params->format = ToDtype(data.element_type());
  params->x = x.untyped_data();
  params->scale = Data<float>(scale);
  params->scale_stride = ScaleStride(scale);
  params->data = data.untyped_data();
  params->amax_so_far = FloatsOrNull(amax_so_far);
  params->amax = FloatsOrNull(amax);
  params->amax_stride = ScaleStride(amax);
  params->groups = groups;
  return ffi::Error::Success();
}

// Checks column_sums f32 [g, ceil(m / 128), n] against data [g, m, n], and sets `sums` to its elements. Both may lack g.
inline ffi::Error ToColumnSums(const char* op, ffi::AnyBuffer column_sums, ffi::AnyBuffer data, float** sums) {
  const auto [groups, m, n] = MatrixDims(data);
  const Operand operand{op, "column_sums", column_sums};
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckShapeLike(operand, data, ColumnSumParts(m), n));
  *sums = Data<float>(column_sums);
  return ffi::Error::Success();
}

// Checks data_t [g, n, m] against data [g, m, n], and sets its field. Both may lack g.
inline ffi::Error ToTransposed(const char* op, ffi::AnyBuffer data, ffi::AnyBuffer data_t, TileParams* params) {
  const auto [groups, m, n] = MatrixDims(data);
  const Operand operand{op, "data_t", data_t};
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {data.element_type()}));
  JAXFP8_RETURN_IF_ERROR(CheckShapeLike(operand, data, n, m));
  params->data_t = data_t.untyped_data();
  return ffi::Error::Success();
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_QUANTIZE_CHECKS_H_
