// adam_update: both moments of a block by the lanes of cuda/common/moment.h, from codes to codes in registers.
//
// A CUDA block takes tiles of 32 blocks of one leaf, so that what differs between leaves is the same for its threads.
//
// Results may be operands: a lane writes elements and codes that it has read itself, the first of the eight the amaxes
// and the exponents.
#include "cuda/kernels/adam_update.h"

#include <cuda_runtime.h>

#include <cstdint>

#include "common/adam.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/moment.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

constexpr uint32_t kBlocksOfTile = kWarpsPerBlock * kMomentsOfWarp;

struct AdamTiles {
  AdamUpdateParams params;
  uint32_t ends[kMaxLeaves];  // of the tiles of leaf after leaf
  bool wide[kMaxLeaves];      // vectors of a lane are whole and aligned
};
static_assert(sizeof(AdamTiles) <= 4096);

// The elements of a lane; zeros from element `count` on.
__device__ __forceinline__ void ReadElements(const float* x, int count, bool wide, Floats& to) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    const float* place = x + v * kSpan;
    to[v] = {};
    if (wide) {
      if (v * kSpan < count) to[v] = LoadWritten16(place);
      continue;
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (v * kSpan + i < count) to[v].words[i] = FloatToBits(place[i]);
    }
  }
}

// The moment of a block before and after the step, for a lane.
template <bool kSquared>
class Moment {
 public:
  Codes codes;
  Floats after;

  __device__ __forceinline__ Moment(const AdamMoment& moment, uint32_t block, bool is_inside, int64_t offset, int count,
                                    bool wide) {
    if (wide) {
      ReadCodes<true>(moment.data + offset, count, codes);
    } else {
      ReadCodes<false>(moment.data + offset, count, codes);
    }
    const bool is_first = is_inside && threadIdx.x % kLanes == 0;
    const float amax = is_first ? moment.amax[block] : 0.0f;
    const int8_t exponent = is_first ? moment.exponent[block] : int8_t{0};
    // Amaxes have no sign. What NextMu and NextNu make of products below 2^-126 is zero, subnormal or not.
    amax_ = BitsToFloat(OverBlock(FloatToBits(amax) & kAbsMask));
    exponent_ = static_cast<int>(OverBlock(is_first ? exponent + 128u : 0u)) - 128;
  }

  __device__ __forceinline__ void Decode(int v, const Fractions<256>& fractions, float (&x)[kVector]) const {
    const float* table = fractions.Of(exponent_);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      x[i] = __fmul_rn(table[codes[v] >> (8 * i) & 0xffu], amax_);
    }
    // A byte is 0xff where its lower bits become a sign and it has one itself.
    if (kSquared && (((codes[v] & 0x7f7f7f7fu) + 0x01010101u) & codes[v] & 0x80808080u) != 0) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if ((codes[v] >> (8 * i) & 0xffu) == 0xffu) x[i] = BitsToFloat(kInfBits);
      }
    }
  }

  __device__ __forceinline__ void Encode(const AdamMoment& moment, uint32_t block, bool is_inside, int64_t offset,
                                         int count, bool wide, const Fractions<256>& fractions) {
    const MomentEncoder<true, kSquared> encoder(after);
    const uint32_t key = is_inside ? Load<4>(moment.keys + block).words[0] : 0;
    encoder.Encode(after, fractions.Of(encoder.exponent), key, codes);
    if (wide) {
      WriteCodes<true>(moment.next_data + offset, count, codes);
    } else {
      WriteCodes<false>(moment.next_data + offset, count, codes);
    }
    if (is_inside && threadIdx.x % kLanes == 0) {
      moment.next_amax[block] = encoder.top;
      moment.next_exponent[block] = static_cast<int8_t>(encoder.exponent);
    }
  }

 private:
  float amax_;
  int exponent_;
};

__device__ __forceinline__ AdamHyper LoadHyper(const float* row) {
  const auto load = [&](int i) { return BitsToFloat(Load<4>(row + i).words[0]); };
  return {load(0), load(1), load(2), load(3), load(4), load(5), load(6), load(7), load(8), load(9), load(10)};
}

