// The amax launcher.
#include "cpu/kernels/amax.h"

#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"

namespace jaxfp8::cpu {

void Amax(TaskPool& pool, const AmaxParams& params) {
  ClearAmax(params.amax, params.groups);
  const int64_t width = ByteWidth(params.dtype);
  const auto kernel = Kernels().amax[HighPrecisionIndex(params.dtype)];
  const SpanChunks chunks(params.groups, params.size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const void* span = static_cast<const char*>(params.x) + (group * params.size + chunk.begin) * width;
      RaiseAmax(&params.amax[group], kernel(span, chunk.end - chunk.begin));
    }
  });
}

}  // namespace jaxfp8::cpu
