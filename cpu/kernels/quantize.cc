// The quantize launcher.
#include "cpu/kernels/quantize.h"

#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {

void Quantize(TaskPool& pool, Dtype in, Dtype format, const void* x, Scales scales, int64_t groups, int64_t size,
              uint8_t* data, const float* amax_so_far, float* amax) {
  StartAmax(amax, amax_so_far, groups);
  const int64_t width = ByteWidth(in);
  const Store store = StoreFor(groups * size, kStreamedSpan);
  PrepareResult(data, groups * size);
  const SpanChunks chunks(groups, size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const float scale = scales[group];
      const int64_t offset = group * size + chunk.begin;
      const auto kernel = KernelsForQuantize(scale).quantize[HighPrecisionIndex(in)][Fp8Index(format)];
      const void* span = static_cast<const char*>(x) + offset * width;
      const uint32_t bits = kernel(span, scale, data + offset, chunk.end - chunk.begin, store);
      if (amax != nullptr) RaiseAmax(&amax[group], bits);
    }
  });
}

}  // namespace jaxfp8::cpu
