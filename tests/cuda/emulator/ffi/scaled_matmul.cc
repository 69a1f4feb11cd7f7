// Stands in for cuda/kernels/scaled_matmul.cc: the product by three loops.
#include "cuda/kernels/scaled_matmul.h"

#include <vector>

#include "common/fp8.h"
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* jaxfp8_scaled_matmul_initialize_v1(XLA_FFI_CallFrame*);

namespace jaxfp8::cuda {
namespace {

float Widen(Dtype dtype, const void* data, int64_t i) {
  const uint8_t code = static_cast<const uint8_t*>(data)[i];
  return dtype == Dtype::kE4M3 ? Decode<E4M3>(code) : Decode<E5M2>(code);
}

float WidenBF16(const void* data, int64_t i) {
  return BitsToFloat(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
}

int prepared = 0;

}  // namespace

std::string PrepareScaledMatmul() {
  ++prepared;
  return "";
}

// f32 outputs only: the tests of the handler ask for nothing else.
std::string LaunchScaledMatmul(const ScaledMatmulParams& params, cudaStream_t) {
  if (params.out_dtype != Dtype::kF32) return "not emulated";
  float* out = static_cast<float*>(params.out);
  for (int64_t g = 0; g < params.groups; ++g) {
    const float scale = params.a_scale_inv[g * params.a_scale_stride] * params.b_scale_inv[g * params.b_scale_stride];
    for (int64_t i = 0; i < params.m; ++i) {
      for (int64_t j = 0; j < params.n; ++j) {
        float sum = 0;
        for (int64_t l = 0; l < params.k; ++l) {
          sum += Widen(params.a_dtype, params.a, (g * params.m + i) * params.k + l) *
                 Widen(params.b_dtype, params.b, (g * params.n + j) * params.k + l);
        }
        const int64_t at = (g * params.m + i) * params.n + j;
        out[at] = sum * scale + (params.bias ? WidenBF16(params.bias, j) : 0) +
                  (params.accumulator ? params.accumulator[at] : 0);
      }
    }
  }
  return "";
}

// Calls the handler of the stage that XLA has on GPUs only; how often it has prepared, or -1 where it fails.
extern "C" __attribute__((visibility("default"))) int initialize_scaled_matmul() {
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.stage = XLA_FFI_ExecutionStage_INITIALIZE;
  // As XLA fills it; the handler must not look.
  frame.args.size = 4;
  frame.rets.size = 2;
  frame.attrs.size = 3;
  return jaxfp8_scaled_matmul_initialize_v1(&frame) == nullptr ? prepared : -1;
}

}  // namespace jaxfp8::cuda
