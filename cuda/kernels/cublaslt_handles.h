// One cuBLASLt handle for each device, made at first use and kept, and what else is known of the device.
#ifndef JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_
#define JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_

#include <cstdint>
#include <string>

#include "cuda/kernels/cublaslt.h"

namespace jaxfp8::cuda {

struct GemmDevice {
  int ordinal;
  int capability;    // 90 for sm_90
  std::string name;  // "NVIDIA H200"
  cublasLtHandle_t handle;
};

// The current device. Thread-safe. The first call for a device makes its handle, for which cuBLASLt allocates memory on
// the device: not while a stream is captured. Returns the reason of a failure, or an empty string.
std::string GetGemmDevice(GemmDevice* device);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_
