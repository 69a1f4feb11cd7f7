// Opening cuBLASLt and finding its functions.
#include "cuda/kernels/cublaslt.h"

#include <dlfcn.h>

namespace jaxfp8::cuda {
namespace {

constexpr char kSoname[] = "libcublasLt.so.13";

template <class Function>
void Find(void* library, const char* name, Function* function, std::string* error) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  if (*function == nullptr && error->empty()) *error = std::string(kSoname) + " is too old: it has no " + name;
}

CublasLt Open() {
  CublasLt lt = {};
  void* library = dlopen(kSoname, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    lt.error = std::string("cuBLASLt of CUDA 13 not found: ") + dlerror();
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
