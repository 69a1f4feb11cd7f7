"""Runs a selection of the GPU tests under compute-sanitizer: `python tests/cuda/sanitize.py [memcheck racecheck ...]`.

memcheck finds accesses outside of allocations, racecheck hazards in shared memory, initcheck reads of memory nobody
wrote, synccheck wrong barriers. XLA is asked for one allocation a buffer, so that no neighbour hides an overrun.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SELECTION = (
    "test_shapes or test_groups or test_scales or test_histories or test_amax_so_far or test_bias_and_accumulator "
    "or test_batched_product or test_column_sums or test_ragged or test_activations or test_norms "
    "or test_block_scaled or test_quantized_blocks"
)
# Only our own kernels: cuBLAS and XLA are not under test. memcheck looks at all.
OWN_KERNELS = ["--kernel-name", "kns=jaxfp8"]


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer not found: it comes with the CUDA toolkit")
        return 2
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    failed = []
    for tool in sys.argv[1:] or TOOLS:
        command = [sanitizer, "--tool", tool, "--error-exitcode", "9", "--target-processes", "all"]
        command += OWN_KERNELS if tool != "memcheck" else []
        command += [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-k", SELECTION]
        command += [str(Path(__file__).with_name("test_gpu_ops.py"))]
        print(f"compute-sanitizer --tool {tool}", flush=True)
        if subprocess.run(command, env=environment).returncode != 0:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
