// ParallelFor does every chunk once, and never waits for a task that has not started.
#include "cpu/kernels/parallel_for.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "tests/native/check.h"

namespace {

using jaxfp8::cpu::ParallelFor;
using jaxfp8::cpu::TaskPool;

// A pool whose threads are all busy for ever: it keeps tasks until the test runs them.
class BusyPool final : public TaskPool {
 public:
  int64_t num_threads() const override { return 8; }
  void Schedule(std::function<void()> task) override { tasks.push_back(std::move(task)); }

  std::vector<std::function<void()>> tasks;
};

// Every task gets a thread of its own, after a delay.
class ThreadPerTask final : public TaskPool {
 public:
  explicit ThreadPerTask(std::chrono::microseconds delay) : delay_(delay) {}
  ~ThreadPerTask() override {
    for (std::thread& thread : threads_) thread.join();
  }
  int64_t num_threads() const override { return 4; }
  void Schedule(std::function<void()> task) override {
    const std::lock_guard<std::mutex> lock(mutex_);
    threads_.emplace_back([task = std::move(task), delay = delay_] {
      std::this_thread::sleep_for(delay);
      task();
    });
  }

 private:
  std::chrono::microseconds delay_;
  std::mutex mutex_;
  std::vector<std::thread> threads_;
};

// The vector is gone when late tasks run: a sanitizer sees them touch it.
void CheckEveryChunkOnce(TaskPool& pool, int64_t count) {
  const auto times = std::make_unique<std::vector<std::atomic<int>>>(count);
  ParallelFor(pool, count, [&](int64_t i) { ++(*times)[i]; });
  bool once = true;
  for (const std::atomic<int>& n : *times) once = once && n == 1;
  CHECK(once);
}

}  // namespace

int main() {
  {
    BusyPool pool;
    for (int64_t count : {0, 1, 2, 1000}) CheckEveryChunkOnce(pool, count);
    CHECK(!pool.tasks.empty());
    for (const auto& task : pool.tasks) task();
  }
  for (int delay : {0, 20, 2000}) {
    ThreadPerTask pool{std::chrono::microseconds(delay)};
    for (int repeat = 0; repeat < 30; ++repeat) CheckEveryChunkOnce(pool, 1 + repeat * 7);
  }
  {
    // Two loops at once, one inside the other, on one busy pool.
    BusyPool pool;
    std::atomic<int> calls{0};
    ParallelFor(pool, 3, [&](int64_t) { ParallelFor(pool, 5, [&](int64_t) { ++calls; }); });
    CHECK(calls == 15);
  }
  return jaxfp8::test::Summary();
}
