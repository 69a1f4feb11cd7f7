// The stand-in's objects: cuBLASLt's descriptors as tables of attributes, with the sizes that cuBLASLt gives these.
#ifndef JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_OBJECTS_H_
#define JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_OBJECTS_H_

#include <cublasLt.h>

#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>

#include "common/fp8.h"
#include "tests/cuda/scale_layouts.h"

inline std::atomic<int> objects_alive{0};

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
  ++objects_alive;
  return CUBLAS_STATUS_SUCCESS;
}

template <class Opaque>
cublasStatus_t Destroy(Opaque* opaque) {
  delete &Of(opaque);
  delete opaque;
  --objects_alive;
  return CUBLAS_STATUS_SUCCESS;
}

// Bytes of each attribute that the stand-in knows, by its number.
using Sizes = std::map<int, size_t>;
inline const Sizes kOperationSizes = {
    {CUBLASLT_MATMUL_DESC_TRANSA, 4},          {CUBLASLT_MATMUL_DESC_TRANSB, 4},
    {CUBLASLT_MATMUL_DESC_EPILOGUE, 4},        {CUBLASLT_MATMUL_DESC_BIAS_POINTER, 8},
    {CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, 4},  {CUBLASLT_MATMUL_DESC_FAST_ACCUM, 1},
    {CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, 8}, {CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, 8},
    {CUBLASLT_MATMUL_DESC_A_SCALE_MODE, 4},    {CUBLASLT_MATMUL_DESC_B_SCALE_MODE, 4},
};
inline const Sizes kLayoutSizes = {
    {CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, 4},
    {CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, 8},
};
inline const Sizes kPreferenceSizes = {
    {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, 8},   {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, 4}, {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, 4},
    {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, 4}, {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, 4},
};

template <class Opaque>
cublasStatus_t Set(Opaque* opaque, const Sizes& sizes, int attribute, const void* value, size_t bytes) {
  const auto size = sizes.find(attribute);
  if (value == nullptr || size == sizes.end() || size->second != bytes) return CUBLAS_STATUS_INVALID_VALUE;
  uint64_t& slot = Of(opaque).attributes[attribute];
  slot = 0;
  std::memcpy(&slot, value, bytes);
  return CUBLAS_STATUS_SUCCESS;
}

// One matrix of a call: column-major, as its layout says.
struct Matrix {
  Matrix(cublasLtMatrixLayout_t layout, const void* data)
      : type(static_cast<cudaDataType_t>(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_TYPE))),
        rows(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_ROWS)),
        columns(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_COLS)),
        leading(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_LD)),
        batch(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT)),
        stride(Of(layout).Get(CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET)),
        data(data) {
    if (batch == 0) batch = 1;
  }
  // Of one column.
  Matrix(cudaDataType_t type, const void* data)
      : type(type), rows(0), columns(1), leading(0), batch(1), stride(0), data(data) {}

  bool IsFp8() const { return type == CUDA_R_8F_E4M3 || type == CUDA_R_8F_E5M2; }
  int64_t Width() const { return IsFp8() ? 1 : type == CUDA_R_32F ? 4 : 2; }
  int64_t At(int64_t b, int64_t row, int64_t column) const { return b * stride + column * leading + row; }

  float Value(int64_t b, int64_t row, int64_t column) const {
    const int64_t at = At(b, row, column);
    switch (type) {
      case CUDA_R_8F_E4M3: return jaxfp8::Decode<jaxfp8::E4M3>(static_cast<const uint8_t*>(data)[at]);
      case CUDA_R_8F_E5M2: return jaxfp8::Decode<jaxfp8::E5M2>(static_cast<const uint8_t*>(data)[at]);
      case CUDA_R_16BF: return jaxfp8::BitsToFloat(uint32_t{static_cast<const uint16_t*>(data)[at]} << 16);
      case CUDA_R_16F: return static_cast<float>(static_cast<const _Float16*>(data)[at]);
      default: return static_cast<const float*>(data)[at];
    }
  }

  void Store(int64_t b, int64_t row, int64_t column, float value) const {
    void* const out = const_cast<void*>(data);
    const int64_t at = At(b, row, column);
    if (type == CUDA_R_32F) {
      static_cast<float*>(out)[at] = value;
    } else if (type == CUDA_R_16F) {
      static_cast<_Float16*>(out)[at] = static_cast<_Float16>(value);
    } else {
      const uint32_t bits = jaxfp8::FloatToBits(value);
      static_cast<uint16_t*>(out)[at] = static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
  }

  cudaDataType_t type;
  int64_t rows, columns, leading, batch, stride;
  const void* data;
};

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

inline Scales ScalesOfA(const Object& operation) {
  return {operation, CUBLASLT_MATMUL_DESC_A_SCALE_MODE, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER};
}
inline Scales ScalesOfB(const Object& operation) {
  return {operation, CUBLASLT_MATMUL_DESC_B_SCALE_MODE, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER};
}

#endif  // JAXFP8_TESTS_CUDA_FAKE_CUBLASLT_OBJECTS_H_
