// The protocol: each algorithm is a graph of products over sets of operands that together are larger than the cache;
// algorithms take turns, so that drift of the clock hits all alike; a time is a median over the turns.
#include "cuda/kernels/gemm_tuner.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "common/fp8.h"

namespace jaxfp8::cuda {
namespace {

constexpr size_t kTimedAlgorithms = 8;
constexpr int kTurns = 11;
// Products of a graph: enough that its own launch does not count, few enough that a large GEMM takes no minute.
constexpr int64_t kMinProducts = 4;
constexpr int64_t kMaxProducts = 128;

#define JAXFP8_RETURN_IF_CUDA_ERROR(expression)                                             \
  do {                                                                                      \
    if (const cudaError_t status = (expression); status != cudaSuccess) {                   \
      return std::string(#expression " failed: ") + cudaGetErrorName(status);               \
    }                                                                                       \
  } while (false)

struct FreeMemory {
  void operator()(void* memory) const { cudaFree(memory); }
};
struct DestroyStream {
  void operator()(CUstream_st* stream) const { cudaStreamDestroy(stream); }
};
struct DestroyEvent {
  void operator()(CUevent_st* event) const { cudaEventDestroy(event); }
};
struct DestroyGraph {
  void operator()(CUgraph_st* graph) const { cudaGraphDestroy(graph); }
};
struct DestroyGraphExec {
  void operator()(CUgraphExec_st* graph) const { cudaGraphExecDestroy(graph); }
};
using Memory = std::unique_ptr<void, FreeMemory>;
using Stream = std::unique_ptr<CUstream_st, DestroyStream>;
using Event = std::unique_ptr<CUevent_st, DestroyEvent>;
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;
using GraphExec = std::unique_ptr<CUgraphExec_st, DestroyGraphExec>;

std::string Allocate(int64_t bytes, Memory* memory) {
  void* raw = nullptr;
  if (const cudaError_t status = cudaMalloc(&raw, bytes); status != cudaSuccess) {
    cudaGetLastError();  // or the next launch, whoever's it is, would report it
    return "cudaMalloc of " + std::to_string(bytes) + " bytes failed: " + cudaGetErrorName(status) +
           " (XLA takes most of the device's memory in advance; XLA_PYTHON_CLIENT_MEM_FRACTION leaves more)";
  }
  memory->reset(raw);
  return "";
}

// Codes of about normally distributed numbers that use the format's range: what a quantizer makes. The speed of tensor
// cores depends on the data, zeros are fastest.
template <class Format>
std::vector<uint8_t> RandomCodes(size_t size) {
  // From the sum of four signed bytes, -512 to 508.
  const float scale = BitsToFloat(Format::kMaxBits) / 512.0f;
  std::mt19937 random(0);
  std::vector<uint8_t> codes(size);
  for (uint8_t& code : codes) {
    const uint32_t bits = random();
    int sum = 0;
    for (int shift = 0; shift < 32; shift += 8) sum += static_cast<int8_t>(bits >> shift);
    code = Encode<Format>(static_cast<float>(sum) * scale);
  }
  return codes;
}

// Fills the device's memory with random codes, which repeat after 4 MiB and a bit: no power of two, so that the rows of a
// matrix differ.
std::string Fill(Dtype dtype, void* memory, int64_t bytes) {
  static const size_t kSize = (size_t{4} << 20) + 4093;
  const size_t size = std::min<size_t>(kSize, bytes);
  const std::vector<uint8_t> codes =
      dtype == Dtype::kE4M3 ? RandomCodes<E4M3>(size) : RandomCodes<E5M2>(size);
  for (int64_t first = 0; first < bytes; first += codes.size()) {
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaMemcpy(static_cast<uint8_t*>(memory) + first, codes.data(),
                                           std::min<int64_t>(codes.size(), bytes - first), cudaMemcpyHostToDevice));
  }
  return "";
}

// The operands and the result of one product, in one piece of memory.
class OperandSet {
 public:
  static int64_t Bytes(const GemmShape& shape) { return Offsets(shape).back(); }

