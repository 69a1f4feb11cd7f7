// A parallel for that cannot deadlock: the calling thread claims chunks like every other, and waits for nobody who has
// not started.
#ifndef JAXFP8_CPU_KERNELS_PARALLEL_FOR_H_
#define JAXFP8_CPU_KERNELS_PARALLEL_FOR_H_

#include <cstdint>
#include <functional>

#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// Calls body(i) once for every i in [0, count) and returns when all calls have returned. Several calls run at once.
void ParallelFor(TaskPool& pool, int64_t count, const std::function<void(int64_t)>& body);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_PARALLEL_FOR_H_
