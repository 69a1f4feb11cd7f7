// One GEMM in cuBLASLt's terms: the operation, the four matrices and what they point to.
//
// cuBLASLt is column-major, so our row-major out [m, n] = a [m, k] @ b [n, k]^T is its D [n, m] = A^T B with A = b and
// B = a, both [k, .] with leading dimension k: the "TN" form, the only one FP8 has on Ada and Hopper.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_DESCRIPTORS_H_
#define JAXFP8_CUDA_KERNELS_GEMM_DESCRIPTORS_H_

#include <cstdint>
#include <memory>
#include <string>

#include "common/dispatch.h"
#include "cuda/kernels/cublaslt.h"
#include "cuda/kernels/scale_mode.h"

namespace jaxfp8::cuda {

// What decides which algorithm is best.
struct GemmShape {
  int64_t batch;
  int64_t m;
  int64_t n;
  int64_t k;
  Dtype a;
  Dtype b;
  Dtype out;
  bool has_bias;
  bool accumulate;
  bool precise;
  ScaleMode a_scales = ScaleMode::kTensor;
  ScaleMode b_scales = ScaleMode::kTensor;
};

struct GemmPointers {
  const void* a;
  const void* b;
  const void* a_scale_inv;  // as the scale modes have them
  const void* b_scale_inv;
  const void* bias;          // null without
  const float* accumulator;  // null without; may equal out
  void* out;
};

// Scale and bias pointers are part of cuBLASLt's operation descriptor, so every call makes its own: cheap host objects,
// nothing to lock.
class GemmDescriptors {
 public:
  // Both return the reason of a failure, or an empty string.
  std::string Init(const GemmShape& shape, const GemmPointers& pointers);
  std::string Multiply(cublasLtHandle_t handle, const cublasLtMatmulAlgo_t& algorithm, void* workspace,
                       int64_t workspace_bytes, cudaStream_t stream) const;

  cublasLtMatmulDesc_t operation() const { return operation_.get(); }
  cublasLtMatrixLayout_t a() const { return a_.get(); }      // our b
  cublasLtMatrixLayout_t b() const { return b_.get(); }      // our a
  cublasLtMatrixLayout_t out() const { return out_.get(); }  // C and D

 private:
  struct DestroyOperation {
    void operator()(cublasLtMatmulDesc_t operation) const { GetCublasLt().MatmulDescDestroy(operation); }
  };
  struct DestroyLayout {
    void operator()(cublasLtMatrixLayout_t layout) const { GetCublasLt().MatrixLayoutDestroy(layout); }
  };
  using Operation = std::unique_ptr<cublasLtMatmulDescOpaque_t, DestroyOperation>;
  using Layout = std::unique_ptr<cublasLtMatrixLayoutOpaque_t, DestroyLayout>;

  static cublasStatus_t InitOperation(const GemmShape& shape, const GemmPointers& pointers, Operation* operation);
  static cublasStatus_t InitLayout(Dtype dtype, int64_t rows, int64_t columns, int64_t batch, Layout* layout);

  GemmPointers pointers_;
  Operation operation_;
  Layout a_, b_, out_;
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_GEMM_DESCRIPTORS_H_
