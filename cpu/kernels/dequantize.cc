// The dequantize launcher.
#include "cpu/kernels/dequantize.h"

#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {

void Dequantize(TaskPool& pool, const DequantizeParams& params) {
  const int64_t width = ByteWidth(params.dtype);
  const int64_t bytes = params.groups * params.size * width;
  const Store store = StoreFor(bytes, kStreamedSpan);
  PrepareResult(params.out, bytes);
  const auto* data = static_cast<const uint8_t*>(params.data);
  auto* out = static_cast<char*>(params.out);
  const SpanChunks chunks(params.groups, params.size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const float scale_inv = params.scale_inv[group * params.scale_stride];
      const int64_t offset = group * params.size + chunk.begin;
      const auto& kernels = KernelsForDequantize(scale_inv).dequantize[Fp8Index(params.format)];
      const auto kernel = kernels[HighPrecisionIndex(params.dtype)];
      kernel(data + offset, scale_inv, out + offset * width, chunk.end - chunk.begin, store);
    }
  });
}

}  // namespace jaxfp8::cpu
