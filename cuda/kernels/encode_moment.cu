// encode_moment: eight lanes take a block of 128 elements, so that what is done once a block is shared by 16 elements.
//
// The four blocks of a warp may have three exponents. So an exponent is an operand, not a branch, and what codes stand for
// is read from a table in shared memory, without the roots.
//
// The moment may be the result: a lane writes codes that it has read itself, the first of the eight the amax and the
// exponent.
#include "cuda/kernels/encode_moment.h"

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/moment.h"
#include "common/scale.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kVector = 4;  // elements in a row of a lane: 16 bytes
constexpr int kVectors = 4;
constexpr int kLanes = kMomentBlock / (kVector * kVectors);  // of a block
constexpr int kSpan = kVector * kLanes;                      // elements from one vector of a lane to its next
constexpr int kMomentsOfWarp = kWarpSize / kLanes;           // blocks
constexpr uint32_t kAllLanes = 0xffffffffu;

// A factor of all magnitudes of a block. CPUs flush a product that is below 2^-126 once it is rounded to 24 bits. GPUs
// round it as a subnormal number, so a factor that could make one is taken times 2^64, and the product back. The product
// of a magnitude below `least` is 0.
struct Factor {
  float lifted;
  float threshold;
  float lower;

  __device__ __forceinline__ Factor(float factor, bool lift, float least)
      : lifted(factor), threshold(fmaxf(least * factor, lift ? 0x1p-62f : 0.0f)), lower(lift ? 0x1p-64f : 1.0f) {}
  __device__ __forceinline__ float operator*(float x) const {
    const float product = __fmul_rn(fabsf(x), lifted);
    return product >= threshold ? __fmul_rn(product, lower) : 0.0f;
  }
};

// What the codes stand for, by the exponent: a root, a fraction, a square.
class Fractions {
 public:
  __device__ __forceinline__ void Fill() {
#pragma unroll 1
    for (int i = threadIdx.x; i < 3 * kCodes; i += kBlockSize) {
      fractions_[i] = DecodeFraction(i % kCodes, i / kCodes - 1);
    }
  }
  __device__ __forceinline__ const float* Of(int exponent) const {
    return fractions_ + (exponent > 0 ? 2 : exponent < 0 ? 0 : 1) * kCodes;
  }

 private:
  static constexpr int kCodes = 128;
  float fractions_[3 * kCodes];
};

// The largest of the lanes of a block.
__device__ __forceinline__ uint32_t OverBlock(uint32_t x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

// What a lane has of a block. From element `count` on, counted from the first of the lane, there are zeros, whose code is
// 0 and which have no part in a span.
template <bool kWide>
struct Elements {
  int64_t offset;
  int count;
  Bytes<4 * kVector> after[kVectors] = {};
  uint32_t codes[kVectors] = {};

  __device__ __forceinline__ void Read(const EncodeMomentParams& params) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const int64_t place = offset + v * kSpan;
      if (kWide && v * kSpan < count) {
        after[v] = Load<4 * kVector>(params.after + place);
        codes[v] = *reinterpret_cast<const uint32_t*>(params.data + place);  // not by Load: it may be written
      }
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (kWide || v * kSpan + i >= count) continue;
        after[v].words[i] = Load<4>(params.after + place + i).words[0];
        codes[v] |= static_cast<uint32_t>(params.data[place + i]) << (8 * i);
      }
    }
  }

  __device__ __forceinline__ void Write(uint8_t* data) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      uint8_t* place = data + offset + v * kSpan;
      if (kWide && v * kSpan < count) Store<4>(place, {{codes[v]}});
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        if (!kWide && v * kSpan + i < count) place[i] = static_cast<uint8_t>(codes[v] >> (8 * i));
      }
    }
  }

  // Whether an element is not what its code stands for, to the bit.
  __device__ __forceinline__ bool Differs(int v, int i, const Factor& amax, const float* fractions) const {
    if (v * kSpan + i >= count) return false;
    const uint32_t code = codes[v] >> (8 * i) & 0xffu;
    const float magnitude = amax * fractions[code & 0x7fu];
    const uint32_t bits = E4M3::IsNan(code) ? 0x7fc00000u : FloatToBits(magnitude);
    return (bits | (code & 0x80u) << 24) != after[v].words[i];
  }
};

