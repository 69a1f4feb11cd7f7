// What cuBLASLt offers for a GEMM: its algorithms, the best expected first.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_
#define JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_

#include <cstdint>
#include <string>
#include <vector>

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

// Asks on the host alone: nothing is launched or allocated on the device. The algorithms that can run within `limits`, in
// cuBLASLt's order; at least one unless the returned reason of a failure is not empty.
std::string FindGemmAlgorithms(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                               const GemmDescriptors& descriptors, std::vector<cublasLtMatmulAlgo_t>* algorithms);

// Whether an algorithm that another process found can run here within `limits`. On the host alone.
bool IsRunnable(const GemmDevice& device, const GemmLimits& limits, const GemmDescriptors& descriptors,
                const cublasLtMatmulAlgo_t& algorithm);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_SEARCH_H_
