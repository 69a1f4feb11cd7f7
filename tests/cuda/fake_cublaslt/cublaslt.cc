// A stand-in for libcublasLt.so.13: the functions that the GEMM calls, by cuBLASLt's documented rules, in three loops.
//
// It multiplies what the descriptors say, whatever they say, so a swapped operand, a wrong leading dimension or a
// missing scale gives wrong numbers. f32 outputs only. It has many algorithms, with made-up needs and times: a product
// moves a clock, which the stand-in for the CUDA runtime (entry.cc) reads.
#include <cublasLt.h>

#include <atomic>
#include <cstring>
#include <map>

#include "common/fp8.h"
#include "tests/cuda/scale_layouts.h"

namespace {

std::atomic<int> heuristics{0};
std::atomic<int> matmuls{0};
std::atomic<int> handles{0};
std::atomic<int> descriptors{0};  // alive
std::atomic<uint32_t> last_alignment{0};
std::atomic<int> last_fast{-1};
std::atomic<int64_t> last_batch{0};
std::atomic<int64_t> last_algorithm{-1};
std::atomic<size_t> version{130002};
std::atomic<int64_t> clock_ns{0};
std::atomic<const void*> last_a{nullptr};

constexpr uint64_t kAlgorithm = 0xa190;
constexpr uint64_t kTooMuch = uint64_t{1} << 40;
constexpr int64_t kNanosecondsFromCache = 10;

// In the order of the heuristic. data[0] of an algorithm is kAlgorithm, data[1] its index here, data[2] its version.
struct Algorithm {
  int64_t nanoseconds;
  uint64_t workspace = 0;
  uint32_t alignment = 16;
  bool offered = true;  // has the status of success
  bool runs = true;     // cublasLtMatmul takes it
};
constexpr Algorithm kAlgorithms[] = {
    {1, 0, 16, /*offered=*/false},
    {1, kTooMuch},
    {5000},
    {3000, 1 << 16, /*alignment=*/128},  // the fastest at full alignment
    {2000, 0, 16, true, /*runs=*/false},
    {4000},  // the fastest otherwise, and with little workspace
    {9000},
    {6000},
    {6000},
    {6000},
    {6000},
    {10},  // too far back to be timed
};
constexpr int kCount = sizeof(kAlgorithms) / sizeof(Algorithm);
constexpr int kFirst = 2;  // of those that run

// Any cuBLASLt object: its attributes by number.
struct Object {
  std::map<int, uint64_t> attributes;
  uint64_t Get(int attribute) const {
    const auto found = attributes.find(attribute);
    return found == attributes.end() ? 0 : found->second;
  }
  template <class T>
  T Pointer(int attribute) const {
    return reinterpret_cast<T>(Get(attribute));
  }
};

// The opaque structs hold a pointer to the object in their first word.
template <class Opaque>
Object& Of(Opaque* opaque) {
  return *reinterpret_cast<Object*>(opaque->data[0]);
}

template <class Opaque>
cublasStatus_t Create(Opaque** out) {
  *out = new Opaque{};
  (*out)->data[0] = reinterpret_cast<uint64_t>(new Object);
  ++descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

template <class Opaque>
cublasStatus_t Destroy(Opaque* opaque) {
  delete &Of(opaque);
  delete opaque;
  --descriptors;
  return CUBLAS_STATUS_SUCCESS;
}

template <class Opaque>
cublasStatus_t Set(Opaque* opaque, int attribute, const void* value, size_t bytes) {
  uint64_t& slot = Of(opaque).attributes[attribute];
  slot = 0;
  std::memcpy(&slot, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

struct Matrix {
  explicit Matrix(cublasLtMatrixLayout_t layout, const void* data)
      : type(static_cast<cudaDataType_t>(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_TYPE))),
        rows(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_ROWS)),
        columns(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_COLS)),
        leading(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_LD)),
        batch(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)),
        stride(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)),
        data(data) {
    if (batch == 0) batch = 1;
  }
  int64_t At(int64_t b, int64_t row, int64_t column) const { return b * stride + column * leading + row; }
  float Value(int64_t b, int64_t row, int64_t column) const {
    const int64_t at = At(b, row, column);
    if (type == CUDA_R_8F_E4M3) return jaxfp8::Decode<jaxfp8::E4M3>(static_cast<const uint8_t*>(data)[at]);
    if (type == CUDA_R_8F_E5M2) return jaxfp8::Decode<jaxfp8::E5M2>(static_cast<const uint8_t*>(data)[at]);
    return static_cast<const float*>(data)[at];
  }
  cudaDataType_t type;
  int64_t rows, columns, leading, batch, stride;
  const void* data;
};

