// LaunchScaledMatmul as a C function for ctypes, over a CUDA runtime that has devices by name only.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>

#include "cuda/kernels/scaled_matmul.h"

namespace {

std::atomic<int> capability{90};
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void fake_device(int device, int new_capability) {
  current_device = device;
  capability = new_capability;
}

// Is this thread's capture mode what it was before any call?
__attribute__((visibility("default"))) int fake_capture_mode_is_restored() {
  return capture_mode == cudaStreamCaptureModeThreadLocal;
}

// Writes the reason of a failure, or an empty string, to `error`.
__attribute__((visibility("default"))) void scaled_matmul(
    int a_dtype, int b_dtype, const void* a, const void* b, const float* a_scale_inv, const float* b_scale_inv,
    int64_t a_scale_stride, int64_t b_scale_stride, const void* bias, const float* accumulator, void* out,
    int64_t workspace_bytes, int64_t groups, int64_t m, int64_t n, int64_t k, int64_t precise, char* error) {
  const auto dtype = [](int value) { return static_cast<jaxfp8::Dtype>(value); };
  const std::string reason = jaxfp8::cuda::LaunchScaledMatmul(
      {dtype(a_dtype), dtype(b_dtype), jaxfp8::Dtype::kF32, a, b, a_scale_inv, b_scale_inv, a_scale_stride,
       b_scale_stride, bias, accumulator, out, nullptr, workspace_bytes, groups, m, n, k, precise != 0},
      nullptr);
  std::strcpy(error, reason.c_str());
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
cudaError_t cudaSetDevice(int) { return cudaSuccess; }
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability / 10 : capability % 10;
  return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}
const char* cudaGetErrorName(cudaError_t) { return "cudaErrorFake"; }

}  // extern "C"
