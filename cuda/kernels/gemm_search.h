// What cuBLASLt offers for a GEMM: the algorithm that it expects to be the fastest.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_
#define JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_

#include <cstdint>
#include <string>

#include "cuda/kernels/cublaslt_handles.h"
#include "cuda/kernels/gemm_descriptors.h"

namespace jaxfp8::cuda {

// What XLA aligns every buffer to, and what cuBLASLt assumes unless told less: bytes. Buffers that happen to lie better
// need no plans of their own.
constexpr uint32_t kGemmAlignment = 256;

// Besides the shape and the device, what the heuristic looks at.
struct GemmLimits {
  int64_t workspace_bytes;
  uint32_t alignment;  // bytes, a power of two, of every matrix and of the bias
};

// Asks on the host alone: nothing is launched or allocated on the device. Of the algorithms that can run within `limits`,
// the first in cuBLASLt's order. Returns the reason of a failure, or an empty string.
std::string FindGemmAlgorithm(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                              const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_
