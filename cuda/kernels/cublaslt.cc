// Opening cuBLASLt and finding its functions.
#include "cuda/kernels/cublaslt.h"

#include <cuda_runtime_api.h>
#include <dlfcn.h>

namespace jaxfp8::cuda {
namespace {

static_assert(CUDART_VERSION / 1000 == CUBLAS_VER_MAJOR, "the headers of cuBLAS are of another CUDA than the runtime's");

#define JAXFP8_TEXT_OF(number) #number
#define JAXFP8_TEXT(macro) JAXFP8_TEXT_OF(macro)
#define JAXFP8_CUDA JAXFP8_TEXT(CUBLAS_VER_MAJOR)
constexpr char kSoname[] = "libcublasLt.so." JAXFP8_CUDA;

template <class Function>
void Find(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && error->empty()) *error = std::string(kSoname) + " is too old: it has no " + name;
}

CublasLt Open() {
  CublasLt lt = {};
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    lt.error = std::string("cuBLASLt of CUDA " JAXFP8_CUDA " not found: ") + dlerror() +
               "; this module needs JAX's plugin for CUDA " JAXFP8_CUDA ": pip install \"jax[cuda" JAXFP8_CUDA "]\"";
    return lt;
  }
  Find(library, "cublasLtGetVersion", &lt.GetVersion, &lt.error);
  Find(library, "cublasLtGetStatusName", &lt.GetStatusName, &lt.error);
  Find(library, "cublasLtCreate", &lt.Create, &lt.error);
  Find(library, "cublasLtMatmulDescCreate", &lt.MatmulDescCreate, &lt.error);
  Find(library, "cublasLtMatmulDescDestroy", &lt.MatmulDescDestroy, &lt.error);
  Find(library, "cublasLtMatmulDescSetAttribute", &lt.MatmulDescSetAttribute, &lt.error);
  Find(library, "cublasLtMatrixLayoutCreate", &lt.MatrixLayoutCreate, &lt.error);
  Find(library, "cublasLtMatrixLayoutDestroy", &lt.MatrixLayoutDestroy, &lt.error);
  Find(library, "cublasLtMatrixLayoutSetAttribute", &lt.MatrixLayoutSetAttribute, &lt.error);
  Find(library, "cublasLtMatmulPreferenceCreate", &lt.MatmulPreferenceCreate, &lt.error);
  Find(library, "cublasLtMatmulPreferenceDestroy", &lt.MatmulPreferenceDestroy, &lt.error);
  Find(library, "cublasLtMatmulPreferenceSetAttribute", &lt.MatmulPreferenceSetAttribute, &lt.error);
  Find(library, "cublasLtMatmulAlgoGetHeuristic", &lt.MatmulAlgoGetHeuristic, &lt.error);
  Find(library, "cublasLtMatmul", &lt.Matmul, &lt.error);
  return lt;
}

}  // namespace

const CublasLt& GetCublasLt() {
  // Never destroyed: a thread that is still running at exit calls through it.
  static const CublasLt& lt = *new CublasLt(Open());
  return lt;
}

}  // namespace jaxfp8::cuda
