// Launching: what a launcher asks of the device, and a launch that reports its own error.
#ifndef JAXFP8_CUDA_COMMON_LAUNCH_H_
#define JAXFP8_CUDA_COMMON_LAUNCH_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <utility>

#define JAXFP8_RETURN_IF_CUDA_ERROR(expression)                                           \
  do {                                                                                    \
    if (const cudaError_t status = (expression); status != cudaSuccess) return status;    \
  } while (false)

namespace jaxfp8::cuda {

inline cudaError_t Multiprocessors(int* count) {
  int device = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  return cudaDeviceGetAttribute(count, cudaDevAttrMultiProcessorCount, device);
}

// What a block may have if the launch asks for it, static variables included.
inline cudaError_t SharedBytesOfBlock(int64_t* bytes) {
  int device = 0, limit = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(cudaGetDevice(&device));
  JAXFP8_RETURN_IF_CUDA_ERROR(cudaDeviceGetAttribute(&limit, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  *bytes = limit;
  return cudaSuccess;
}

// Unlike kernel<<<...>>>, the error comes back from the call and not through cudaGetLastError, which could also report
// an error of somebody else's earlier call. Shared memory beyond 48 KiB must be allowed for the kernel first.
template <class... Parameters, class... Arguments>
cudaError_t LaunchWithShared(void (*kernel)(Parameters...), int64_t blocks, int threads, int64_t shared_bytes,
                             cudaStream_t stream, Arguments&&... arguments) {
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

// For results that alias an operand: XLA gives them one buffer where it can, and then there is nothing to do.
inline cudaError_t CopyUnlessAliased(float* to, const float* from, int64_t count, cudaStream_t stream) {
  if (to == from || count == 0) return cudaSuccess;
  return cudaMemcpyAsync(to, from, static_cast<size_t>(count) * sizeof(float), cudaMemcpyDeviceToDevice, stream);
}

// Where the amaxes of groups are raised from: zeros if there are none so far. Without amaxes nothing runs.
inline cudaError_t StartAmax(float* amax, const float* amax_so_far, int64_t groups, cudaStream_t stream) {
  if (amax == nullptr) return cudaSuccess;
  if (amax_so_far != nullptr) return CopyUnlessAliased(amax, amax_so_far, groups, stream);
  return cudaMemsetAsync(amax, 0, static_cast<size_t>(groups) * sizeof(float), stream);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_LAUNCH_H_
