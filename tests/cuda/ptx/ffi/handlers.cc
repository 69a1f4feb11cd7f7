// The FFI handlers over memory that the interpreter watches, as `ptx_<handler>`.
//
// The buffers of a call are moved, so that there are gaps between them which no access may touch. A buffer that is an
// operand alone may not be written; a result is not written yet, and has to be when the handler returns.
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cuda/ffi/handlers.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void ptx_add_buffer(const void* address, uint64_t bytes, int is_written, int is_writable);
EXPORT void ptx_remove_buffer(const void* address);
EXPORT int64_t ptx_unwritten(const void* address);
EXPORT void ptx_set_fault(const char* message);
EXPORT const char* ptx_fault();

// The objects of the handlers are compiled with the emulator's cuda_runtime.h, where these are C++ functions.
enum cudaError_t : unsigned;
__attribute__((visibility("default"))) const char* cudaGetErrorName(cudaError_t) { return "cudaErrorLaunchFailure"; }
__attribute__((visibility("default"))) const char* cudaGetErrorString(cudaError_t) { return ptx_fault(); }

namespace {

constexpr uint64_t kBoundary = 256;  // as XLA aligns buffers

uint64_t ElementBytes(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F32:
    case XLA_FFI_DataType_S32:
    case XLA_FFI_DataType_U32:
      return 4;
    case XLA_FFI_DataType_F16:
    case XLA_FFI_DataType_BF16:
      return 2;
    default:
      return 1;  // formats of 8 bits; types that handlers refuse are not accessed
  }
}

struct Moved {
  std::unique_ptr<uint8_t[]> storage;
  uint8_t* data = nullptr;
  bool is_operand = false, is_result = false;
};

class MovedBuffers {
 public:
  explicit MovedBuffers(XLA_FFI_CallFrame* frame) {
    for (int64_t i = 0; i < frame->args.size; ++i) Move(frame->args.args[i])->is_operand = true;
    for (int64_t i = 0; i < frame->rets.size; ++i) Move(frame->rets.rets[i])->is_result = true;
    for (auto& [place, moved] : moved_) {
      const auto [original, bytes] = place;
      if (bytes == 0) continue;
      if (moved.is_operand) std::memcpy(moved.data, original, bytes);
      ptx_add_buffer(moved.data, bytes, moved.is_operand, moved.is_result);
    }
  }
  // Moves everything back; `checks` whether all results were written.
  void Restore(bool checks) {
    for (auto& [place, moved] : moved_) {
      const auto [original, bytes] = place;
      if (bytes == 0) continue;
      const int64_t unwritten = ptx_unwritten(moved.data);
      if (checks && unwritten != 0) {
        ptx_set_fault(("undefined: nobody wrote " + std::to_string(unwritten) + " bytes of a result").c_str());
      }
      if (moved.is_result) std::memcpy(original, moved.data, bytes);
      ptx_remove_buffer(moved.data);
    }
    for (auto& [buffer, original] : buffers_) buffer->data = original;
  }

 private:
  Moved* Move(void* pointer) {
    auto* buffer = static_cast<XLA_FFI_Buffer*>(pointer);
    uint64_t bytes = ElementBytes(buffer->dtype);
    for (int64_t i = 0; i < buffer->rank; ++i) bytes *= static_cast<uint64_t>(buffer->dims[i]);
    Moved& moved = moved_[{buffer->data, bytes}];  // an operand and a result of one place are one buffer
    if (!moved.storage) {
      moved.storage.reset(new uint8_t[bytes + 4 * kBoundary]);
      const auto begin = reinterpret_cast<uint64_t>(moved.storage.get()) + kBoundary;
      moved.data = reinterpret_cast<uint8_t*>((begin + kBoundary - 1) / kBoundary * kBoundary);
    }
    buffers_.emplace_back(buffer, buffer->data);
    buffer->data = moved.data;
    return &moved;
  }

  std::map<std::pair<void*, uint64_t>, Moved> moved_;
  std::vector<std::pair<XLA_FFI_Buffer*, void*>> buffers_;
};

XLA_FFI_Error* Call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_CallFrame* frame) {
  if (frame->extension_start || frame->stage != XLA_FFI_ExecutionStage_EXECUTE) return handler(frame);
  MovedBuffers buffers(frame);
  XLA_FFI_Error* error = handler(frame);
  buffers.Restore(error == nullptr);
  return error;
}

}  // namespace

#define JAXFP8_WATCHED(name) \
  EXPORT XLA_FFI_Error* ptx_##name(XLA_FFI_CallFrame* frame) { return Call(name, frame); }
JAXFP8_CUDA_HANDLERS(JAXFP8_WATCHED)
// Products are the stand-in's, without kernels.
#define JAXFP8_PASSED(name) \
  EXPORT XLA_FFI_Error* ptx_##name(XLA_FFI_CallFrame* frame) { return name(frame); }
JAXFP8_CUBLASLT_HANDLERS(JAXFP8_PASSED)
