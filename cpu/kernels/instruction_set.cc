// Which instruction set the kernels use here; `python -m jaxfp8` calls it with ctypes.
#include "cpu/kernels/kernel_table.h"

extern "C" __attribute__((visibility("default"))) const char* jaxfp8_instruction_set_v1() {
  return jaxfp8::cpu::Kernels().isa;
}
