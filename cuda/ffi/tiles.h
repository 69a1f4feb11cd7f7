// What the fused producers share: scale and amax_so_far, and the results data fp8 [g, m, n], amax as amax_so_far, and, if
// there is a third, data_t [g, n, m]. An amax_so_far or an amax of f32 [0] is none.
#ifndef JAXFP8_CUDA_FFI_TILES_H_
#define JAXFP8_CUDA_FFI_TILES_H_

#include <cstdint>
#include <string>

#include "common/ffi/quantize_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {

// Checks them for an x [g, m, ..., n] that is checked already, and sets every field of `params` but those that the op
// adds. Results have `parts` times n columns; of the `most` results after the amax the first is data_t.
inline ffi::Error CheckTiles(const char* op, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                             ffi::AnyBuffer data, ffi::AnyBuffer amax, ffi::RemainingRets& rest, TileParams* params,
                             int64_t parts = 1, size_t most = 1) {
  const int64_t groups = x.dimensions()[0], m = x.dimensions()[1], n = x.dimensions().back();
  JAXFP8_RETURN_IF_ERROR(ToQuantized(op, x, scale, amax_so_far, data, amax, {groups, m, parts * n}, params));
  params->m = m;
  params->n = n;
  if (rest.size() > most) {
    return ffi::Error::InvalidArgument(std::string(op) + ": expected 2 " + (most > 1 ? "to " : "or ") +
                                       std::to_string(2 + most) + " results, got " + std::to_string(2 + rest.size()));
  }
  params->data_t = nullptr;
  if (rest.size() > 0) {
    JAXFP8_RETURN_IF_ERROR(ToTransposed(op, data, **rest.get<ffi::AnyBuffer>(0), params));
  }
  return ffi::Error::Success();
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_TILES_H_
