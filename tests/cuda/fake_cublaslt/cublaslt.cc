// A stand-in for libcublasLt.so.13: the functions that the GEMM calls, in three loops. It refuses what is in rules.h.
//
// It multiplies what the descriptors say, so a swapped operand, a wrong leading dimension or another group's scale gives
// wrong numbers, and it spoils the workspace first. It has some algorithms, with made-up needs.
#include <cublasLt.h>

#include <algorithm>
#include <atomic>
#include <cstring>

#include "tests/cuda/fake_cublaslt/rules.h"

namespace {

std::atomic<int> heuristics{0};
std::atomic<int> matmuls{0};
std::atomic<int> handles{0};
std::atomic<uint32_t> last_alignment{0};
std::atomic<int> last_fast{-1};
std::atomic<int64_t> last_batch{0};
std::atomic<int64_t> last_algorithm{-1};
std::atomic<int> capability{90};

constexpr uint64_t kAlgorithm = 0xa190;
constexpr uint64_t kTooMuch = uint64_t{1} << 40;

// In the order of the heuristic. data[0] of an algorithm is kAlgorithm, data[1] its index here.
struct Algorithm {
  uint64_t workspace = 0;
  uint32_t alignment = 16;
  bool offered = true;  // has the status of success
  bool runs = true;     // cublasLtMatmul takes it
};
constexpr Algorithm kAlgorithms[] = {
    {0, 16, /*offered=*/false},
    {kTooMuch},
    {0},  // the first that runs
    {1 << 16, /*alignment=*/128},
    {0, 16, true, /*runs=*/false},
};
constexpr int kCount = sizeof(kAlgorithms) / sizeof(Algorithm);

float Bias(const Object& operation, int64_t row) {
  if (operation.Get(CUBLASLT_MATMUL_DESC_EPILOGUE) != CUBLASLT_EPILOGUE_BIAS) return 0;
  const Matrix bias(static_cast<cudaDataType_t>(operation.Get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE)),
                    operation.Pointer<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER));
  return bias.Value(0, row, 0);
}

// What an algorithm leaves behind; of a large workspace its two ends.
void Spoil(void* workspace, size_t bytes) {
  constexpr size_t kEnd = 1 << 16;
  if (workspace == nullptr) return;
  std::memset(workspace, 0xff, std::min(bytes, kEnd));
  if (bytes > kEnd) std::memset(static_cast<uint8_t*>(workspace) + bytes - kEnd, 0xff, kEnd);
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return 130002; }
const char* cublasLtGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS_FAKE"; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(static_cast<intptr_t>(++handles));
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute, cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return Create(out);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) { return Destroy(operation); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  return Set(operation, kOperationSizes, attribute, value, bytes);
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* out, cudaDataType type, uint64_t rows,
                                          uint64_t columns, int64_t leading) {
  Create(out);
  Object& layout = Of(*out);
  layout.attributes[CUBLASLT_MATRIX_LAYOUT_TYPE] = type;
  layout.attributes[CUBLASLT_MATRIX_LAYOUT_ROWS] = rows;
  layout.attributes[CUBLASLT_MATRIX_LAYOUT_COLS] = columns;
  layout.attributes[CUBLASLT_MATRIX_LAYOUT_LD] = leading;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) { return Destroy(layout); }
