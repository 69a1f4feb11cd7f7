// What every handler needs: XLA's dtypes and thread pool in the launchers' terms, and exported symbols.
#ifndef JAXFP8_CPU_FFI_SUPPORT_H_
#define JAXFP8_CPU_FFI_SUPPORT_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "common/checks.h"
#include "common/dispatch.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

// Before XLA_FFI_DEFINE_HANDLER_SYMBOL(name, ...): everything else in the library is hidden.
#define JAXFP8_EXPORT_HANDLER(name) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame)

namespace jaxfp8::cpu {

// XLA's intra-op pool. It counts only pool threads: a handler's own thread is usually one more.
class XlaTaskPool final : public TaskPool {
 public:
  explicit XlaTaskPool(ffi::ThreadPool& pool) : pool_(pool) {}
  int64_t num_threads() const override { return pool_.num_threads(); }
  void Schedule(std::function<void()> task) override { pool_.Schedule(std::move(task)); }

 private:
  ffi::ThreadPool& pool_;
};

// Of a dtype that has passed CheckHighPrecision or CheckFp8.
inline Dtype ToDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16: return Dtype::kBF16;
    case ffi::DataType::F16: return Dtype::kF16;
    case ffi::DataType::F8E4M3FN: return Dtype::kE4M3;
    case ffi::DataType::F8E5M2: return Dtype::kE5M2;
    default: return Dtype::kF32;
  }
}

// Of a buffer that has passed CheckScale.
inline Scales ToScales(ffi::AnyBuffer buffer) {
  return {static_cast<const float*>(buffer.untyped_data()), buffer.dimensions()[0]};
}

// A result that is f32[groups].
inline ffi::Error CheckAmax(const Operand& amax, int64_t groups) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(amax, {ffi::DataType::F32}));
  return CheckShape(amax, {groups});
}

// x: of `rank`, and small enough that neither it nor a result of the same shape overflows 64 bits.
inline ffi::Error CheckInput(const Operand& x, size_t rank) {
  JAXFP8_RETURN_IF_ERROR(CheckRank(x, rank));
  return CheckSize(x, sizeof(float));
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_SUPPORT_H_
