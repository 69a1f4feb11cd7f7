// Setup while a stream is captured.
#ifndef JAXFP8_CUDA_COMMON_CAPTURE_H_
#define JAXFP8_CUDA_COMMON_CAPTURE_H_

#include <cuda_runtime_api.h>

namespace jaxfp8::cuda {

// Allows this thread, while it lives, the calls that a first use may make: loading a module, allocating. XLA records a
// command buffer without a warm-up run, so a kernel's or an algorithm's first use may lie inside a capture, which
// forbids them. None of them touches the captured stream, which is what the relaxed mode states.
class AllowSetupDuringCapture {
 public:
  AllowSetupDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  ~AllowSetupDuringCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }
  AllowSetupDuringCapture(const AllowSetupDuringCapture&) = delete;
  AllowSetupDuringCapture& operator=(const AllowSetupDuringCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_CAPTURE_H_
