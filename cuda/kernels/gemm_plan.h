// Which cuBLASLt algorithm a GEMM uses: asked once for each kind of call, then remembered.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
#define JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_

#include <cstdint>
#include <string>

#include "cuda/kernels/cublaslt_handles.h"
#include "cuda/kernels/gemm_descriptors.h"

namespace jaxfp8::cuda {

// Besides the shape and the device, what the heuristic looks at.
struct GemmLimits {
  int64_t workspace_bytes;
  uint32_t alignment;  // bytes, a power of two, of every matrix and of the bias
};

// The algorithm for `shape`. The same arguments give the same algorithm for the life of the process, so the same inputs
// give the same bytes. Thread-safe. Returns the reason of a failure, or an empty string.
std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
