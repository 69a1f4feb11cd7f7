// The launchers of decode_moment and encode_moment: chunks of blocks.
#include "cpu/kernels/moments.h"

#include <algorithm>

#include "common/moment.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/parallel_for.h"
#include "cpu/kernels/results.h"

namespace jaxfp8::cpu {
namespace {

template <class Params>
void ForEachChunk(TaskPool& pool, const Params& params, void (*kernel)(const Params&, int64_t, int64_t)) {
  constexpr int64_t kBlocks = SpanChunks::kElements / kMomentBlock;
  const int64_t blocks = params.rows * CeilDiv(params.n, kMomentBlock);
  ParallelFor(pool, CeilDiv(blocks, kBlocks), [&](int64_t index) {
    const ScopedFlush flush;
    kernel(params, index * kBlocks, std::min(blocks, (index + 1) * kBlocks));
  });
}

}  // namespace

void DecodeMoment(TaskPool& pool, const DecodeMomentParams& params) {
  PrepareResult(params.out, params.rows * params.n * sizeof(float));
  ForEachChunk(pool, params, Kernels().decode_moment);
}

void EncodeMoment(TaskPool& pool, const EncodeMomentParams& params) {
  PrepareResult(params.next_data, params.rows * params.n);
  ForEachChunk(pool, params, Kernels().encode_moment);
}

}  // namespace jaxfp8::cpu
