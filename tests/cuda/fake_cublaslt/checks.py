"""Checks of the GEMM's calls to cuBLASLt, each in a process of its own:
`python checks.py FOLDER CHECK`.

A separate process, because the stand-in has the soname of the real library: JAX must
never meet it.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(1, str(Path(__file__).resolve().parents[2]))
    import calls

    folder, check = sys.argv[1:]
    getattr(calls, check)(Path(folder))
