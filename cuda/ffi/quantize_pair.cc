// jaxfp8_quantize_pair_v1: x [g, m, n], scale f32 [1] or [g], amax_so_far as scale or [0], second as x -> data
// fp8 [g, m, 2 n], amax as amax_so_far, and, if there is a third result, data_t [g, 2 n, m].
#include "cuda/kernels/quantize_transpose.h"

#include "cuda/ffi/tiles.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error QuantizePairHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                               ffi::AnyBuffer second, ffi::Result<ffi::AnyBuffer> data,
                               ffi::Result<ffi::AnyBuffer> amax, ffi::RemainingRets rest,
                               ffi::Dictionary attributes) {
  constexpr char kOp[] = "quantize_pair";
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kOp, attributes));
  const Operand x_operand{kOp, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const Operand second_operand{kOp, "second", second};
  JAXFP8_RETURN_IF_ERROR(CheckDtype(second_operand, {x.element_type()}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(second_operand, x.dimensions()));
  QuantizePairParams params = {};
  JAXFP8_RETURN_IF_ERROR(CheckTiles(kOp, x, scale, amax_so_far, *data, *amax, rest, &params, 2));
  params.second = second.untyped_data();
  return ToError(kOp, LaunchQuantizePair(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_pair_v1, jaxfp8::cuda::QuantizePairHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Arg<xla::ffi::AnyBuffer>()  // second
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
