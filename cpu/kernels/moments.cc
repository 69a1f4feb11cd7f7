// The launchers of decode_moment, encode_moment and adam_update: chunks of blocks.
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

constexpr int64_t kBlocks = SpanChunks::kElements / kMomentBlock;  // of a chunk

template <class Params>
void ForEachChunk(TaskPool& pool, const Params& params, void (*kernel)(const Params&, int64_t, int64_t)) {
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

// The chunks of all leaves, in the order of the leaves.
void AdamUpdate(TaskPool& pool, const AdamUpdateParams& params) {
  int64_t ends[kMaxLeaves], chunks = 0;
  for (int64_t i = 0; i < params.count; ++i) {
    const AdamLeaf& leaf = params.leaves[i];
    PrepareResult(leaf.out, leaf.rows * leaf.n * sizeof(float));
    PrepareResult(leaf.mu.next_data, leaf.rows * leaf.n);
    PrepareResult(leaf.nu.next_data, leaf.rows * leaf.n);
    ends[i] = chunks += CeilDiv(leaf.rows * CeilDiv(leaf.n, kMomentBlock), kBlocks);
  }
  ParallelFor(pool, chunks, [&](int64_t index) {
    const int64_t i = std::upper_bound(ends, ends + params.count, index) - ends;
    const AdamLeaf& leaf = params.leaves[i];
    const int64_t begin = (index - (i == 0 ? 0 : ends[i - 1])) * kBlocks;
    const ScopedFlush flush;
    Kernels().adam_update(leaf, begin, std::min(leaf.rows * CeilDiv(leaf.n, kMomentBlock), begin + kBlocks));
  });
}

}  // namespace jaxfp8::cpu
