// cuBLASLt, opened at first use: the functions the GEMM calls.
//
// Never linked: the JAX CUDA plugin has loaded cuBLASLt before any custom call runs, so opening it by its soname finds
// that very copy, and a machine without CUDA can still load this library. The soname has the version of CUDA, that of
// the headers.
#ifndef JAXFP8_CUDA_KERNELS_CUBLASLT_H_
#define JAXFP8_CUDA_KERNELS_CUBLASLT_H_

#include <cublasLt.h>

#include <string>

namespace jaxfp8::cuda {

struct CublasLt {
  decltype(&cublasLtGetVersion) GetVersion;
  decltype(&cublasLtGetStatusName) GetStatusName;
  decltype(&cublasLtCreate) Create;
  decltype(&cublasLtMatmulDescCreate) MatmulDescCreate;
  decltype(&cublasLtMatmulDescDestroy) MatmulDescDestroy;
  decltype(&cublasLtMatmulDescSetAttribute) MatmulDescSetAttribute;
  decltype(&cublasLtMatrixLayoutCreate) MatrixLayoutCreate;
  decltype(&cublasLtMatrixLayoutDestroy) MatrixLayoutDestroy;
  decltype(&cublasLtMatrixLayoutSetAttribute) MatrixLayoutSetAttribute;
  decltype(&cublasLtMatmulPreferenceCreate) MatmulPreferenceCreate;
  decltype(&cublasLtMatmulPreferenceDestroy) MatmulPreferenceDestroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) MatmulPreferenceSetAttribute;
  decltype(&cublasLtMatmulAlgoGetHeuristic) MatmulAlgoGetHeuristic;
  decltype(&cublasLtMatmul) Matmul;

  std::string error;  // empty when every function was found
};

// Opens cuBLASLt once in the life of the process. Thread-safe.
const CublasLt& GetCublasLt();

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_CUBLASLT_H_
