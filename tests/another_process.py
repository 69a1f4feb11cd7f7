"""Programs in new Python processes."""

import os
import pathlib
import pickle
import subprocess
import sys

_TESTS = pathlib.Path(__file__).parent
# Where modules are found as here, tests among them: a PYTHONPATH.
PATH = os.pathsep.join([str(_TESTS.parent), str(_TESTS), *filter(None, sys.path)])


def python(*arguments, cwd=None, code: int = 0, **environment) -> subprocess.CompletedProcess:
    """Run Python with these arguments; it must end with the exit status `code`.

    environment: variables, beside those of this process; None takes one away.
    """
    variables = {name: value for name, value in (os.environ | environment).items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=900)
    assert done.returncode == code, f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done


def run(code: str, payload: bytes):
    """Run `code` and return the object that it pickles to stdout; `payload` is its stdin."""
    command, environment = [sys.executable, "-c", code], os.environ | {"PYTHONPATH": PATH}
    process = subprocess.run(command, input=payload, capture_output=True, env=environment)
    assert process.returncode == 0, process.stderr.decode()
    return pickle.loads(process.stdout)