  std::string Init(const GemmShape& shape) {
    const std::vector<int64_t> offsets = Offsets(shape);
    if (std::string error = Allocate(offsets.back(), &memory_); !error.empty()) return error;
    uint8_t* const base = static_cast<uint8_t*>(memory_.get());
    // Small positive numbers in bias, accumulator and result.
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaMemset(base + offsets[2], 0x3c, offsets[4] - offsets[2]));
    // Powers of two that bring products of such codes near 1.
    const float a_scale_inv = ScaleInv(shape.a), b_scale_inv = ScaleInv(shape.b);
    JAXFP8_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(base + offsets[4], &a_scale_inv, sizeof(float), cudaMemcpyHostToDevice));
    JAXFP8_RETURN_IF_CUDA_ERROR(
        cudaMemcpy(base + offsets[5], &b_scale_inv, sizeof(float), cudaMemcpyHostToDevice));
    if (std::string error = Fill(shape.a, base, shape.batch * shape.m * shape.k); !error.empty()) return error;
    if (std::string error = Fill(shape.b, base + offsets[1], shape.batch * shape.n * shape.k); !error.empty()) {
      return error;
    }
    void* const out = base + offsets[3];
    return descriptors_.Init(shape, {base, base + offsets[1], base + offsets[4], base + offsets[5],
                                     shape.has_bias ? base + offsets[2] : nullptr,
                                     shape.accumulate ? static_cast<const float*>(out) : nullptr, out});
  }

  const GemmDescriptors& descriptors() const { return descriptors_; }

 private:
  static float ScaleInv(Dtype dtype) { return dtype == Dtype::kE4M3 ? 0x1p-8f : 0x1p-15f; }

  // Of a, b, bias, out and each scale, and the end: multiples of 256 bytes.
  static std::vector<int64_t> Offsets(const GemmShape& shape) {
    std::vector<int64_t> offsets = {0};
    for (const int64_t bytes : {shape.batch * shape.m * shape.k, shape.batch * shape.n * shape.k,
                                shape.has_bias ? shape.n * int64_t{sizeof(uint16_t)} : 0,
                                shape.batch * shape.m * shape.n * ByteWidth(shape.out), int64_t{sizeof(float)},
                                int64_t{sizeof(float)}}) {
      offsets.push_back((offsets.back() + bytes + 255) / 256 * 256);
    }
    return offsets;
  }

  Memory memory_;
  GemmDescriptors descriptors_;
};

// What is timed.
struct Candidate {
  cublasLtMatmulAlgo_t algorithm;
  GraphExec graph;
  std::vector<float> milliseconds;

  float Median() {
    std::nth_element(milliseconds.begin(), milliseconds.begin() + milliseconds.size() / 2, milliseconds.end());
    return milliseconds[milliseconds.size() / 2];
  }
};

