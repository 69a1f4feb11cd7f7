// One cuBLASLt handle for each device, made at first use and destroyed at exit.
#ifndef JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_
#define JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_

#include <string>

#include "cuda/kernels/cublaslt.h"

namespace jaxfp8::cuda {

struct GemmDevice {
  int ordinal;
  int capability;  // 90 for sm_90
  cublasLtHandle_t handle;
};

// The current device. Thread-safe. Returns the reason of a failure, or an empty string.
std::string GetGemmDevice(GemmDevice* device);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_CUBLASLT_HANDLES_H_
