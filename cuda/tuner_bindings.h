// The functions of jaxfp8._cuda that measure and set which algorithms products use.
#ifndef JAXFP8_CUDA_TUNER_BINDINGS_H_
#define JAXFP8_CUDA_TUNER_BINDINGS_H_

#include <nanobind/nanobind.h>

namespace jaxfp8::cuda {

void BindTuner(nanobind::module_& module);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_TUNER_BINDINGS_H_
