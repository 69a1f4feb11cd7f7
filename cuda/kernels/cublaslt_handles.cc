// The table of cuBLASLt handles.
#include "cuda/kernels/cublaslt_handles.h"

#include <cuda_runtime_api.h>

#include <map>
#include <mutex>

namespace jaxfp8::cuda {
namespace {

constexpr int kMinCapability = 89;

struct Handles {
  std::mutex mutex;
  std::map<int, GemmDevice> by_ordinal;
};

// Neither the table nor a handle is ever destroyed: at exit the driver takes all of it back, while a thread may still run,
// and cublasLtDestroy waits for a device whose context may be gone.
Handles& GetHandles() {
  static Handles& handles = *new Handles;
  return handles;
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
  *device = {ordinal, capability, properties.name, nullptr};
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
    found = handles.by_ordinal.emplace(ordinal, created).first;
  }
  *device = found->second;
  return "";
}

}  // namespace jaxfp8::cuda
