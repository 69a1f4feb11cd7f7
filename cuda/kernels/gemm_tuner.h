// Timing cuBLASLt's algorithms for one GEMM, on the device. Never part of a program: it allocates and waits.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_TUNER_H_
#define JAXFP8_CUDA_KERNELS_GEMM_TUNER_H_

#include <string>

#include "cuda/kernels/gemm_search.h"

namespace jaxfp8::cuda {

struct TunedGemm {
  cublasLtMatmulAlgo_t algorithm;  // the fastest
  double microseconds;             // of one product with it
  double first_microseconds;       // of one product with the algorithm that cuBLASLt puts first
  int timed;                       // how many algorithms were timed
};

// Times the first algorithms that FindGemmAlgorithms offers for `shape` and `limits` on the current device, on random
// operands that do not lie in its cache. Returns the reason of a failure, or an empty string.
std::string TuneGemm(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits, TunedGemm* tuned);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_TUNER_H_
