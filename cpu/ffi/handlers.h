// The handlers of the CPU module, by the names of their custom calls.
#ifndef JAXFP8_CPU_FFI_HANDLERS_H_
#define JAXFP8_CPU_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

#define JAXFP8_CPU_HANDLERS(DO)           \
  DO(jaxfp8_adam_update_v1)               \
  DO(jaxfp8_amax_v1)                      \
  DO(jaxfp8_amax_to_scale_v1)             \
  DO(jaxfp8_decode_moment_v1)             \
  DO(jaxfp8_delayed_scales_v3)            \
  DO(jaxfp8_dequantize_v1)                \
  DO(jaxfp8_encode_moment_v1)             \
  DO(jaxfp8_join_recorded_v1)             \
  DO(jaxfp8_quantize_v3)                  \
  DO(jaxfp8_quantize_blocks_transpose_v2) \
  DO(jaxfp8_quantize_transpose_v3)        \
  DO(jaxfp8_read_histories_v3)            \
  DO(jaxfp8_split_reading_v1)             \
  DO(jaxfp8_undo_factors_v1)              \
  DO(jaxfp8_write_histories_v5)

#define JAXFP8_DECLARE_HANDLER(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame*);
JAXFP8_CPU_HANDLERS(JAXFP8_DECLARE_HANDLER)
#undef JAXFP8_DECLARE_HANDLER

#endif  // JAXFP8_CPU_FFI_HANDLERS_H_
