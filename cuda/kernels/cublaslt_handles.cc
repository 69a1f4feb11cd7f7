// The table of cuBLASLt handles.
#include "cuda/kernels/cublaslt_handles.h"

#include <cuda_runtime_api.h>

#include <cstdlib>
#include <map>
#include <mutex>

namespace jaxfp8::cuda {
namespace {

constexpr int kMinCapability = 89;

struct Handles {
  std::mutex mutex;
  std::map<int, GemmDevice> by_ordinal;
};

// Never destroyed, so that a thread that is still running at exit finds a live mutex.
Handles& GetHandles() {
  static Handles& handles = *new Handles;
  return handles;
}

void DestroyHandles() {
  Handles& handles = GetHandles();
  std::lock_guard<std::mutex> lock(handles.mutex);
  for (const auto& [ordinal, device] : handles.by_ordinal) {
    // Fails once the runtime shuts down, and then the driver has already taken everything back.
    if (cudaSetDevice(ordinal) == cudaSuccess) GetCublasLt().Destroy(device.handle);
  }
  handles.by_ordinal.clear();
}

std::string Failed(const char* call, cudaError_t status) {
  return std::string(call) + " failed: " + cudaGetErrorName(status);
}

std::string Create(int ordinal, GemmDevice* device) {
  cudaDeviceProp properties = {};
  if (const cudaError_t status = cudaGetDeviceProperties(&properties, ordinal); status != cudaSuccess) {
    return Failed("cudaGetDeviceProperties", status);
  }
  const int capability = 10 * properties.major + properties.minor;
  if (capability < kMinCapability) {
    return "FP8 GEMMs need compute capability 8.9 or newer, device " + std::to_string(ordinal) + " has " +
           std::to_string(properties.major) + "." + std::to_string(properties.minor);
  }
  *device = {ordinal, capability, properties.name, properties.l2CacheSize, nullptr};
  const cublasStatus_t created = GetCublasLt().Create(&device->handle);
  if (created == CUBLAS_STATUS_SUCCESS) return "";
  return std::string("cublasLtCreate failed: ") + GetCublasLt().GetStatusName(created);
}

}  // namespace

std::string GetGemmDevice(GemmDevice* device) {
  int ordinal = 0;
  const cudaError_t status = cudaGetDevice(&ordinal);
  if (status != cudaSuccess) return Failed("cudaGetDevice", status);

  Handles& handles = GetHandles();
  std::lock_guard<std::mutex> lock(handles.mutex);
  auto found = handles.by_ordinal.find(ordinal);
  if (found == handles.by_ordinal.end()) {
    GemmDevice created = {};
    if (std::string error = Create(ordinal, &created); !error.empty()) return error;
    // Registered after cuBLASLt and the driver have registered theirs, hence run before them. Only once: the table was
    // empty until now.
    if (handles.by_ordinal.empty()) std::atexit(DestroyHandles);
    found = handles.by_ordinal.emplace(ordinal, created).first;
  }
  *device = found->second;
  return "";
}

}  // namespace jaxfp8::cuda
