// The custom calls that CPUs have as well: common/ffi checks the buffers, a launcher puts the work on the stream.
#include "cuda/ffi/handlers.h"

#include "common/ffi/adam_update.h"
#include "common/ffi/amax.h"
#include "common/ffi/amax_to_scale.h"
#include "common/ffi/dequantize.h"
#include "common/ffi/encode_moment.h"
#include "common/ffi/histories.h"
#include "common/ffi/quantize.h"
#include "common/ffi/quantize_transpose.h"
#include "common/ffi/readings.h"
#include "cuda/ffi/support.h"
#include "cuda/kernels/adam_update.h"
#include "cuda/kernels/amax.h"
#include "cuda/kernels/amax_to_scale.h"
#include "cuda/kernels/delayed_scales.h"
#include "cuda/kernels/dequantize.h"
#include "cuda/kernels/encode_moment.h"
#include "cuda/kernels/quantize.h"
#include "cuda/kernels/quantize_transpose.h"
#include "cuda/kernels/read_histories.h"
#include "cuda/kernels/write_histories.h"

namespace jaxfp8::cuda {
namespace {

template <class Op, auto kLaunch>
constexpr auto kOnStream = [](cudaStream_t stream, auto... buffers) -> ffi::Error {
  typename Op::Params params = {};
  JAXFP8_RETURN_IF_ERROR(Op::ToParams(buffers..., &params));
  return ToError(Op::kName, kLaunch(params, stream));
};

}  // namespace

#define JAXFP8_ON_STREAM(name, Op, launch) \
  JAXFP8_DEFINE_HANDLER_SYMBOL(name, (kOnStream<Op, launch>), Op::Bind(OnStream()), {kRecordable})

JAXFP8_ON_STREAM(jaxfp8_adam_update_v1, AdamUpdateOp, LaunchAdamUpdate);
JAXFP8_ON_STREAM(jaxfp8_amax_v1, AmaxOp, LaunchAmax);
JAXFP8_ON_STREAM(jaxfp8_amax_to_scale_v1, AmaxToScaleOp, LaunchAmaxToScale);
JAXFP8_ON_STREAM(jaxfp8_delayed_scales_v3, DelayedScalesOp, LaunchDelayedScales);
JAXFP8_ON_STREAM(jaxfp8_dequantize_v1, DequantizeOp, LaunchDequantize);
JAXFP8_ON_STREAM(jaxfp8_encode_moment_v1, EncodeMomentOp, LaunchEncodeMoment);
JAXFP8_ON_STREAM(jaxfp8_quantize_v3, QuantizeOp, LaunchQuantize);
JAXFP8_ON_STREAM(jaxfp8_quantize_transpose_v3, QuantizeTransposeOp, LaunchQuantizeTranspose);
JAXFP8_ON_STREAM(jaxfp8_read_histories_v3, ReadHistoriesOp, LaunchReadHistories);
JAXFP8_ON_STREAM(jaxfp8_write_histories_v5, WriteHistoriesOp, LaunchWriteHistories);

}  // namespace jaxfp8::cuda
