"""Runs every kernel at small odd sizes under compute-sanitizer:
`python tests/cuda/sanitize.py [memcheck ...]`.

memcheck finds accesses outside of allocations, racecheck hazards in shared memory,
initcheck reads of memory nobody wrote, synccheck wrong barriers. What is run is in
`sanitizer_cases.py`.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

# Shared memory and barriers: of our kernels alone.
OWN_KERNELS = ["--kernel-name", "kns=jaxfp8"]
# Tool -> its options, and those of the cases. initcheck has no filter: of kernels that
# it does not look at, XLA's that fill a buffer for example, it does not know the
# writes, and every read of them would be an error. So it gets no product of cuBLASLt,
# whose kernels are not under test. memcheck looks at those as well, because sizes are
# ours.
TOOLS = {
    # XLA asks CUDA questions whose answer is an error; ours are exceptions of the
    # programs.
    "memcheck": (["--report-api-errors", "no"], []),
    "racecheck": (OWN_KERNELS, ["--own"]),
    "initcheck": ([], ["--own"]),
    "synccheck": (OWN_KERNELS, ["--own"]),
}
ENVIRONMENT = {
    # An allocation a buffer, so that no neighbour hides an overrun, and none holds what
    # another one wrote.
    "XLA_PYTHON_CLIENT_ALLOCATOR": "platform",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # Kernels one by one, and none to choose an algorithm.
    "XLA_FLAGS": "--xla_gpu_enable_command_buffer= --xla_gpu_autotune_level=0",
}


CASES = Path(__file__).with_name("sanitizer_cases.py")


def main() -> int:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        print("compute-sanitizer not found: it comes with the CUDA toolkit")
        return 2
    failed = []
    for tool in sys.argv[1:] or TOOLS:
        options, case_options = TOOLS[tool]
        command = [
            sanitizer,
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            "--print-limit",
            "20",
        ]
        # Symbols of the host are XLA's and take long to find. The cases after one that
        # fails are still checked.
        command += [
            "--show-backtrace",
            "device",
            "--destroy-on-device-error",
            "kernel",
            *options,
        ]
        command += [sys.executable, str(CASES), *case_options]
        print(f"compute-sanitizer --tool {tool}", flush=True)
        if subprocess.run(command, env=os.environ | ENVIRONMENT).returncode != 0:
            failed.append(tool)
    print(f"failed: {', '.join(failed)}" if failed else "clean")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
