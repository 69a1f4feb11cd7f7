// Launching: what a launcher asks of the device and puts on a stream, each allowed while the stream is captured.
#ifndef JAXFP8_CUDA_COMMON_LAUNCH_H_
#define JAXFP8_CUDA_COMMON_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#include "cuda/common/capture.h"

#define JAXFP8_RETURN_IF_CUDA_ERROR(expression)                                           \
  do {                                                                                    \
    if (const cudaError_t status = (expression); status != cudaSuccess) return status;    \
  } while (false)

namespace jaxfp8::cuda {

inline cudaError_t DeviceAttribute(cudaDeviceAttr attribute, int* value) {
  const AllowSetupDuringCapture allow_setup;
  int device = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(value, attribute, device);
}

inline cudaError_t Multiprocessors(int* count) { return DeviceAttribute(cudaDevAttrMultiProcessorCount, count); }

constexpr int kSharedBytesOfAnyKernel = 48 * 1024;  // without being asked for

// A kernel that reads DynamicShared<shared_bytes>. Unlike kernel<<<...>>>, the error comes back from the call and not through
// cudaGetLastError, which could also report an error of somebody else's earlier call.
template <class... Parameters, class... Arguments>
cudaError_t LaunchWithShared(void (*kernel)(Parameters...), int64_t blocks, int threads, int shared_bytes,
                             cudaStream_t stream, Arguments&&... arguments) {
  const AllowSetupDuringCapture allow_setup;
  if (shared_bytes > kSharedBytesOfAnyKernel) {
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                     cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned int>(blocks));
  config.blockDim = dim3(static_cast<unsigned int>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  return cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
}

template <class... Parameters, class... Arguments>
cudaError_t Launch(void (*kernel)(Parameters...), int64_t blocks, int threads, cudaStream_t stream,
                   Arguments&&... arguments) {
  return LaunchWithShared(kernel, blocks, threads, 0, stream, std::forward<Arguments>(arguments)...);
}

// Zeros `count` elements. T's zero has zero bits.
template <class T>
cudaError_t SetZero(T* to, int64_t count, cudaStream_t stream) {
  if (count == 0) return cudaSuccess;
  const AllowSetupDuringCapture allow_setup;
  return cudaMemsetAsync(to, 0, static_cast<size_t>(count) * sizeof(T), stream);
}

// For results that alias an operand: XLA gives them one buffer where it can, and then there is nothing to do.
inline cudaError_t CopyUnlessAliased(float* to, const float* from, int64_t count, cudaStream_t stream) {
  if (to == from || count == 0) return cudaSuccess;
  const AllowSetupDuringCapture allow_setup;
  return cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

// Gives the amaxes that a kernel is to raise their start: what they are so far, or 0 where `so_far` is null. A null
// `amax` is not wanted.
inline cudaError_t StartAmax(float* amax, const float* so_far, int64_t count, cudaStream_t stream) {
  if (amax == nullptr) return cudaSuccess;
  return so_far == nullptr ? SetZero(amax, count, stream) : CopyUnlessAliased(amax, so_far, count, stream);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_LAUNCH_H_
