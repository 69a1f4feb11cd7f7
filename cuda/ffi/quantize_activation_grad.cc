// jaxfp8_quantize_activation_grad_v1: x [g, m, 1 or 2, n], scale f32 [1] or [g], amax_so_far as scale or [0], grad
// [g, m, n] -> with N = n or 2 n: data fp8 [g, m, N], amax as amax_so_far, if there is a third result data_t [g, N, m],
// and if there is a fourth column_sums f32 [g, ceil(m / 128), N].
#include "cuda/kernels/quantize_activation_grad.h"

#include "cuda/ffi/activations.h"
#include "cuda/ffi/tiles.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kOp = "quantize_activation_grad";

ffi::Error QuantizeActivationGradHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                         ffi::AnyBuffer amax_so_far, ffi::AnyBuffer grad,
                                         ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                                         ffi::RemainingRets rest, ffi::Dictionary attributes) {
  QuantizeActivationGradParams params = {};
  JAXFP8_RETURN_IF_ERROR(CheckActivation(kOp, x, attributes, &params));
  const ffi::Span<const int64_t> dims = x.dimensions();
  JAXFP8_RETURN_IF_ERROR(CheckTiles(kOp, x, scale, amax_so_far, *data, *amax, rest, &params, dims[2], 2));
  JAXFP8_RETURN_IF_ERROR(CheckArray({kOp, "grad", grad}, x.element_type(), {dims[0], dims[1], dims[3]}));
  params.grad = grad.untyped_data();
  if (rest.size() == 2) {
    JAXFP8_RETURN_IF_ERROR(ToColumnSums(kOp, **rest.get<ffi::AnyBuffer>(1), *data, &params.column_sums));
  }
  return ToError(kOp, LaunchQuantizeActivationGrad(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_activation_grad_v1, jaxfp8::cuda::QuantizeActivationGradHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Arg<xla::ffi::AnyBuffer>()  // grad
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t, column_sums
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