bool IsAligned(const void* pointer, uint32_t alignment) { return reinterpret_cast<uintptr_t>(pointer) % alignment == 0; }

float Bias(const Object& operation, int64_t row) {
  if (operation.Get(CUBLASLT_MATMUL_DESC_EPILOGUE) != CUBLASLT_EPILOGUE_BIAS) return 0;
  if (operation.Get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) != CUDA_R_16BF) return NAN;
  const uint16_t bits = operation.Pointer<const uint16_t*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER)[row];
  return jaxfp8::BitsToFloat(static_cast<uint32_t>(bits) << 16);
}

// Rows and elements along K of a block, by cublasLtMatmulMatrixScale_t; what is for FP4 has none.
constexpr int kBlocks[][2] = {{0, 0}, {-1, -1}, {1, 32}, {1, 0}, {1, 128}, {128, 128}};

struct Scales {
  Scales(const Object& operation, cublasLtMatmulDescAttributes_t mode, cublasLtMatmulDescAttributes_t pointer)
      : mode(static_cast<int>(operation.Get(mode))), data(operation.Pointer<const void*>(pointer)) {}
  float At(int64_t outer, int64_t inner, const Matrix& matrix) const {
    return ScaleAt(data, kBlocks[mode][0], kBlocks[mode][1], outer, inner, matrix.columns, matrix.rows);
  }
  int mode;
  const void* data;
};

// The table of supported combinations, and what they ask of sizes and addresses.
bool AreMultiplied(const Object& operation) {
  const Scales a(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  const Scales b(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
  constexpr int kVec = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F, kBlk = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  if (a.mode == CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F && b.mode == a.mode) return true;
  if (!IsAligned(a.data, 16) || !IsAligned(b.data, 16)) return false;
  if (a.mode == kVec || a.mode == kBlk) return b.mode == kVec || (b.mode == kBlk && a.mode == kVec);
  return a.mode == b.mode && (a.mode == CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F ||
                              a.mode == CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0);
}

}  // namespace

extern "C" {

size_t cublasLtGetVersion() { return version; }
const char* cublasLtGetStatusName(cublasStatus_t) { return "CUBLAS_STATUS_FAKE"; }

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = reinterpret_cast<cublasLtHandle_t>(static_cast<intptr_t>(++handles));
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasLtDestroy(cublasLtHandle_t) { return CUBLAS_STATUS_SUCCESS; }

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* out, cublasComputeType_t compute, cudaDataType_t scale) {
  if (compute != CUBLAS_COMPUTE_32F || scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  return Create(out);
}
cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) { return Destroy(operation); }
cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, size_t bytes) {
  return Set(operation, attribute, value, bytes);
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
  return Set(layout, attribute, value, bytes);
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* out) { return Create(out); }
cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) { return Destroy(preference); }
cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute, const void* value,
                                                    size_t bytes) {
  return Set(preference, attribute, value, bytes);
}

