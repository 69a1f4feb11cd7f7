// The activation functions, of f32 in registers.
//
//   silu(x) = x * s(x),  gelu(x) = x * s(z(x)),  s(z) = 1 / (1 + exp(-z)),  z(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//
// gelu in this form is the tanh approximation without its cancellation where tanh is close to -1.
//
// Accuracy, with u = 2^-24. The exponent of 2 has a relative error of 5u (of two roundings of constants, a square, a
// sum and a product), which is |z| 5u relative in exp(-z); ex2.approx adds 4u. Of these s gets the share
// exp(-z) / (1 + exp(-z)) = s(-z). The sum, rcp.approx and the product add u, 2u and u:
//
//   |error| <= |result| (s(-z) (5 |z| + 4) + 4) u
//
// below 6u where the result matters, growing with |z| in the tail where it goes to zero. There exp(-z) overflows from
// z = -88 on and the result is a zero; it would have been below 2^-119.
#ifndef JAXFP8_CUDA_COMMON_ACTIVATION_H_
#define JAXFP8_CUDA_COMMON_ACTIVATION_H_

#include <cstdint>

#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kGelu = 1.5957691216057308;  // 2 sqrt(2 / pi)

// x * s(z), with `exponent` = -z log2(e).
__device__ __forceinline__ float TimesSigmoid(float x, float exponent) {
  return __fmul_rn(x, Reciprocal(__fadd_rn(1.0f, Exp2(exponent))));
}

struct Silu {
  __device__ __forceinline__ static float Of(float x) {
    return TimesSigmoid(x, __fmul_rn(x, static_cast<float>(-kLog2E)));
  }
};

struct Gelu {
  __device__ __forceinline__ static float Of(float x) {
    constexpr float kLinear = static_cast<float>(-kLog2E * kGelu);
    constexpr float kCubic = static_cast<float>(-kLog2E * kGelu * 0.044715);
    return TimesSigmoid(x, __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), kCubic, kLinear)));
  }
};

struct Relu {
  __device__ __forceinline__ static float Of(float x) { return x <= 0.0f ? 0.0f : x; }  // NaN stays
};

// What a kernel is given: how many values make one, and which function.
template <class Function>
struct Plain {
  static constexpr int kInputs = 1;
  __device__ __forceinline__ static float Of(const float (&x)[1]) { return Function::Of(x[0]); }
};

template <class Function>
struct Gated {
  static constexpr int kInputs = 2;
  __device__ __forceinline__ static float Of(const float (&x)[2]) { return __fmul_rn(Function::Of(x[0]), x[1]); }
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_ACTIVATION_H_