// The code of a magnitude of a block; `inverse` is that of the amax. Without kRoots the exponent is not negative.
template <bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeMagnitude(float x, const Factor& inverse, int exponent, const float* fractions,
                                                    uint32_t key) {
  const float quotient = inverse * x;
  const float u = quotient < 1.0f ? quotient : 1.0f;
  float power = exponent > 0 ? __fmul_rn(u, u) : u;
  if constexpr (kRoots) power = exponent < 0 ? Root(u) : power;
  const float y = __fmul_rn(kMomentMax, power);
  uint32_t code;
  if constexpr (kRandom) {
    const uint32_t random = Mix(Mix(key));
    const auto decode = [&](int32_t code) { return fractions[code]; };
    code = kSquared ? RoundSquare(y, exponent, random) : RoundSigned(u, y, random, decode);
  } else {
    code = Encode<E4M3>(y);
  }
  if (kSquared && fabsf(x) >= 0x1p-126f) code = max(code, 1u);
  return fabsf(x) < BitsToFloat(kInfBits) ? code : E4M3::kNanCode;
}

// The codes of four elements. `key` is that of the first; those of the others differ in the last two bits.
template <bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeVector(const uint32_t (&x)[kVector], const Factor& inverse, int exponent,
                                                 const float* fractions, uint32_t key) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t code =
        EncodeMagnitude<kRoots, kRandom, kSquared>(BitsToFloat(x[i]), inverse, exponent, fractions, key ^ i);
    codes |= code << (8 * i);
  }
  const uint32_t signs = __byte_perm(__byte_perm(x[0], x[1], 0x73), __byte_perm(x[2], x[3], 0x73), 0x5410);
  return codes | (signs & 0x80808080u);
}

// With kWide, vectors of a lane are whole and aligned.
template <bool kRandom, bool kSquared, bool kWide>
__global__ void __launch_bounds__(kBlockSize, kWide ? 4 : 3) EncodeMomentKernel(EncodeMomentParams params, int64_t across) {
  __shared__ Fractions fractions;
  fractions.Fill();
  __syncthreads();
  const int lane = threadIdx.x % kLanes;
  const int64_t blocks = params.rows * across;
  const int64_t step = int64_t{gridDim.x} * kWarpsPerBlock * kMomentsOfWarp;
  const int64_t first = (int64_t{blockIdx.x} * kBlockSize + threadIdx.x) / kLanes;
  // The place of the block, and the elements before it; how far the next block of these lanes is.
  int64_t row = first / across, column = first - row * across;
  int64_t start = row * params.n + column * kMomentBlock;
  const int64_t rows = step / across, columns = step - rows * across;
  const int64_t elements_on = rows * params.n + columns * kMomentBlock;
  // All lanes of a warp go on together.
  for (int64_t block = first; block - threadIdx.x % kWarpSize / kLanes < blocks; block += step) {
    const bool is_first = lane == 0 && block < blocks;
    const int64_t rest = params.n - column * kMomentBlock - lane * kVector;
    const int count = block >= blocks || rest < 0 ? 0 : static_cast<int>(rest < kMomentBlock ? rest : kMomentBlock);
    Elements<kWide> elements = {start + lane * kVector, count};
    elements.Read(params);
    float amax = is_first ? params.amax[block] : 0.0f;
    int8_t exponent = is_first ? params.exponent[block] : int8_t{0};

    // 1. Compare with what the moment decodes to. Most blocks differ in one of the first elements of lanes.
    const float old_amax = BitsToFloat(OverBlock(FloatToBits(amax) & kAbsMask));
    const int old_exponent = static_cast<int>(OverBlock(is_first ? exponent + 128u : 0u)) - 128;
    const bool small = old_amax < 1.0f;
    const Factor decode(old_amax < 0x1p-126f ? 0.0f : __fmul_rn(old_amax, small ? 0x1p64f : 1.0f), small, 0.0f);
    const float* old_fractions = fractions.Of(old_exponent);
    uint32_t differs = OverBlock(elements.Differs(0, 0, decode, old_fractions));
    if (__reduce_max_sync(kAllLanes, 1 - differs) != 0) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int i = 0; i < kVector; ++i) differs |= elements.Differs(v, i, decode, old_fractions);
      }
      differs = OverBlock(differs);
    }

    // 2. The span of the block. Less the bits of infinity, those of finite numbers wrap around and are the largest. Less
    // those of the smallest normal number, those of zeros and subnormal numbers are.
    uint32_t largest = kSmallestNormalBits - 1 - kInfBits, smallest = kInfBits - kSmallestNormalBits;
