// The handlers of the CUDA module, by the names of their custom calls.
#ifndef JAXFP8_CUDA_FFI_HANDLERS_H_
#define JAXFP8_CUDA_FFI_HANDLERS_H_

#include "xla/ffi/api/c_api.h"

#define JAXFP8_CUDA_HANDLERS(DO)           \
  DO(jaxfp8_adam_update_v1)                \
  DO(jaxfp8_amax_v1)                       \
  DO(jaxfp8_amax_to_scale_v1)              \
  DO(jaxfp8_delayed_scales_v3)             \
  DO(jaxfp8_dequantize_v1)                 \
  DO(jaxfp8_encode_moment_v1)              \
  DO(jaxfp8_quantize_v3)                   \
  DO(jaxfp8_quantize_activation_v2)        \
  DO(jaxfp8_quantize_activation_grad_v1)   \
  DO(jaxfp8_quantize_blocks_transpose_v2)  \
  DO(jaxfp8_quantize_norm_v2)              \
  DO(jaxfp8_quantize_pair_v1)              \
  DO(jaxfp8_quantize_transpose_v3)         \
  DO(jaxfp8_ragged_matmul_v1)              \
  DO(jaxfp8_read_histories_v3)             \
  DO(jaxfp8_read_rows_v1)                  \
  DO(jaxfp8_transpose_codes_v1)            \
  DO(jaxfp8_write_histories_v5)            \
  DO(jaxfp8_write_rows_v1)

// Handlers with an initialize stage, jaxfp8_scaled_matmul_initialize_v1.
#define JAXFP8_CUBLASLT_HANDLERS(DO) \
  DO(jaxfp8_block_scaled_matmul_v1)  \
  DO(jaxfp8_scaled_matmul_v2)

#define JAXFP8_DECLARE_HANDLER(name) extern "C" XLA_FFI_Error* name(XLA_FFI_CallFrame*);
JAXFP8_CUDA_HANDLERS(JAXFP8_DECLARE_HANDLER)
JAXFP8_CUBLASLT_HANDLERS(JAXFP8_DECLARE_HANDLER)
JAXFP8_DECLARE_HANDLER(jaxfp8_scaled_matmul_initialize_v1)
#undef JAXFP8_DECLARE_HANDLER

#endif  // JAXFP8_CUDA_FFI_HANDLERS_H_
