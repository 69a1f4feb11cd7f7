// Filling in cuBLASLt's descriptors, and the call that reads them.
#include "cuda/kernels/gemm_descriptors.h"

#include <utility>

#define JAXFP8_RETURN_IF_CUBLAS_ERROR(expression)                                                       \
  do {                                                                                                  \
    if (const cublasStatus_t status = (expression); status != CUBLAS_STATUS_SUCCESS) return status;     \
  } while (false)

namespace jaxfp8::cuda {
namespace {

cudaDataType_t ToCuda(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBF16: return CUDA_R_16BF;
    case Dtype::kF16: return CUDA_R_16F;
    case Dtype::kF32: return CUDA_R_32F;
    case Dtype::kE4M3: return CUDA_R_8F_E4M3;
    case Dtype::kE5M2: return CUDA_R_8F_E5M2;
  }
  return CUDA_R_32F;
}

cublasLtMatmulMatrixScale_t ToCuda(ScaleMode mode) {
  switch (mode) {
    case ScaleMode::kTensor: return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
    case ScaleMode::kRows: return CUBLASLT_MATMUL_MATRIX_SCALE_OUTER_VEC_32F;
    case ScaleMode::kBlocks1x32: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC32_UE8M0;
    case ScaleMode::kBlocks1x128: return CUBLASLT_MATMUL_MATRIX_SCALE_VEC128_32F;
    case ScaleMode::kBlocks128x128: return CUBLASLT_MATMUL_MATRIX_SCALE_BLK128x128_32F;
  }
  return CUBLASLT_MATMUL_MATRIX_SCALE_SCALAR_32F;
}

template <class Value>
cublasStatus_t Set(cublasLtMatmulDesc_t operation, cublasLtMatmulDescAttributes_t attribute, Value value) {
  return GetCublasLt().MatmulDescSetAttribute(operation, attribute, &value, sizeof(value));
}

template <class Value>
cublasStatus_t Set(cublasLtMatrixLayout_t layout, cublasLtMatrixLayoutAttribute_t attribute, Value value) {
  return GetCublasLt().MatrixLayoutSetAttribute(layout, attribute, &value, sizeof(value));
}

}  // namespace

cublasStatus_t GemmDescriptors::InitOperation(const GemmShape& shape, const GemmPointers& pointers,
                                              Operation* operation) {
  cublasLtMatmulDesc_t raw = nullptr;
  JAXFP8_RETURN_IF_CUBLAS_ERROR(GetCublasLt().MatmulDescCreate(&raw, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  operation->reset(raw);
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_TRANSA, int32_t{CUBLAS_OP_T}));
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_TRANSB, int32_t{CUBLAS_OP_N}));
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, pointers.b_scale_inv));
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, pointers.a_scale_inv));
  for (const auto& [attribute, mode] : {std::pair{CUBLASLT_MATMUL_DESC_A_SCALE_MODE, shape.b_scales},
                                        std::pair{CUBLASLT_MATMUL_DESC_B_SCALE_MODE, shape.a_scales}}) {
    // The default is left alone: it needs no library that knows of modes.
    if (mode == ScaleMode::kTensor) continue;
    JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, attribute, static_cast<int32_t>(ToCuda(mode))));
  }
  const int8_t fast = shape.precise ? 0 : 1;
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_FAST_ACCUM, fast));
  if (shape.has_bias) {
    const Dtype bias_dtype = shape.out == Dtype::kF16 ? Dtype::kF16 : Dtype::kBF16;
    JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_EPILOGUE, uint32_t{CUBLASLT_EPILOGUE_BIAS}));
    JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATMUL_DESC_BIAS_POINTER, pointers.bias));
    JAXFP8_RETURN_IF_CUBLAS_ERROR(
        Set(raw, CUBLASLT_MATMUL_DESC_BIAS_DATA_TYPE, static_cast<int32_t>(ToCuda(bias_dtype))));
  }
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t GemmDescriptors::InitLayout(Dtype dtype, int64_t rows, int64_t columns, int64_t batch, Layout* layout) {
  cublasLtMatrixLayout_t raw = nullptr;
  JAXFP8_RETURN_IF_CUBLAS_ERROR(GetCublasLt().MatrixLayoutCreate(&raw, ToCuda(dtype), rows, columns, rows));
  layout->reset(raw);
  if (batch == 1) return CUBLAS_STATUS_SUCCESS;
  JAXFP8_RETURN_IF_CUBLAS_ERROR(Set(raw, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, static_cast<int32_t>(batch)));
  return Set(raw, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, rows * columns);
}

std::string GemmDescriptors::Init(const GemmShape& shape, const GemmPointers& pointers) {
  pointers_ = pointers;
  cublasStatus_t status = InitOperation(shape, pointers, &operation_);
  if (status == CUBLAS_STATUS_SUCCESS) status = InitLayout(shape.b, shape.k, shape.n, shape.batch, &a_);
  if (status == CUBLAS_STATUS_SUCCESS) status = InitLayout(shape.a, shape.k, shape.m, shape.batch, &b_);
  if (status == CUBLAS_STATUS_SUCCESS) status = InitLayout(shape.out, shape.n, shape.m, shape.batch, &out_);
  if (status == CUBLAS_STATUS_SUCCESS) return "";
  return std::string("cuBLASLt descriptors failed: ") + GetCublasLt().GetStatusName(status);
}

std::string GemmDescriptors::Multiply(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                                      int64_t workspace_bytes, cudaStream_t stream) const {
  const float one = 1.0f;
  const float beta = pointers_.accumulator != nullptr ? 1.0f : 0.0f;
  const void* c = pointers_.accumulator != nullptr ? pointers_.accumulator : pointers_.out;
  const cublasStatus_t status =
      GetCublasLt().Matmul(handle, operation(), &one, pointers_.b, a(), pointers_.a, b(), &beta, c, out(),
                           pointers_.out, out(), &algorithm, workspace, workspace_bytes, stream);
  if (status == CUBLAS_STATUS_SUCCESS) return "";
  return std::string("cublasLtMatmul failed: ") + GetCublasLt().GetStatusName(status);
}

}  // namespace jaxfp8::cuda
