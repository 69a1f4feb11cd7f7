// The amax launcher.
#include "cpu/kernels/amax.h"

#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"

namespace jaxfp8::cpu {

void Amax(TaskPool& pool, Dtype dtype, const void* x, int64_t groups, int64_t size, float* amax) {
  ClearAmax(amax, groups);
  const int64_t width = ByteWidth(dtype);
  const auto kernel = Kernels().amax[HighPrecisionIndex(dtype)];
  const SpanChunks chunks(groups, size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const int64_t offset = group * size + chunk.begin;
      RaiseAmax(&amax[group], kernel(static_cast<const char*>(x) + offset * width, chunk.end - chunk.begin));
    }
  });
}

}  // namespace jaxfp8::cpu