template <bool kApply>
__global__ void __launch_bounds__(kBlockSize, 3) AdamUpdateKernel(const __grid_constant__ AdamTiles tiles) {
  __shared__ Fractions<256> fractions;
  fractions.Fill();
  __syncthreads();
  const uint32_t lane = threadIdx.x % kLanes, end = tiles.ends[tiles.params.count - 1];
  for (uint32_t tile = blockIdx.x; tile < end; tile += gridDim.x) {
    // 1. The block of these lanes. Behind those of the leaf lanes have no elements.
    int index = 0;
    while (tile >= tiles.ends[index]) ++index;
    const AdamLeaf& leaf = tiles.params.leaves[index];
    const bool wide = tiles.wide[index];
    const uint32_t first = index == 0 ? 0 : tiles.ends[index - 1];
    const uint32_t block = (tile - first) * kBlocksOfTile + threadIdx.x / kLanes;
    const uint32_t across = static_cast<uint32_t>((leaf.n - 1) / kMomentBlock) + 1;
    const uint32_t row = block / across, column = block - row * across;
    const bool is_inside = row < leaf.rows;
    const int64_t start = column * kMomentBlock + lane * kVector, rest = leaf.n - start;
    const int64_t offset = row * leaf.n + start;
    const int count = !is_inside || rest < 0 ? 0 : static_cast<int>(rest < kMomentBlock ? rest : kMomentBlock);

    // 2. Read.
    Floats grads, params;
    ReadElements(leaf.grads + offset, count, wide, grads);
    if constexpr (kApply) ReadElements(leaf.params + offset, count, wide, params);
    Moment<false> mu(leaf.mu, block, is_inside, offset, count, wide);
    Moment<true> nu(leaf.nu, block, is_inside, offset, count, wide);
    const uint32_t rows_per_hyper = static_cast<uint32_t>(leaf.rows_per_hyper);
    const uint32_t hyper_row = !is_inside || rows_per_hyper == leaf.rows ? 0 : row / rows_per_hyper;
    const AdamHyper hyper = LoadHyper(leaf.hyper + hyper_row * kAdamHypers);

    // 3. Average, and write the update or the parameters.
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      float old_mu[kVector], old_nu[kVector];
      mu.Decode(v, fractions, old_mu);
      nu.Decode(v, fractions, old_nu);
      Bytes<4 * kVector> out;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float grad = AdamGrad(hyper, BitsToFloat(grads[v].words[i]));
        const float next_mu = NextMu(hyper, old_mu[i], grad), next_nu = NextNu(hyper, old_nu[i], grad);
        float result = AdamUpdate(hyper, next_mu, next_nu);
        if constexpr (kApply) result = AdamApply(hyper, result, FlushInput(BitsToFloat(params[v].words[i])));
        out.words[i] = FloatToBits(result);
        mu.after[v].words[i] = FloatToBits(EncodedMu(next_mu));
        nu.after[v].words[i] = FloatToBits(EncodedNu(next_nu));
      }
      float* place = leaf.out + offset + v * kSpan;
      if (wide && v * kSpan < count) Store<4 * kVector>(place, out);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!wide && v * kSpan + i < count) place[i] = BitsToFloat(out.words[i]);
      }
    }

    // 4. Encode.
    mu.Encode(leaf.mu, block, is_inside, offset, count, wide, fractions);
    nu.Encode(leaf.nu, block, is_inside, offset, count, wide, fractions);
  }
}

bool IsWide(const AdamLeaf& leaf) {
  for (const void* floats : {leaf.grads, leaf.params, static_cast<const float*>(leaf.out)}) {
    if (!IsAligned(floats, 4 * kVector)) return false;
  }
  for (const AdamMoment& moment : {leaf.mu, leaf.nu}) {
    if (!IsAligned(moment.data, kVector) || !IsAligned(moment.next_data, kVector)) return false;
  }
  return leaf.n % kVector == 0;
}

}  // namespace

cudaError_t LaunchAdamUpdate(const AdamUpdateParams& params, cudaStream_t stream) {
  constexpr int64_t kMostBlocks = int64_t{1} << 31;  // of a leaf: kernels count them in 32 bits
  AdamTiles tiles = {params, {}, {}};
  int64_t end = 0;
  for (int64_t i = 0; i < params.count; ++i) {
    const AdamLeaf& leaf = params.leaves[i];
    const int64_t blocks = leaf.rows * (leaf.n / kMomentBlock + (leaf.n % kMomentBlock != 0));
    if (blocks > kMostBlocks) return cudaErrorInvalidValue;
    end += (blocks + kBlocksOfTile - 1) / kBlocksOfTile;
    tiles.ends[i] = static_cast<uint32_t>(end);
    tiles.wide[i] = IsWide(leaf);
  }
  if (end == 0) return cudaSuccess;
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const int64_t most = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  return Launch(params.apply ? AdamUpdateKernel<true> : AdamUpdateKernel<false>, end < most ? end : most, kBlockSize,
                stream, tiles);
}

}  // namespace jaxfp8::cuda
