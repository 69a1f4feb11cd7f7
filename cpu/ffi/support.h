// What every handler needs: XLA's thread pool and the scales in the launchers' terms.
#ifndef JAXFP8_CPU_FFI_SUPPORT_H_
#define JAXFP8_CPU_FFI_SUPPORT_H_

#include <cstdint>
#include <functional>
#include <utility>

#include "common/checks.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

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

// Of a buffer that has passed CheckScale.
inline Scales ToScales(ffi::AnyBuffer buffer) {
  return {static_cast<const float*>(buffer.untyped_data()), buffer.dimensions()[0]};
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_SUPPORT_H_