cublasStatus_t cublasLtMatrixLayoutSetAttribute(cublasLtMatrixLayout_t layout,
                                                cublasLtMatrixLayoutAttribute_t attribute, const void* value,
                                                size_t bytes) {
  return Set(layout, kLayoutSizes, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) { return Create(out); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return Destroy(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  return Set(preference, kPreferenceSizes, attribute, value, bytes);
}

// With 7 bytes of workspace there is nothing.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t a, cublasLtMatrixLayout_t b,
                                              cublasLtMatrixLayout_t c, cublasLtMatrixLayout_t d,
                                              cublasLtMatmulPreference_t preference, int requested,
                                              cublasLtMatmulHeuristicResult_t* results, int* found) {
  ++heuristics;
  if (requested < 32) return CUBLAS_STATUS_INVALID_VALUE;
  const cublasStatus_t status = Check(Of(operation), Matrix(a, nullptr), Matrix(b, nullptr), Matrix(c, nullptr),
                                      Matrix(d, nullptr), capability);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Object& limits = Of(preference);
  // cuBLASLt has no such rule: the bound of products does (tests/oracle/accumulation.py).
  if (limits.Get(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK) != CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  last_alignment = static_cast<uint32_t>(limits.Get(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES));
  const uint64_t workspace = limits.Get(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
  *found = 0;
  for (int i = 0; i < kCount && workspace != 7; ++i) {
    const Algorithm& algorithm = kAlgorithms[i];
    if (algorithm.alignment > last_alignment || (algorithm.workspace > workspace && algorithm.workspace != kTooMuch)) {
      continue;
    }
    cublasLtMatmulHeuristicResult_t& result = results[(*found)++];
    result.state = algorithm.offered ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
    result.workspaceSize = algorithm.workspace;
    result.algo.data[0] = kAlgorithm;
    result.algo.data[1] = static_cast<uint64_t>(i);
  }
  return CUBLAS_STATUS_SUCCESS;
}

#ifndef WITHOUT_MATMUL
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t descriptor, const void* alpha, const void* a_data,
                              cublasLtMatrixLayout_t a_layout, const void* b_data, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c_data, cublasLtMatrixLayout_t c_layout, void* d_data,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void* workspace,
                              size_t workspace_bytes, cudaStream_t) {
  ++matmuls;
  if (algorithm->data[0] != kAlgorithm || algorithm->data[1] >= kCount) return CUBLAS_STATUS_INVALID_VALUE;
  const Object& operation = Of(descriptor);
  const Matrix a(a_layout, a_data), b(b_layout, b_data), c(c_layout, c_data), d(d_layout, d_data);
  const cublasStatus_t status = Check(operation, a, b, c, d, capability);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  const Algorithm& chosen = kAlgorithms[algorithm->data[1]];
  if (!IsAligned(workspace, 256) || chosen.workspace > workspace_bytes) return CUBLAS_STATUS_INVALID_VALUE;
  if (!chosen.runs || !IsAligned(a_data, chosen.alignment) || !IsAligned(b_data, chosen.alignment) ||
      !IsAligned(d_data, chosen.alignment)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  Spoil(workspace, workspace_bytes);
  last_algorithm = static_cast<int64_t>(algorithm->data[1]);
  last_fast = static_cast<int>(operation.Get(CUBLASLT_MATMUL_DESC_FAST_ACCUM));
  last_batch = d.batch;
  const Scales a_scales = ScalesOfA(operation), b_scales = ScalesOfB(operation);
  // One number for the whole sum, or numbers along it.
  const bool is_whole = kBlocks[a_scales.mode][1] == 0;
  const float keep = *static_cast<const float*>(beta);
  for (int64_t batch = 0; batch < d.batch; ++batch) {
    for (int64_t column = 0; column < d.columns; ++column) {
      for (int64_t row = 0; row < d.rows; ++row) {
        float sum = 0;
        for (int64_t k = 0; k < a.rows; ++k) {
          const float product = a.Value(batch, k, row) * b.Value(batch, k, column);
          sum += is_whole ? product : product * (a_scales.At(row, k, a) * b_scales.At(column, k, b));
        }
        if (is_whole) sum *= a_scales.At(row, 0, a) * b_scales.At(column, 0, b);
        float out = sum * *static_cast<const float*>(alpha) + Bias(operation, row);
        if (keep != 0) out += keep * c.Value(batch, row, column);
        d.Store(batch, row, column, out);
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
#endif

// In the order of COUNTS in checks.py.
void fake_counts(int64_t* out) {
  const int64_t values[] = {heuristics,     matmuls,   handles,    objects_alive,
                            last_alignment, last_fast, last_batch, last_algorithm};
  std::memcpy(out, values, sizeof(values));
}

// Of every device.
void fake_capability(int new_capability) { capability = new_capability; }

}  // extern "C"
