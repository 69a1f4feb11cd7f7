// LaunchScaledMatmul as a C function for ctypes, and the tuner as the Python module libgemm, over a CUDA runtime that
// has devices by name only. Their memory is the host's; graphs and events know what the clock of the stand-in for
// cuBLASLt says, and nothing else.
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "cuda/kernels/scaled_matmul.h"
#include "cuda/tuner_bindings.h"

NB_MODULE(libgemm, module) { jaxfp8::cuda::BindTuner(module); }

namespace {

std::atomic<int> capability{90};
thread_local int current_device = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;
thread_local bool captures = false;
std::atomic<int64_t> allocations{0};  // alive, and streams, events and graphs with them
std::atomic<int64_t> memory_limit{INT64_MAX};
std::atomic<int64_t> copies{0};  // that a product enqueued

int64_t Ask(const char* function) {
  void* const library = dlopen("libcublasLt.so.13", RTLD_NOW | RTLD_NOLOAD);
  return reinterpret_cast<int64_t (*)()>(dlsym(library, function))();
}

// An event, or what a graph holds.
struct Span {
  int64_t clock_ns;  // of the capture's begin, or of the event
  int64_t nanoseconds;
  int64_t algorithm;
  int launches;
};
int64_t launched_ns = 0;  // by graphs, beside what ran outside of them
thread_local int64_t capture_began_ns = 0;

// What a capture enqueued has not run: its time is taken back.
int64_t Clock() { return Ask("fake_clock_ns") + launched_ns; }

template <class Handle>
cudaError_t Make(Handle* out, Span span = {}) {
  ++allocations;
  *out = reinterpret_cast<Handle>(new Span(span));
  return cudaSuccess;
}

template <class Handle>
cudaError_t Drop(Handle handle) {
  --allocations;
  delete reinterpret_cast<Span*>(handle);
  return cudaSuccess;
}

// What a capture forbids this thread, unless it said that it knows better.
bool IsForbidden() { return captures && capture_mode != cudaStreamCaptureModeRelaxed; }

}  // namespace

extern "C" {

__attribute__((visibility("default"))) void fake_device(int device, int new_capability) {
  current_device = device;
  capability = new_capability;
}

__attribute__((visibility("default"))) int fake_current_device() { return current_device; }

// From now on, as if this thread captured a stream.
__attribute__((visibility("default"))) void fake_capture(int new_captures) { captures = new_captures != 0; }

__attribute__((visibility("default"))) int64_t fake_allocations() { return allocations; }

__attribute__((visibility("default"))) int64_t fake_copies() { return copies; }

// cudaMalloc of more fails.
__attribute__((visibility("default"))) void fake_memory_limit(int64_t bytes) { memory_limit = bytes; }

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
cudaError_t cudaSetDevice(int device) {
  if (device < 0 || device > 7) return cudaErrorInvalidDevice;
  current_device = device;
  return cudaSuccess;
}
// Devices 0 to 3 are of one model, the others of another.
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  *properties = {};
  std::strcpy(properties->name, device < 4 ? "Fake GPU" : "Other GPU");
  properties->major = capability / 10;
  properties->minor = capability % 10;
  properties->l2CacheSize = 1 << 20;
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** memory, size_t bytes) {
  if (IsForbidden()) return cudaErrorStreamCaptureUnsupported;
  if (static_cast<int64_t>(bytes) > memory_limit) return cudaErrorMemoryAllocation;
  ++allocations;
  return posix_memalign(memory, 256, bytes + 256) == 0 ? cudaSuccess : cudaErrorMemoryAllocation;
}
cudaError_t cudaFree(void* memory) {
  --allocations;
  std::free(memory);
  return cudaSuccess;
}
cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
cudaError_t cudaMemset(void* address, int value, size_t bytes) {
  std::memset(address, value, bytes);
  return cudaSuccess;
}
cudaError_t cudaGetLastError() { return cudaSuccess; }
cudaError_t cudaDeviceSynchronize() { return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) { return Make(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return Drop(stream); }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return captures ? cudaErrorStreamCaptureUnsupported : cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* event) { return Make(event); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { return Drop(event); }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t) {
  reinterpret_cast<Span*>(event)->clock_ns = Clock();
  return cudaSuccess;
}
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t start, cudaEvent_t stop) {
  *milliseconds =
      1e-6f * static_cast<float>(reinterpret_cast<Span*>(stop)->clock_ns - reinterpret_cast<Span*>(start)->clock_ns);
  return cudaSuccess;
}
cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  captures = true;
  capture_began_ns = Clock();
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  captures = false;
  const int64_t nanoseconds = Clock() - capture_began_ns;
  launched_ns -= nanoseconds;
  return Make(graph, {0, nanoseconds, Ask("fake_last_algorithm"), 0});
}
cudaError_t cudaGraphDestroy(cudaGraph_t graph) { return Drop(graph); }
cudaError_t cudaGraphInstantiate(cudaGraphExec_t* out, cudaGraph_t graph, unsigned long long) {
  return Make(out, *reinterpret_cast<Span*>(graph));
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t graph) { return Drop(graph); }
// Something disturbs every fourth run of the fastest algorithm, 3: its mean is slow and its median fast.
cudaError_t cudaGraphLaunch(cudaGraphExec_t graph, cudaStream_t) {
  Span& span = *reinterpret_cast<Span*>(graph);
  launched_ns += span.nanoseconds * (span.algorithm == 3 && ++span.launches % 4 == 0 ? 10 : 1);
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
