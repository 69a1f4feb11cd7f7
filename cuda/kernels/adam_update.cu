// adam_update: both moments of a block by the lanes of cuda/common/moment.h, from codes to codes in registers.
//
// A CUDA block takes tiles of 32 blocks of one leaf, so that what differs between leaves is the same for its threads.
//
// Results may be operands: a lane writes elements and codes that it has read itself, the first of the eight the amaxes
// and the exponents.
#include "cuda/kernels/adam_update.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

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

// AdamMath where it flushes nothing: of steps that IsPlain accepts, to moments that are plain. Terms that it makes zeros are
// less than a quarter of the last bit of a sum then, or both are, and the sum is not plain; or the sum is 0.
struct PlainMath {
  static __device__ __forceinline__ float Input(float x) { return x; }
  // Not -0: AdamMath makes zeros positive.
  static __device__ __forceinline__ float Term(float x, float y) { return __fmaf_rn(x, y, 0.0f); }
  static __device__ __forceinline__ float Square(float x, float y) { return __fmul_rn(x, y); }
  static __device__ __forceinline__ float SquareRoot(float x) { return PlainRoot(x); }
  static __device__ __forceinline__ float Quotient(float x, float y) { return PlainQuotient(x, y); }
};

// Whether a step of plain moments has plain terms. From 2^-38 on eps is the same less 2^-63, which stands for a root of 0.
__device__ __forceinline__ bool IsPlain(const AdamHyper& hyper) {
  const auto is_within = [](float x, float least, float most) { return least <= x && x <= most; };
  return is_within(hyper.a1, 0.0f, 1.0f) && is_within(hyper.a2, 0.0f, 1.0f) && is_within(hyper.b1, 0x1p-20f, 1.0f) &&
         is_within(hyper.b2, 0.0f, 1.0f) && is_within(hyper.factor, 0.0f, 1.0f) &&
         is_within(hyper.c1, 1.0f, 0x1p18f) && is_within(hyper.c2, 1.0f, 0x1p18f) &&
         (hyper.eps_root == 0.0f ? is_within(hyper.eps, 0x1p-38f, 1.0f)
                                 : is_within(hyper.eps_root, 0x1p-96f, 1.0f) && is_within(hyper.eps, 0.0f, 1.0f)) &&
         (hyper.decay == 0.0f || is_within(fabsf(hyper.decay), 0x1p-40f, 1.0f));
}

// Vector v of a lane; `filling` from element `count` on.
template <bool kWide>
__device__ __forceinline__ Bytes<4 * kVector> ReadVector(const float* x, int v, int count, float filling) {
  const float* place = x + v * kSpan;
  Bytes<4 * kVector> vector;
#pragma unroll
  for (uint32_t& word : vector.words) word = FloatToBits(filling);
  if (kWide && v * kSpan < count) vector = LoadWritten16(place);
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    if (!kWide && v * kSpan + i < count) vector.words[i] = FloatToBits(place[i]);
  }
  return vector;
}

// What a lane has of a block.
struct Place {
  uint32_t block;
  int64_t offset;  // of its first element in the leaf
  int count;       // of elements from that one on

  // Of the lanes of a block that the leaf has.
  __device__ __forceinline__ bool IsFirst() const { return count > 0 && threadIdx.x % kLanes == 0; }
};

// The moment of a block before and after the step, for a lane.
template <bool kPlain, bool kSquared>
class Moment {
 public:
  Codes codes;
  Floats after;
  MomentEncoder<kPlain, true, kSquared> encoder;

  __device__ __forceinline__ Moment(const AdamMoment& moment, const Place& place) {
    ReadCodes<kPlain>(moment.data + place.offset, place.count, codes);
    const float amax = place.IsFirst() ? moment.amax[place.block] : 0.0f;
    const int8_t exponent = place.IsFirst() ? moment.exponent[place.block] : int8_t{0};
    // Amaxes have no sign. What NextMu and NextNu make of products below 2^-126 is zero, subnormal or not.
    amax_ = BitsToFloat(OfFirst(FloatToBits(amax) & kAbsMask));
    exponent_ = static_cast<int>(OfFirst(static_cast<uint32_t>(exponent)));
  }

  // Whether a term of it is 0 only where the code is that of 0.
  __device__ __forceinline__ bool IsPlain() const { return amax_ == 0.0f || amax_ >= 0x1p-60f; }

