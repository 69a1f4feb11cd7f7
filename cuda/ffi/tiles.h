// What the fused producers share: scale and amax_so_far, and the results data fp8 [g, m, n], amax f32 [g], and, if there
// is a third, data_t [g, n, m]. An amax_so_far or an amax of f32 [0] is none.
#ifndef JAXFP8_CUDA_FFI_TILES_H_
#define JAXFP8_CUDA_FFI_TILES_H_

#include <cstdint>
#include <string>

#include "cuda/ffi/support.h"
#include "cuda/kernels/tile_params.h"

namespace jaxfp8::cuda {

// Checks them for an x [g, m, ..., n] that is checked already, and sets everything in `params` but what the op adds.
inline ffi::Error CheckTiles(const char* op, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                             ffi::AnyBuffer data, ffi::AnyBuffer amax, ffi::RemainingRets& rest, TileParams* params) {
  const int64_t groups = x.dimensions()[0], m = x.dimensions()[1], n = x.dimensions().back();
  JAXFP8_RETURN_IF_ERROR(CheckScale({op, "scale", scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmaxOrNone({op, "amax_so_far", amax_so_far}, groups));
  const Operand data_operand{op, "data", data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_operand, {groups, m, n}));
  JAXFP8_RETURN_IF_ERROR(CheckAmaxOrNone({op, "amax", amax}, groups));
  if (rest.size() > 1) {
    return ffi::Error::InvalidArgument(std::string(op) + ": expected 2 or 3 results, got " +
                                       std::to_string(2 + rest.size()));
  }
  params->data_t = nullptr;
  if (rest.size() == 1) {
    auto data_t = rest.get<ffi::AnyBuffer>(0);
    if (!data_t.has_value()) return data_t.error();
    const Operand data_t_operand{op, "data_t", **data_t};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(data_t_operand, {data.element_type()}));
    JAXFP8_RETURN_IF_ERROR(CheckShape(data_t_operand, {groups, n, m}));
    params->data_t = (*data_t)->untyped_data();
  }
  params->dtype = ToDtype(x.element_type());
  params->format = ToDtype(data.element_type());
  params->x = x.untyped_data();
  params->scale = static_cast<const float*>(scale.untyped_data());
  params->scale_stride = ScaleStride(scale);
  params->data = data.untyped_data();
  params->amax_so_far = FloatsOrNull(amax_so_far);
  params->amax = FloatsOrNull(amax);
  params->groups = groups;
  params->m = m;
  params->n = n;
  return ffi::Error::Success();
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_TILES_H_
