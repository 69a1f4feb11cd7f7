// Which cuBLASLt algorithm a GEMM uses: one that was measured, else the first that cuBLASLt offers; then remembered.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
#define JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "cuda/kernels/gemm_search.h"

namespace jaxfp8::cuda {

// Where a measurement holds: on devices of one model, with one version of cuBLASLt. NVIDIA promises that an algorithm's
// words can be stored and used again with the same version, and nothing for another.
struct GemmPlatform {
  std::string device_name;
  int capability;
  size_t cublaslt_version;
};

GemmPlatform PlatformOf(const GemmDevice& device);

// From now on, GEMMs of this shape and these limits on this platform use `algorithm`. It may come from a file: it is
// checked by cuBLASLt before its first use, and one that cannot run is forgotten. Needs neither a device nor cuBLASLt.
// Thread-safe.
void SetGemmPlan(const GemmPlatform& platform, const GemmShape& shape, const GemmLimits& limits,
                 const cublasLtMatmulAlgo_t& algorithm);

// The algorithm for `shape`. The same arguments give the same algorithm for the life of the process, unless SetGemmPlan
// changes it, so the same inputs give the same bytes. On the host alone. Thread-safe. Returns the reason of a failure, or
// an empty string.
std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm);

// How many plans have been used so far: those measured, and those that are cuBLASLt's first.
struct GemmPlanCounts {
  int64_t measured;
  int64_t first;
};
GemmPlanCounts CountGemmPlans();

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_PLAN_H_