#pragma unroll
    for (const Bytes<4 * kVector>& vector : elements.after) {
#pragma unroll
      for (const uint32_t bits : vector.words) {
        largest = max(largest, (bits & kAbsMask) - kInfBits);
        smallest = min(smallest, (bits & kAbsMask) - kSmallestNormalBits);
      }
    }
    largest = OverBlock(largest) + kInfBits;
    const float top = largest < kSmallestNormalBits ? 0.0f : BitsToFloat(largest);
    const float bottom = BitsToFloat(~OverBlock(~smallest) + kSmallestNormalBits);

    const int next_exponent = ExponentOfSpan<kSquared>(top, bottom);
    const bool any_roots = __reduce_max_sync(kAllLanes, next_exponent < 0 ? 1u : 0u) != 0;

    if (differs != 0) {
      // 3. The inverse of the amax: of one above 1, of the amax times 2^-32, since that of the largest is subnormal.
      // CPUs multiply elements by 2^-32 too, and flush those below 2^-94.
      const bool large = top > 1.0f;
      const float divided = Divide(1.0f, fmaxf(__fmul_rn(top, large ? 0x1p-32f : 1.0f), 0x1p-126f));
      const Factor inverse(__fmul_rn(divided, large ? 0x1p32f : 1.0f), large, large ? 0x1p-94f : 0x1p-126f);
      const uint32_t key = kRandom ? Load<4>(params.keys + block).words[0] ^ (lane * kVector) : 0;
      // 4. Round.
      const float* next_fractions = fractions.Of(next_exponent);
      const auto encode = [&](auto roots) {
#pragma unroll
        for (int v = 0; v < kVectors; ++v) {
          elements.codes[v] = EncodeVector<decltype(roots)::value, kRandom, kSquared>(
              elements.after[v].words, inverse, next_exponent, next_fractions, key ^ (v * kSpan));
        }
      };
      if (any_roots) {
        encode(std::true_type{});
      } else {
        encode(std::false_type{});
      }
      amax = top;
      exponent = static_cast<int8_t>(next_exponent);
    }
    elements.Write(params.next_data);
    if (is_first) {
      params.next_amax[block] = amax;
      params.next_exponent[block] = exponent;
    }
    column += columns;
    start += elements_on;
    if (column >= across) {
      column -= across;
      start += params.n - across * kMomentBlock;
    }
  }
}

template <bool kRandom, bool kSquared>
cudaError_t Run(const EncodeMomentParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const int64_t across = params.n / kMomentBlock + (params.n % kMomentBlock != 0);
  const int64_t needed = (params.rows * across - 1) / (kWarpsPerBlock * kMomentsOfWarp) + 1;
  const int64_t most = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const bool wide = params.n % kVector == 0 && IsAligned(params.after, 4 * kVector) &&
                    IsAligned(params.data, kVector) && IsAligned(params.next_data, kVector);
  return Launch(wide ? EncodeMomentKernel<kRandom, kSquared, true> : EncodeMomentKernel<kRandom, kSquared, false>,
                needed < most ? needed : most, kBlockSize, stream, params, across);
}

}  // namespace

cudaError_t LaunchEncodeMoment(const EncodeMomentParams& params, cudaStream_t stream) {
  if (params.rows == 0 || params.n == 0) return cudaSuccess;
  const auto run = params.keys != nullptr ? (params.squared ? Run<true, true> : Run<true, false>)
                                          : (params.squared ? Run<false, true> : Run<false, false>);
  return run(params, stream);
}

}  // namespace jaxfp8::cuda
