// The custom calls on CPUs: common/ffi checks the buffers, a launcher does the work.
#include "cpu/ffi/handlers.h"

#include <cstdint>
#include <functional>
#include <utility>

#include "common/ffi/adam_update.h"
#include "common/ffi/amax.h"
#include "common/ffi/amax_to_scale.h"
#include "common/ffi/dequantize.h"
#include "common/ffi/encode_moment.h"
#include "common/ffi/histories.h"
#include "common/ffi/quantize.h"
#include "common/ffi/quantize_transpose.h"
#include "common/ffi/readings.h"
#include "cpu/ffi/decode_moment.h"
#include "cpu/ffi/quantize_blocks_transpose.h"
#include "cpu/ffi/reading_numbers.h"
#include "cpu/ffi/undo_factors.h"
#include "cpu/kernels/amax.h"
#include "cpu/kernels/amax_to_scale.h"
#include "cpu/kernels/delayed_scales.h"
#include "cpu/kernels/dequantize.h"
#include "cpu/kernels/moments.h"
#include "cpu/kernels/quantize.h"
#include "cpu/kernels/quantize_blocks_transpose.h"
#include "cpu/kernels/quantize_transpose.h"
#include "cpu/kernels/read_histories.h"
#include "cpu/kernels/reading_numbers.h"
#include "cpu/kernels/task_pool.h"
#include "cpu/kernels/undo_factors.h"
#include "cpu/kernels/write_histories.h"

namespace jaxfp8::cpu {
namespace {

// XLA's intra-op pool. It counts only pool threads: a handler's own thread is usually one more.
class XlaTaskPool final : public TaskPool {
 public:
  explicit XlaTaskPool(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// A handler whose launcher runs on the calling thread.
template <class Op, auto kLaunch>
constexpr auto kSerial = [](auto... buffers) -> ffi::Error {
  typename Op::Params params = {};
  JAXFP8_RETURN_IF_ERROR(Op::ToParams(buffers..., &params));
  kLaunch(params);
  return ffi::Error::Success();
};

// A handler whose launcher cuts its work for XLA's thread pool.
template <class Op, auto kLaunch>
constexpr auto kParallel = [](ffi::ThreadPool pool, auto... buffers) -> ffi::Error {
  typename Op::Params params = {};
  JAXFP8_RETURN_IF_ERROR(Op::ToParams(buffers..., &params));
  XlaTaskPool tasks(pool);
  kLaunch(tasks, params);
  return ffi::Error::Success();
};

}  // namespace

#define JAXFP8_ON_THREAD(name, Op, launch) \
  JAXFP8_DEFINE_HANDLER_SYMBOL(name, (kSerial<Op, launch>), Op::Bind(ffi::Ffi::Bind()))
#define JAXFP8_ON_POOL(name, Op, launch) \
  JAXFP8_DEFINE_HANDLER_SYMBOL(name, (kParallel<Op, launch>), Op::Bind(ffi::Ffi::Bind().Ctx<ffi::ThreadPool>()))

JAXFP8_ON_POOL(jaxfp8_adam_update_v1, AdamUpdateOp, AdamUpdate);
JAXFP8_ON_POOL(jaxfp8_amax_v1, AmaxOp, Amax);
JAXFP8_ON_THREAD(jaxfp8_amax_to_scale_v1, AmaxToScaleOp, AmaxToScale);
JAXFP8_ON_POOL(jaxfp8_decode_moment_v1, DecodeMomentOp, DecodeMoment);
JAXFP8_ON_THREAD(jaxfp8_delayed_scales_v3, DelayedScalesOp, DelayedScales);
JAXFP8_ON_POOL(jaxfp8_dequantize_v1, DequantizeOp, Dequantize);
JAXFP8_ON_POOL(jaxfp8_encode_moment_v1, EncodeMomentOp, EncodeMoment);
JAXFP8_ON_THREAD(jaxfp8_join_recorded_v1, JoinRecordedOp, JoinRecorded);
JAXFP8_ON_POOL(jaxfp8_quantize_v3, QuantizeOp, Quantize);
JAXFP8_ON_POOL(jaxfp8_quantize_blocks_transpose_v2, QuantizeBlocksTransposeOp, QuantizeBlocksTranspose);
JAXFP8_ON_POOL(jaxfp8_quantize_transpose_v3, QuantizeTransposeOp, QuantizeTranspose);
JAXFP8_ON_THREAD(jaxfp8_read_histories_v3, ReadHistoriesOp, ReadHistories);
JAXFP8_ON_THREAD(jaxfp8_split_reading_v1, SplitReadingOp, SplitReading);
JAXFP8_ON_THREAD(jaxfp8_undo_factors_v1, UndoFactorsOp, UndoFactors);
JAXFP8_ON_THREAD(jaxfp8_write_histories_v5, WriteHistoriesOp, WriteHistories);

}  // namespace jaxfp8::cpu
