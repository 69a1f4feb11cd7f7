// A CUDA runtime for the tests: the part that cuda/ uses, running kernels on the host, one block after the other.
//
// Every CUDA thread is a fiber. It runs until it ends or waits, for its block (__syncthreads) or its warp
// (__reduce_max_sync, __shfl_xor_sync, and what ptx.h says of a warp). Warps run as far ahead of each other as barriers let
// them, in one of two orders, so that a missing barrier shows. Shared memory is static memory. Asynchronous copies are made as
// early as they may be in one of the orders, and as late as they may be in the other.
//
// A stream is always being captured, and nothing was used before: calls that CUDA then forbids, and which a first launch
// may make, fail unless the thread has allowed them.
//
// What this cannot show: speed, memory ordering, and whether the instructions do what ptx.h says they do.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_CUDA_RUNTIME_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_CUDA_RUNTIME_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <tuple>

#define __global__
#define __device__
#define __host__
#define __shared__ static
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

using std::max;
using std::min;

struct dim3 {
  dim3(unsigned int x = 1) : x(x) {}
  unsigned int x, y = 1, z = 1;
};
struct uint2 {
  unsigned int x, y;
};
struct uint4 {
  unsigned int x, y, z, w;
};
inline uint2 make_uint2(unsigned int x, unsigned int y) { return {x, y}; }
inline uint4 make_uint4(unsigned int x, unsigned int y, unsigned int z, unsigned int w) { return {x, y, z, w}; }

extern dim3 threadIdx, blockIdx, gridDim;

void __syncthreads();
int __syncthreads_or(int predicate);
unsigned int __reduce_max_sync(unsigned int mask, unsigned int value);
unsigned int __reduce_add_sync(unsigned int mask, unsigned int value);
float __shfl_xor_sync(unsigned int mask, float value, int lanes);
unsigned int __shfl_xor_sync(unsigned int mask, unsigned int value, int lanes);
unsigned int __shfl_sync(unsigned int mask, unsigned int value, int lane);

// What each lane brought, once all have; they go on together after WarpSync.
void WarpShare(const void* mine, const void* (&all)[32]);
void WarpSync();

// `bytes` to `target`: `count` from `source`, then zeros.
void StartCopy(void* target, const void* source, int bytes, int count);
void EndCopyGroup();
void WaitForCopyGroups(int pending);

inline unsigned int atomicMax(unsigned int* address, unsigned int value) {
  const unsigned int old = *address;
  *address = max(old, value);
  return old;
}

inline unsigned long long atomicAdd(unsigned long long* address, unsigned long long value) {
  const unsigned long long old = *address;
  *address = old + value;
  return old;
}

// A misaligned access is an error on the device; counted here.
void CountMisaligned();
// 1 where ex2.approx is to be too large, -1 where it is to be too small.
int ErrorOfExp2();
template <class T>
T __ldg(const T* address) {
  if (reinterpret_cast<uintptr_t>(address) % sizeof(T) != 0) CountMisaligned();
  T value;
  std::memcpy(&value, address, sizeof(value));
  return value;
}

inline unsigned int __byte_perm(unsigned int low, unsigned int high, unsigned int selector) {
  const uint64_t bytes = low | (uint64_t{high} << 32);
  unsigned int result = 0;
  for (int i = 0; i < 4; ++i) result |= ((bytes >> (8 * (selector >> (4 * i) & 7))) & 0xff) << (8 * i);
  return result;
}

inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fsub_rn(float x, float y) { return x - y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(x))); }
inline float __fmaf_rn(float x, float y, float z) { return std::fmaf(x, y, z); }

enum cudaError_t {
  cudaSuccess,
  cudaErrorInvalidValue,
  cudaErrorNotSupported,
  cudaErrorLaunchFailure,
  cudaErrorStreamCaptureUnsupported,
};
using cudaStream_t = struct CUstream_st*;
enum cudaDeviceAttr { cudaDevAttrMultiProcessorCount, cudaDevAttrComputeCapabilityMajor };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaStreamCaptureMode { cudaStreamCaptureModeGlobal, cudaStreamCaptureModeThreadLocal, cudaStreamCaptureModeRelaxed };
enum cudaMemcpyKind { cudaMemcpyDeviceToDevice };
struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes;
  cudaStream_t stream;
};

const char* cudaGetErrorName(cudaError_t error);
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);
cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value);
cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode);

// Runs `thread` for every thread of the grid.
cudaError_t RunGrid(const cudaLaunchConfig_t& config, const std::function<void()>& thread);

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments&&... arguments) {
  const std::tuple<Parameters...> values(arguments...);
  return RunGrid(*config, [&] { std::apply(kernel, values); });
}

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_CUDA_RUNTIME_H_
