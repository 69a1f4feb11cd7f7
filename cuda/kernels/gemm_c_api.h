// What Python calls about plans, with ctypes: C functions beside the custom calls, never part of a program.
#ifndef JAXFP8_CUDA_KERNELS_GEMM_C_API_H_
#define JAXFP8_CUDA_KERNELS_GEMM_C_API_H_

#include <cstdint>

extern "C" {

// A product and its limits; `Gemm` of jaxfp8/ops/_plans.py has the same fields in the same order. Formats are those of
// jaxfp8::Dtype.
struct jaxfp8_gemm {
  int64_t batch, m, n, k;
  int64_t a, b, out;
  int64_t has_bias, accumulate, precise;
  int64_t workspace_bytes, alignment;
};

struct jaxfp8_gemm_platform {
  char device_name[256];
  int64_t capability;  // 90 for sm_90
  int64_t cublaslt_version;
};

struct jaxfp8_tuned_gemm {
  uint64_t algorithm[8];  // cublasLtMatmulAlgo_t
  double microseconds;
  double first_microseconds;  // of the algorithm that cuBLASLt puts first
  int64_t timed;
};

// Each writes the reason of a failure, or an empty string, to `error`, which has room for `error_size` bytes.

// Whether cuBLASLt can be opened and has what is needed.
void jaxfp8_cublaslt_v1(char* error, int64_t error_size);

void jaxfp8_gemm_platform_v1(int64_t device, jaxfp8_gemm_platform* platform, char* error, int64_t error_size);

void jaxfp8_set_gemm_plan_v1(const jaxfp8_gemm_platform* platform, const jaxfp8_gemm* gemm, const uint64_t* algorithm,
                             char* error, int64_t error_size);

// How many plans have been used so far that were measured, and that are cuBLASLt's first.
void jaxfp8_count_gemm_plans_v1(int64_t* measured, int64_t* first, char* error, int64_t error_size);

// Times a product on a device and makes the fastest algorithm its plan. Allocates there and waits: not during a step.
void jaxfp8_tune_gemm_v1(int64_t device, const jaxfp8_gemm* gemm, jaxfp8_tuned_gemm* tuned, char* error,
                         int64_t error_size);

}  // extern "C"

#endif  // JAXFP8_CUDA_KERNELS_GEMM_C_API_H_
