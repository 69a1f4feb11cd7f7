// LaunchScaledMatmul as a C function for ctypes, over a CUDA runtime that has devices by name only. Their memory is the
// host's.
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstring>

#include "cuda/kernels/scaled_matmul.h"

namespace {

std::atomic<int> capability{90};
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;
std::atomic<int64_t> copies{0};  // that a product enqueued

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void fake_device(int device, int new_capability) {
  current_device = device;
  capability = new_capability;
}

__attribute__((visibility("default"))) int64_t fake_copies() { return copies; }

__attribute__((visibility("default"))) void prepare(char* error) {
  std::strcpy(error, jaxfp8::cuda::PrepareScaledMatmul().c_str());
}

// Is this thread's capture mode what it was before any call?
__attribute__((visibility("default"))) int fake_capture_mode_is_restored() {
  return capture_mode == cudaStreamCaptureModeThreadLocal;
}

// Writes the reason of a failure, or an empty string, to `error`.
__attribute__((visibility("default"))) void scaled_matmul(
    int a_dtype, int b_dtype, int out_dtype, const void* a, const void* b, const void* a_scale_inv,
    const void* b_scale_inv, int64_t a_scale_stride, int64_t b_scale_stride, const void* bias, const float* accumulator,
    void* out, void* workspace, int64_t workspace_bytes, int64_t groups, int64_t batch, int64_t m, int64_t n, int64_t k,
    int64_t precise, int64_t a_scales, int64_t b_scales, char* error) {
  const auto dtype = [](int value) { return static_cast<jaxfp8::Dtype>(value); };
  const auto mode = [](int64_t value) { return static_cast<jaxfp8::cuda::ScaleMode>(value); };
  const std::string reason = jaxfp8::cuda::LaunchScaledMatmul(
      {dtype(a_dtype), dtype(b_dtype), dtype(out_dtype), a, b, a_scale_inv, b_scale_inv, a_scale_stride,
       b_scale_stride, bias, accumulator, out, workspace, workspace_bytes, groups, batch, m, n, k, precise != 0,
       mode(a_scales), mode(b_scales)},
      nullptr);
  std::strcpy(error, reason.c_str());
}

cudaError_t cudaGetDevice(int* device) {
  *device = current_device;
  return cudaSuccess;
}
// Devices 0 to 3 are of one model, the others of another.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, device < 4 ? "Fake GPU" : "Other GPU");
  properties->major = capability / 10;
  properties->minor = capability % 10;
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  std::memcpy(to, from, bytes);
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
