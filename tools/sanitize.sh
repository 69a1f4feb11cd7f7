#!/usr/bin/env bash
# Builds the CPU module with AddressSanitizer and UndefinedBehaviorSanitizer, then runs its C++ tests and, under a
# stock jaxlib, every handler with good and bad buffers. Fails on any finding.
#
#   PYTHON=.venv/bin/python tools/sanitize.sh      (a Python with jax and nanobind; default python3)
set -euo pipefail

python=$("${PYTHON:-python3}" -c 'import sys; print(sys.executable)')
cd "$(dirname "$0")/.."
cxx=${CXX:-c++}
build=build/sanitize
cmake=$(command -v "$(dirname "$python")/cmake" || command -v cmake) \
  || { echo "sanitize: cmake not found; pip install cmake" >&2; exit 1; }

"$cmake" -S . -B "$build" -DJAXFP8_CUDA=OFF -DJAXFP8_SANITIZE=address,undefined -DJAXFP8_NATIVE_TESTS=ON \
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER="$cxx" -DPython_EXECUTABLE="$python" >/dev/null
"$cmake" --build "$build" --parallel 2

for name in chunks parallel_for kernels bands moments; do
  echo "sanitize: $name"
  "$build/cpu/native_tests/jaxfp8_${name}_test"
done

# The interpreter is not instrumented, so the run-time comes in before it; libstdc++ too, or the sanitizer cannot
# intercept the exceptions of jaxlib. jax itself leaks at exit.
echo "sanitize: handlers"
LD_PRELOAD="$("$cxx" -print-file-name=libasan.so) $("$cxx" -print-file-name=libstdc++.so.6)" \
  ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 JAX_PLATFORMS=cpu \
  "$python" tests/native/handlers.py "$(echo "$build"/cpu/_cpu.*.so)"
echo "sanitize: no findings"
