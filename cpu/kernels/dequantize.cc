// The dequantize launcher.
#include "cpu/kernels/dequantize.h"

#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {

void Dequantize(TaskPool& pool, Dtype format, Dtype out_dtype, const uint8_t* data, Scales scale_invs, int64_t groups,
                int64_t size, void* out) {
  const int64_t width = ByteWidth(out_dtype);
  const Store store = StoreFor(groups * size * width, kStreamedSpan);
  PrepareResult(out, groups * size * width);
  const SpanChunks chunks(groups, size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const float scale_inv = scale_invs[group];
      const int64_t offset = group * size + chunk.begin;
      const auto kernel = KernelsForDequantize(scale_inv).dequantize[Fp8Index(format)][HighPrecisionIndex(out_dtype)];
      kernel(data + offset, scale_inv, static_cast<char*>(out) + offset * width, chunk.end - chunk.begin, store);
    }
  });
}

}  // namespace jaxfp8::cpu