// With 7 bytes of workspace there is nothing.
cublasStatus_t cublasLtMatmulAlgoGetHeuristic(cublasLtHandle_t, cublasLtMatmulDesc_t operation,
                                              cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                              cublasLtMatrixLayout_t, cublasLtMatmulPreference_t preference,
                                              int requested, cublasLtMatmulHeuristicResult_t* results, int* found) {
  ++heuristics;
  if (Of(operation).Get(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER) == 0 ||
      Of(operation).Get(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER) == 0 || requested < 32) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!AreMultiplied(Of(operation))) return CUBLAS_STATUS_NOT_SUPPORTED;
  const Object& limits = Of(preference);
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
    result.algo.data[2] = version;
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoCheck(cublasLtHandle_t, cublasLtMatmulDesc_t, cublasLtMatrixLayout_t,
                                       cublasLtMatrixLayout_t, cublasLtMatrixLayout_t, cublasLtMatrixLayout_t,
                                       const cublasLtMatmulAlgo_t* algorithm, cublasLtMatmulHeuristicResult_t* result) {
  if (algorithm->data[0] != kAlgorithm || algorithm->data[1] >= kCount || algorithm->data[2] != version) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  result->workspaceSize = kAlgorithms[algorithm->data[1]].workspace;
  return CUBLAS_STATUS_SUCCESS;
}

#ifndef WITHOUT_MATMUL
cublasStatus_t cublasLtMatmul(cublasLtHandle_t, cublasLtMatmulDesc_t descriptor, const void* alpha, const void* a_data,
                              cublasLtMatrixLayout_t a_layout, const void* b_data, cublasLtMatrixLayout_t b_layout,
                              const void* beta, const void* c_data, cublasLtMatrixLayout_t c_layout, void* d_data,
                              cublasLtMatrixLayout_t d_layout, const cublasLtMatmulAlgo_t* algorithm, void*,
                              size_t workspace_bytes, cudaStream_t) {
  ++matmuls;
  if (algorithm->data[0] != kAlgorithm || algorithm->data[1] >= kCount) return CUBLAS_STATUS_INVALID_VALUE;
  const Algorithm& chosen = kAlgorithms[algorithm->data[1]];
  if (!chosen.runs || chosen.workspace > workspace_bytes || !IsAligned(a_data, chosen.alignment) ||
      !IsAligned(b_data, chosen.alignment) || !IsAligned(d_data, chosen.alignment)) {
    return CUBLAS_STATUS_NOT_SUPPORTED;
  }
  // The first algorithm is fastest of all where the operands are still in the cache.
  const bool from_cache = algorithm->data[1] == kFirst && last_a.exchange(a_data) == a_data;
  clock_ns += from_cache ? kNanosecondsFromCache : chosen.nanoseconds;
  last_algorithm = static_cast<int64_t>(algorithm->data[1]);
  const Object& operation = Of(descriptor);
  const Matrix a(a_layout, a_data), b(b_layout, b_data), c(c_layout, c_data), d(d_layout, d_data);
  last_fast = static_cast<int>(operation.Get(CUBLASLT_MATMUL_DESC_FAST_ACCUM));
  last_batch = d.batch;
  // "TN" only: both operands have k as rows.
  if (operation.Get(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_T ||
      operation.Get(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N || a.rows != b.rows || d.rows != a.columns ||
      d.columns != b.columns || c.rows != d.rows || c.columns != d.columns || a.batch != d.batch ||
      b.batch != d.batch || c.batch != d.batch || d.type != CUDA_R_32F || c.type != CUDA_R_32F) {
    return CUBLAS_STATUS_INVALID_VALUE;
  }
  const Scales a_scales(operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER);
  const Scales b_scales(operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER);
  // One number for the whole sum, or numbers along it.
  const bool is_whole = kBlocks[a_scales.mode][1] == 0;
  // One scale pointer serves a batch only where it is one number.
  if (d.batch > 1 && a_scales.mode != CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
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
        static_cast<float*>(d_data)[d.At(batch, row, column)] = out;
      }
    }
  }
  return CUBLAS_STATUS_SUCCESS;
}
#endif

// In the order of COUNTS in checks.py.
void fake_counts(int64_t* out) {
  const int64_t values[] = {heuristics,     matmuls,   handles,    descriptors,
                            last_alignment, last_fast, last_batch, last_algorithm};
  std::memcpy(out, values, sizeof(values));
}

void fake_version(int64_t new_version) { version = static_cast<size_t>(new_version); }

int64_t fake_clock_ns() { return clock_ns; }
int64_t fake_last_algorithm() { return last_algorithm; }

}  // extern "C"
