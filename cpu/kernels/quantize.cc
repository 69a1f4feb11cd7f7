// The quantize launcher.
#include "cpu/kernels/quantize.h"

#include "cpu/kernels/amax_cell.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {

void Quantize(TaskPool& pool, const QuantizeParams& params) {
  StartAmax(params.amax, params.amax_so_far, AmaxCount(params.amax_stride, params.groups));
  const int64_t width = ByteWidth(params.dtype);
  const int64_t bytes = params.groups * params.size;
  const Store store = StoreFor(bytes, kStreamedSpan);
  PrepareResult(params.data, bytes);
  const auto* x = static_cast<const char*>(params.x);
  auto* data = static_cast<uint8_t*>(params.data);
  const SpanChunks chunks(params.groups, params.size);
  ParallelFor(pool, chunks.count(), [&](int64_t index) {
    const ScopedIeee ieee;
    const SpanChunks::Chunk chunk = chunks.At(index);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      const float scale = params.scale[group * params.scale_stride];
      const int64_t offset = group * params.size + chunk.begin;
      const auto& kernels = KernelsForQuantize(scale).quantize[HighPrecisionIndex(params.dtype)];
      const auto kernel = kernels[Fp8Index(params.format)];
      const uint32_t bits = kernel(x + offset * width, scale, data + offset, chunk.end - chunk.begin, store);
      if (params.amax != nullptr) RaiseAmax(&params.amax[group * params.amax_stride], bits);
    }
  });
}

}  // namespace jaxfp8::cpu