  __device__ __forceinline__ void Decode(int v, const Fractions<256>& fractions, float (&x)[kVector]) const {
    const float* table = fractions.Of(exponent_);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const uint32_t place = (i == 0 ? codes[v] << 2 : codes[v] >> (8 * i - 2)) & 0x3fcu;
      x[i] = __fmul_rn(LoadSharedAt(table, place), amax_);
    }
  }

  // A byte is 0xff where its lower bits become a sign and it has one itself.
  __device__ __forceinline__ void DecodeInfinities(int v, float (&x)[kVector]) const {
    if ((((codes[v] & 0x7f7f7f7fu) + 0x01010101u) & codes[v] & 0x80808080u) == 0) return;
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if ((codes[v] >> (8 * i) & 0xffu) == 0xffu) x[i] = BitsToFloat(kInfBits);
    }
  }

  __device__ __forceinline__ void Encode(const AdamMoment& moment, const Place& place, const CodeSteps& steps) {
    if constexpr (!kPlain) encoder.Find(after);
    const uint32_t key = place.count > 0 ? Load<4>(moment.keys + place.block).words[0] : 0;
    encoder.Encode(after, steps.Of(encoder.exponent), key, encoder.AnyRoots(), codes);
    WriteCodes<kPlain>(moment.next_data + place.offset, place.count, codes);
    if (place.IsFirst()) {
      moment.next_amax[place.block] = encoder.top;
      moment.next_exponent[place.block] = static_cast<int8_t>(encoder.exponent);
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

// Takes the step of the blocks of a warp. With kPlain of blocks that are plain, or writes nothing and returns false.
template <bool kApply, bool kPlain>
__device__ __forceinline__ bool Step(const AdamLeaf& leaf, const float* numbers, const Place& place,
                                     const Fractions<256>& fractions, const CodeSteps& steps) {
  using Math = std::conditional_t<kPlain, PlainMath, AdamMath>;
  // 1. Read.
  Floats grads;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    grads[v] = ReadVector<kPlain>(leaf.grads + place.offset, v, place.count, 0.0f);
  }
  Moment<kPlain, false> mu(leaf.mu, place);
  Moment<kPlain, true> nu(leaf.nu, place);
  const AdamHyper hyper = LoadHyper(numbers);

  // 2. Average.
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    float old_mu[kVector], old_nu[kVector];
    mu.Decode(v, fractions, old_mu);
    nu.Decode(v, fractions, old_nu);
    if constexpr (!kPlain) nu.DecodeInfinities(v, old_nu);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float grad = AdamGrad<Math>(hyper, BitsToFloat(grads[v].words[i]));
      mu.after[v].words[i] = FloatToBits(NextMu<Math>(hyper, old_mu[i], grad));
      nu.after[v].words[i] = FloatToBits(NextNu<Math>(hyper, old_nu[i], grad));
    }
  }

  // 3. Write the update or the parameters. Gradients and parameters would be more than there are registers for.
  Floats params;
  if constexpr (kPlain) {
    float least_param = 1.0f;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      if constexpr (!kApply) continue;
      params[v] = ReadVector<true>(leaf.params + place.offset, v, place.count, 1.0f);
#pragma unroll
      for (const uint32_t bits : params[v].words) least_param = fminf(least_param, fabsf(BitsToFloat(bits)));
    }
    mu.encoder.Find(mu.after);
    nu.encoder.Find(nu.after);
    // To a parameter from 2^-60 on, a term below 2^-102 adds nothing.
    const bool is_plain = mu.IsPlain() && mu.encoder.is_plain && nu.encoder.is_plain && least_param >= 0x1p-60f;
    if (IsAny(!is_plain || !IsPlain(hyper))) return false;
  }
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    Bytes<4 * kVector> out;
    if constexpr (kApply && !kPlain) params[v] = ReadVector<false>(leaf.params + place.offset, v, place.count, 1.0f);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      const float next_mu = BitsToFloat(mu.after[v].words[i]), next_nu = BitsToFloat(nu.after[v].words[i]);
      float result = AdamUpdate<Math>(hyper, next_mu, next_nu);
      if constexpr (kApply) result = AdamApply<Math>(hyper, result, BitsToFloat(params[v].words[i]));
      out.words[i] = FloatToBits(result);
      if constexpr (kPlain) continue;
      mu.after[v].words[i] = FloatToBits(EncodedMu(next_mu));
      nu.after[v].words[i] = FloatToBits(EncodedNu(next_nu));
    }
    float* to = leaf.out + place.offset + v * kSpan;
    if (kPlain && v * kSpan < place.count) Store<4 * kVector>(to, out);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (!kPlain && v * kSpan + i < place.count) to[i] = BitsToFloat(out.words[i]);
    }
  }

  // 4. Encode.
  mu.Encode(leaf.mu, place, steps);
  nu.Encode(leaf.nu, place, steps);
  return true;
}

// What fits on a multiprocessor: on sm_120 three would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kResidentBlocks = 2;
#else
constexpr int kResidentBlocks = 3;
#endif

template <bool kApply>
__global__ void __launch_bounds__(kBlockSize, kResidentBlocks) AdamUpdateKernel(const __grid_constant__ AdamTiles tiles) {
  __shared__ Fractions<256> fractions;
  __shared__ CodeSteps steps;
  fractions.Fill();
  steps.Fill();
  __syncthreads();
  const uint32_t lane = threadIdx.x % kLanes, end = tiles.ends[tiles.params.count - 1];
  for (uint32_t tile = blockIdx.x; tile < end; tile += gridDim.x) {
    // The block of these lanes. Behind those of the leaf lanes have no elements.
    int index = 0;
    while (tile >= tiles.ends[index]) ++index;
    const AdamLeaf& leaf = tiles.params.leaves[index];
    const uint32_t first = index == 0 ? 0 : tiles.ends[index - 1];
    const uint32_t block = (tile - first) * kBlocksOfTile + threadIdx.x / kLanes;
    const uint32_t across = static_cast<uint32_t>((leaf.n - 1) / kMomentBlock) + 1;
    const uint32_t row = block / across, column = block - row * across;
    const bool is_inside = row < leaf.rows;
    const int64_t start = column * kMomentBlock + lane * kVector, rest = leaf.n - start;
    const int count = !is_inside || rest < 0 ? 0 : static_cast<int>(rest < kMomentBlock ? rest : kMomentBlock);
    const Place place = {block, row * leaf.n + start, count};
    const uint32_t rows_per_hyper = static_cast<uint32_t>(leaf.rows_per_hyper);
    const uint32_t hyper_row = !is_inside || rows_per_hyper == leaf.rows ? 0 : row / rows_per_hyper;
    const float* hyper = leaf.hyper + hyper_row * kAdamHypers;
    if (!tiles.wide[index] || !Step<kApply, true>(leaf, hyper, place, fractions, steps)) {
      Step<kApply, false>(leaf, hyper, place, fractions, steps);
    }
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
