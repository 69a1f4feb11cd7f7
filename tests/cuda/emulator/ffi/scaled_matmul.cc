// Stands in for cuda/kernels/scaled_matmul.cc: the product by three loops.
#include "cuda/kernels/scaled_matmul.h"

#include <cfenv>
#include <cstring>

#include "common/fp8.h"
#include "tests/cuda/scale_layouts.h"
#include "xla/ffi/api/c_api.h"

extern "C" XLA_FFI_Error* jaxfp8_scaled_matmul_initialize_v1(XLA_FFI_CallFrame*);

namespace jaxfp8::cuda {
namespace {

float Widen(Dtype dtype, const void* data, int64_t i) {
  const uint8_t code = static_cast<const uint8_t*>(data)[i];
  return dtype == Dtype::kE4M3 ? Decode<E4M3>(code) : Decode<E5M2>(code);
}

float WidenHalf(Dtype dtype, const void* data, int64_t i) {
  if (dtype == Dtype::kF16) return static_cast<float>(static_cast<const _Float16*>(data)[i]);
  return BitsToFloat(static_cast<uint32_t>(static_cast<const uint16_t*>(data)[i]) << 16);
}

void Store(Dtype dtype, void* out, int64_t i, float value) {
  if (dtype == Dtype::kF32) {
    static_cast<float*>(out)[i] = value;
  } else if (dtype == Dtype::kF16) {
    static_cast<_Float16*>(out)[i] = static_cast<_Float16>(value);
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    bits = value != value ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);  // to nearest even
    static_cast<uint16_t*>(out)[i] = static_cast<uint16_t>(bits >> 16);
  }
}

// The scale of an element of a matrix [rows, k].
float Scale(ScaleMode mode, const void* scales, int64_t row, int64_t l, int64_t rows, int64_t k) {
  static constexpr int kBlocks[][2] = {{0, 0}, {1, 0}, {1, 32}, {1, 128}, {128, 128}};
  const auto& [r, c] = kBlocks[static_cast<int>(mode)];
  return ScaleAt(scales, r, c, row, l, rows, k);
}

int prepared = 0;

}  // namespace

std::string PrepareScaledMatmul() {
  ++prepared;
  return "";
}

std::string LaunchScaledMatmul(const ScaledMatmulParams& params, cudaStream_t) {
  std::fenv_t environment;  // XLA's threads flush subnormal numbers, a device does not
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  const Dtype half = params.out_dtype == Dtype::kF16 ? Dtype::kF16 : Dtype::kBF16;  // of the bias
  const ScaleMode one = ScaleMode::kTensor;
  const bool after = params.a_scales == one && params.b_scales == one;  // scales of the whole sum
  for (int64_t g = 0; g < params.groups; ++g) {
    const int64_t call = g / params.batch;
    const void* a_scales = static_cast<const uint8_t*>(params.a_scale_inv) + call * params.a_scale_stride;
    const void* b_scales = static_cast<const uint8_t*>(params.b_scale_inv) + call * params.b_scale_stride;
    for (int64_t i = 0; i < params.m; ++i) {
      for (int64_t j = 0; j < params.n; ++j) {
        float sum = 0, scale = 1;
        for (int64_t l = 0; l < params.k; ++l) {
          const float a = Widen(params.a_dtype, params.a, (g * params.m + i) * params.k + l);
          const float b = Widen(params.b_dtype, params.b, (g * params.n + j) * params.k + l);
          const float a_scale = Scale(params.a_scales, a_scales, i, l, params.m, params.k);
          const float b_scale = Scale(params.b_scales, b_scales, j, l, params.n, params.k);
          scale = a_scale * b_scale;
          sum += after ? a * b : static_cast<float>(static_cast<double>(a) * a_scale * b * b_scale);
        }
        const int64_t at = (g * params.m + i) * params.n + j;
        const float bias = params.bias ? WidenHalf(half, params.bias, j) : 0;
        Store(params.out_dtype, params.out, at,
              (after ? sum * scale : sum) + bias + (params.accumulator ? params.accumulator[at] : 0));
      }
    }
  }
  std::fesetenv(&environment);
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
