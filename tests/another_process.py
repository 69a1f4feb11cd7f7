"""What a new Python process makes of a pickled object."""

import os
import pathlib
import pickle
import subprocess
import sys

_TESTS = pathlib.Path(__file__).parent


def run(code: str, payload: bytes):
    """Run `code` in a new process and return the object that it pickles to stdout; `payload` is its stdin."""
    path = os.pathsep.join([str(_TESTS.parent), str(_TESTS), *filter(None, sys.path)])
    process = subprocess.run(
        [sys.executable, "-c", code], input=payload, capture_output=True, env=os.environ | {"PYTHONPATH": path}
    )
    assert process.returncode == 0, process.stderr.decode()
    return pickle.loads(process.stdout)
