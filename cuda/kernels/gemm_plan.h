// Which cuBLASLt algorithm a GEMM uses: the first that cuBLASLt offers, then remembered.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
#define JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_

#include <string>

#include "cuda/kernels/gemm_search.h"

namespace jaxfp8::cuda {

// The algorithm for `shape`. The same arguments give the same algorithm for the life of the process, so the same inputs
// give the same bytes. On the host alone. Thread-safe. Returns the reason of a failure, or an empty string.
std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
