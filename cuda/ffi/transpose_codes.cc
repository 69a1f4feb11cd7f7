// jaxfp8_transpose_codes_v1: data fp8 [g, m, n] -> data_t of its dtype [g, n, m].
#include "cuda/kernels/transpose_codes.h"

#include "common/ffi/checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error TransposeCodesHandler(cudaStream_t stream, ffi::AnyBuffer data, ffi::Result<ffi::AnyBuffer> data_t,
                                 ffi::Dictionary attributes) {
  constexpr char kOp[] = "transpose_codes";
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kOp, attributes));
  const Operand data_operand{kOp, "data", data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(data_operand, 3));
  const int64_t g = data.dimensions()[0], m = data.dimensions()[1], n = data.dimensions()[2];
  JAXFP8_RETURN_IF_ERROR(CheckArray({kOp, "data_t", *data_t}, data.element_type(), {g, n, m}));
  return ToError(kOp, LaunchTransposeCodes({Data<const uint8_t>(data), Data<uint8_t>(*data_t), g, m, n}, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_transpose_codes_v1, jaxfp8::cuda::TransposeCodesHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // data_t
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
