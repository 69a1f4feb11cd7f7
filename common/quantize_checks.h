// The buffers of quantize and quantize_transpose, checked for both libraries.
#ifndef JAXFP8_COMMON_QUANTIZE_CHECKS_H_
#define JAXFP8_COMMON_QUANTIZE_CHECKS_H_

#include <cstdint>
#include <string>

#include "common/checks.h"
#include "common/column_sums.h"

namespace jaxfp8 {

// x [g, n], or [g, m, n] where there is data_t [g, n, m]; scale f32 [1] or [g], amax_so_far f32 [g] -> data like x and
// amax f32 [g]. An amax_so_far of f32 [0] stands for zeros, and a caller who does not want the amax asks for f32 [0].
struct QuantizeBuffers {
  ffi::AnyBuffer x;
  ffi::AnyBuffer scale;
  ffi::AnyBuffer amax_so_far;
  ffi::AnyBuffer data;
  ffi::AnyBuffer amax;
  const ffi::AnyBuffer* data_t = nullptr;

  int64_t Groups() const { return x.dimensions()[0]; }
  // The other dimensions of x.
  int64_t Rows() const { return x.dimensions()[1]; }
  int64_t Columns() const { return x.dimensions().back(); }

  const float* AmaxSoFarOrNull() const { return FloatsOrNull(amax_so_far); }
  float* AmaxOrNull() const { return FloatsOrNull(amax); }
};

inline ffi::Error CheckQuantize(const char* op, const QuantizeBuffers& buffers, const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(op, attributes));
  const Operand x{op, "x", buffers.x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x, buffers.data_t == nullptr ? 2 : 3));
  const int64_t groups = buffers.Groups();
  JAXFP8_RETURN_IF_ERROR(CheckScale({op, "scale", buffers.scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmaxOrNone({op, "amax_so_far", buffers.amax_so_far}, groups));
  const Operand data{op, "data", buffers.data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data));
  if (buffers.data_t == nullptr) {
    JAXFP8_RETURN_IF_ERROR(CheckShape(data, {groups, buffers.Columns()}));
  } else {
    const Operand data_t{op, "data_t", *buffers.data_t};
    JAXFP8_RETURN_IF_ERROR(CheckShape(data, {groups, buffers.Rows(), buffers.Columns()}));
    JAXFP8_RETURN_IF_ERROR(CheckDtype(data_t, {buffers.data.element_type()}));
    JAXFP8_RETURN_IF_ERROR(CheckShape(data_t, {groups, buffers.Columns(), buffers.Rows()}));
  }
  return CheckAmaxOrNone({op, "amax", buffers.amax}, groups);
}

// The result that quantize_transpose of x [g, m, n] may have beyond its three: f32 [g, parts, n], or null.
inline ffi::Error ToColumnSums(ffi::RemainingRets rest, ffi::AnyBuffer x, float** column_sums) {
  *column_sums = nullptr;
  if (rest.size() == 0) return ffi::Error::Success();
  if (rest.size() > 1) {
    return ffi::Error::InvalidArgument("quantize_transpose: expected 3 or 4 results, got " +
                                       std::to_string(3 + rest.size()));
  }
  const ffi::AnyBuffer sums = **rest.get<ffi::AnyBuffer>(0);
  const Operand operand{"quantize_transpose", "column_sums", sums};
  const ffi::Span<const int64_t> dims = x.dimensions();
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(operand, {dims[0], ColumnSumParts(dims[1]), dims[2]}));
  *column_sums = static_cast<float*>(sums.untyped_data());
  return ffi::Error::Success();
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_QUANTIZE_CHECKS_H_