class Tuner {
 public:
  std::string Init(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits) {
    device_ = &device;
    workspace_bytes_ = limits.workspace_bytes;
    // Twice the cache, so that nothing of a set is left in it when its turn comes again.
    const int64_t sets = 2 * device.l2_bytes / OperandSet::Bytes(shape) + 1;
    sets_.resize(std::clamp<int64_t>(sets, 2, kMaxProducts));
    for (OperandSet& set : sets_) {
      if (std::string error = set.Init(shape); !error.empty()) return error;
    }
    if (std::string error = Allocate(workspace_bytes_, &workspace_); !error.empty()) return error;
    cudaStream_t stream = nullptr;
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    stream_.reset(stream);
    for (Event* event : {&start_, &stop_}) {
      cudaEvent_t raw = nullptr;
      JAXFP8_RETURN_IF_CUDA_ERROR(cudaEventCreate(&raw));
      event->reset(raw);
    }
    // The copies went to another stream.
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaDeviceSynchronize());
    return "";
  }

  const GemmDescriptors& descriptors() const { return sets_.front().descriptors(); }

  int64_t products() const { return std::max<int64_t>(sets_.size(), kMinProducts); }

  // Makes the graph of a candidate and runs it once.
  std::string Record(Candidate* candidate) {
    // Once outside of the capture: an algorithm's first use may load code.
    if (std::string error = Multiply(sets_.back(), candidate->algorithm); !error.empty()) return error;
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.get()));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaStreamBeginCapture(stream_.get(), cudaStreamCaptureModeThreadLocal));
    std::string error;
    for (int64_t i = 0; i < products() && error.empty(); ++i) {
      error = Multiply(sets_[i % sets_.size()], candidate->algorithm);
    }
    cudaGraph_t raw = nullptr;
    const cudaError_t ended = cudaStreamEndCapture(stream_.get(), &raw);
    const Graph graph(raw);
    if (!error.empty()) return error;
    JAXFP8_RETURN_IF_CUDA_ERROR(ended);
    cudaGraphExec_t exec = nullptr;
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaGraphInstantiate(&exec, graph.get(), 0));
    candidate->graph.reset(exec);
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(exec, stream_.get()));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaStreamSynchronize(stream_.get()));
    return "";
  }

  // One more time of a candidate.
  std::string Time(Candidate* candidate) {
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaEventRecord(start_.get(), stream_.get()));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaGraphLaunch(candidate->graph.get(), stream_.get()));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaEventRecord(stop_.get(), stream_.get()));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaEventSynchronize(stop_.get()));
    float milliseconds = 0;
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaEventElapsedTime(&milliseconds, start_.get(), stop_.get()));
    candidate->milliseconds.push_back(milliseconds);
    return "";
  }

 private:
  std::string Multiply(const OperandSet& set, const cublasLtMatmulAlgo_t& algorithm) {
    return set.descriptors().Multiply(device_->handle, algorithm, workspace_.get(), workspace_bytes_, stream_.get());
  }

  const GemmDevice* device_ = nullptr;
  int64_t workspace_bytes_ = 0;
  std::vector<OperandSet> sets_;
  Memory workspace_;
  Stream stream_;
  Event start_, stop_;
};

}  // namespace

std::string TuneGemm(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits, TunedGemm* tuned) {
  Tuner tuner;
  if (std::string error = tuner.Init(device, shape, limits); !error.empty()) return error;
  std::vector<cublasLtMatmulAlgo_t> algorithms;
  std::string error = FindGemmAlgorithms(device, shape, limits, tuner.descriptors(), &algorithms);
  if (!error.empty()) return error;
  algorithms.resize(std::min(algorithms.size(), kTimedAlgorithms));

  std::vector<Candidate> candidates;
  for (const cublasLtMatmulAlgo_t& algorithm : algorithms) {
    Candidate candidate{algorithm, nullptr, {}};
    error = tuner.Record(&candidate);
    // One that fails is not offered to the table; what cuBLASLt puts first has to run, because programs use it.
    if (error.empty()) {
      candidates.push_back(std::move(candidate));
    } else if (candidates.empty()) {
      return error;
    }
  }
  for (int turn = 0; turn < kTurns; ++turn) {
    for (Candidate& candidate : candidates) {
      if (error = tuner.Time(&candidate); !error.empty()) return error;
    }
  }
  std::vector<float> medians;
  for (Candidate& candidate : candidates) medians.push_back(candidate.Median());
  // Of equals the one that cuBLASLt prefers.
  const size_t best = std::min_element(medians.begin(), medians.end()) - medians.begin();
  const double to_microseconds = 1e3 / static_cast<double>(tuner.products());
  *tuned = {candidates[best].algorithm, medians[best] * to_microseconds, medians.front() * to_microseconds,
            static_cast<int>(candidates.size())};
  return "";
}

}  // namespace jaxfp8::cuda
