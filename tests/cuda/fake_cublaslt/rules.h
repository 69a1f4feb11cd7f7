// What cuBLASLt takes of FP8 products, by the header of CUDA 13.0 and by the manual of cuBLAS 13 ("cublasLtMatmul()",
// "Narrow Precision Data Types Usage", "Tensor Core Usage"). What neither says is refused too: nobody may rely on it.
#ifndef JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_RULES_H_
#define JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_RULES_H_

#include "tests/cuda/fake_cublaslt/objects.h"

inline bool IsAligned(const void* pointer, uint32_t alignment) {
  return reinterpret_cast<uintptr_t>(pointer) % alignment == 0;
}

// Pointers, columns and the way from one matrix of a batch to the next: whole pieces of 16 bytes.
inline bool IsAligned(const Matrix& matrix) {
  const int64_t width = matrix.Width();
  return IsAligned(matrix.data, 16) && matrix.rows * width % 16 == 0 && matrix.leading * width % 16 == 0 &&
         matrix.stride * width % 16 == 0 && matrix.leading >= matrix.rows;
}

// D [m, n] = A [k, m]^T B [k, n], the only form on compute capability 8.9, 9.0 and 12.x; C like D.
inline bool AreSizes(const Object& operation, const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d) {
  if (operation.Get(CUBLASLT_MATMUL_DESC_TRANSA) != CUBLAS_OP_T ||
      operation.Get(CUBLASLT_MATMUL_DESC_TRANSB) != CUBLAS_OP_N) {
    return false;
  }
  for (const Matrix* matrix : {&a, &b, &c, &d}) {
    if (!IsAligned(*matrix) || matrix->batch != d.batch || matrix->columns == 0 || matrix->rows == 0) return false;
  }
  return a.rows == b.rows && d.rows == a.columns && d.columns == b.columns && c.rows == d.rows && c.columns == d.columns;
}

// The table of types, for outputs that are not FP8.
inline bool AreTypes(const Object& operation, const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d) {
  if (!a.IsFp8() || !b.IsFp8() || (a.type == CUDA_R_8F_E5M2 && b.type == CUDA_R_8F_E5M2)) return false;
  if (c.type != d.type || (d.type != CUDA_R_16BF && d.type != CUDA_R_16F && d.type != CUDA_R_32F)) return false;
  switch (operation.Get(CUBLASLT_MATMUL_DESC_EPILOGUE)) {
    case 0:
    case CUBLASLT_EPILOGUE_DEFAULT: return operation.Get(CUBLASLT_MATMUL_DESC_BIAS_POINTER) == 0;
    case CUBLASLT_EPILOGUE_BIAS: break;
    default: return false;
  }
  const void* const bias = operation.Pointer<const void*>(CUBLASLT_MATMUL_DESC_BIAS_POINTER);
  const uint64_t bias_type = d.type == CUDA_R_16F ? CUDA_R_16F : CUDA_R_16BF;
  return bias != nullptr && IsAligned(bias, 16) && operation.Get(CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE) == bias_type;
}

// The tables of scaling modes. Batches and fast accumulation are documented with one scale a matrix, the latter also
// with one a row.
inline bool AreScales(const Object& operation, const Matrix& d, int capability) {
  constexpr int kScalar = CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F, kRows = CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F,
                kMx = CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0, kVec = CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F,
                kBlk = CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  const Scales a = ScalesOfA(operation), b = ScalesOfB(operation);
  // Aligned in every mode since 12.9.1: of one scale a matrix the manual does not say so, the library does.
  for (const Scales& scales : {a, b}) {
    if (scales.data == nullptr || !IsAligned(scales.data, 16)) return false;
  }
  if (a.mode == kScalar && b.mode == kScalar) return capability >= 89;
  if (d.batch > 1) return false;
  if (a.mode == kRows && b.mode == kRows) return capability == 90;
  if (operation.Get(CUBLASLT_MATMUL_DESC_FAST_ACCUM) != 0) return false;
  if (a.mode == kMx && b.mode == kMx) return capability >= 100;
  const bool are_128 = (a.mode == kVec && (b.mode == kVec || b.mode == kBlk)) || (a.mode == kBlk && b.mode == kVec);
  return are_128 && capability == 90 && d.rows % 4 == 0 && d.columns % 4 == 0;
}

// Of a call of cublasLtMatmul; for the heuristic, matrices without data.
inline cublasStatus_t Check(const Object& operation, const Matrix& a, const Matrix& b, const Matrix& c, const Matrix& d,
                            int capability) {
  const bool is_valid = AreSizes(operation, a, b, c, d) && AreTypes(operation, a, b, c, d) &&
                        operation.Get(CUBLASLT_MATMUL_DESC_FAST_ACCUM) <= 1;
  if (!is_valid) return CUBLAS_STATUS_INVALID_VALUE;
  return AreScales(operation, d, capability) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_NOT_SUPPORTED;
}

#endif  // JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_RULES_H_
