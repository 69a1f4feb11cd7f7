// What the launchers need of a thread pool, without XLA types.
#ifndef JAXFP8_CPU_KERNELS_TASK_POOL_H_
#define JAXFP8_CPU_KERNELS_TASK_POOL_H_

#include <cstdint>
#include <functional>

namespace jaxfp8::cpu {

class TaskPool {
 public:
  virtual ~TaskPool() = default;
  virtual int64_t num_threads() const = 0;
  // Runs `task` at some later time, on some thread; perhaps only after the launcher that scheduled it has returned.
  virtual void Schedule(std::function<void()> task) = 0;
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_TASK_POOL_H_
