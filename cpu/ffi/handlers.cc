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
#include "common/ffi/transpose_blocks.h"
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
#include "cpu/kernels/transpose_blocks.h"
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

auto OnThread() { return ffi::Ffi::Bind(); }
auto OnPool() { return ffi::Ffi::Bind().Ctx<ffi::ThreadPool>(); }

}  // namespace

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_adam_update_v1, (kParallel<AdamUpdateOp, AdamUpdate>),
                             AdamUpdateOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_v1, (kParallel<AmaxOp, Amax>), AmaxOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_to_scale_v1, (kSerial<AmaxToScaleOp, AmaxToScale>),
                             AmaxToScaleOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_decode_moment_v1, (kParallel<DecodeMomentOp, DecodeMoment>),
                             DecodeMomentOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_delayed_scales_v3, (kSerial<DelayedScalesOp, DelayedScales>),
                             DelayedScalesOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_dequantize_v1, (kParallel<DequantizeOp, Dequantize>),
                             DequantizeOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_encode_moment_v1, (kParallel<EncodeMomentOp, EncodeMoment>),
                             EncodeMomentOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_join_recorded_v1, (kSerial<JoinRecordedOp, JoinRecorded>),
                             JoinRecordedOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_v3, (kParallel<QuantizeOp, Quantize>), QuantizeOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_blocks_transpose_v2,
                             (kParallel<QuantizeBlocksTransposeOp, QuantizeBlocksTranspose>),
                             QuantizeBlocksTransposeOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v3, (kParallel<QuantizeTransposeOp, QuantizeTranspose>),
                             QuantizeTransposeOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_read_histories_v3, (kSerial<ReadHistoriesOp, ReadHistories>),
                             ReadHistoriesOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_split_reading_v1, (kSerial<SplitReadingOp, SplitReading>),
                             SplitReadingOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_transpose_blocks_v1, (kParallel<TransposeBlocksOp, TransposeBlocks>),
                             TransposeBlocksOp::Bind(OnPool()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_undo_factors_v1, (kSerial<UndoFactorsOp, UndoFactors>),
                             UndoFactorsOp::Bind(OnThread()));
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_write_histories_v5, (kSerial<WriteHistoriesOp, WriteHistories>),
                             WriteHistoriesOp::Bind(OnThread()));

}  // namespace jaxfp8::cpu
