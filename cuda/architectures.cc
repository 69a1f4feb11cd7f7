// What the library was built for; `python -m jaxfp8` calls it with ctypes.

// The names of the GPUs' instruction sets, separated by spaces: those that CMakeLists.txt compiles the kernels for.
extern "C" __attribute__((visibility("default"))) const char* jaxfp8_architectures_v1() { return JAXFP8_ARCHITECTURES; }
