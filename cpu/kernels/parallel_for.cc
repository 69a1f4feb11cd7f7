// Chunks are claimed from an atomic counter, by the caller and by scheduled tasks.
//
// XLA runs handlers on threads of the very pool they schedule on. A handler that waits for its *tasks* deadlocks as
// soon as every thread of the pool is such a handler. Here the caller waits only for *chunks that a running thread has
// claimed*: with no thread free it does all the work itself. A task that starts late finds nothing to claim; it touches
// only the shared counter, never `body`, which may be gone by then.
#include "cpu/kernels/parallel_for.h"

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <memory>
#include <mutex>

#include "cpu/kernels/chunks.h"

namespace jaxfp8::cpu {
namespace {

struct Loop {
  Loop(int64_t count, int64_t lanes, const std::function<void(int64_t)>& body)
      : order(count, lanes), tickets(order.tickets()), body(&body) {}

  void Work() {
    int64_t finished = 0;
    for (int64_t ticket; (ticket = next.fetch_add(1, std::memory_order_relaxed)) < tickets; ++finished) {
      const int64_t index = order.At(ticket);
      if (index >= 0) (*body)(index);
    }
    if (finished == 0) return;
    // The release half publishes this thread's results, the acquire half in Wait() makes them visible to the caller.
    if (done.fetch_add(finished, std::memory_order_acq_rel) + finished == tickets) {
      std::lock_guard<std::mutex> lock(mutex);
      all_done.notify_one();
    }
  }

  void Wait() {
    if (done.load(std::memory_order_acquire) == tickets) return;
    std::unique_lock<std::mutex> lock(mutex);
    all_done.wait(lock, [this] { return done.load(std::memory_order_acquire) == tickets; });
  }

  const LaneOrder order;
  const int64_t tickets;
  const std::function<void(int64_t)>* const body;
  std::atomic<int64_t> next{0};
  std::atomic<int64_t> done{0};
  std::mutex mutex;
  std::condition_variable all_done;
};

}  // namespace

void ParallelFor(TaskPool& pool, int64_t count, const std::function<void(int64_t)>& body) {
  const int64_t threads = std::min(pool.num_threads(), count);
  if (threads <= 1) {
    for (int64_t i = 0; i < count; ++i) body(i);
    return;
  }
  const auto loop = std::make_shared<Loop>(count, threads, body);
  for (int64_t i = 1; i < threads; ++i) pool.Schedule([loop] { loop->Work(); });
  loop->Work();
  loop->Wait();
}

}  // namespace jaxfp8::cpu
