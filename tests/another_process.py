"""Programs in new Python processes."""

import os
import pathlib
import subprocess
import sys
import tempfile

import jax
import numpy as np

_TESTS = pathlib.Path(__file__).parent
# Where modules are found as here, tests among them: a PYTHONPATH.
PATH = os.pathsep.join([str(_TESTS.parent), str(_TESTS), *filter(None, sys.path)])


def python(
    *arguments, cwd=None, code: int = 0, **environment
) -> subprocess.CompletedProcess:
    """Run Python with these arguments; it must end with the exit status `code`.

    environment: variables, beside those of this process; None takes one away.
    """
    variables = {
        name: value
        for name, value in (os.environ | environment).items()
        if value is not None
    }
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=900
    )
    assert done.returncode == code, (
        f"exit {done.returncode}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    )
    return done


_CALL = """
import sys
import tempfile

import jax
import numpy as np
{imports}
program = jax.export.deserialize(bytearray(open("program", "rb").read()))
with np.load("in.npz") as file:
    arguments, _ = jax.tree.unflatten(program.in_tree,
        [file[name] for name in file.files])
try:
    results = jax.tree.leaves(program.call(*arguments))
except Exception as error:
    print(type(error).__name__, str(error)[:300].replace(chr(10), " "))
else:
    np.savez("out.npz", *(np.asarray(leaf).view(np.uint8) for leaf in results))
    print("ran")
assert ("jaxfp8" in sys.modules) == ("jaxfp8" in "{imports}")
"""


def call_exported(program, arguments, imports="import jaxfp8", **environment):
    """Call an exported program in a process that imports no more; return its leaves, or
    what its error says.

    arguments: `(args, kwargs)`, a tree as that of `program`; leaves are no scalars.
    """
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / "program").write_bytes(program.serialize())
        np.savez(f"{folder}/in.npz", *jax.tree.leaves(arguments))
        code = _CALL.format(imports=imports)
        said = (
            python("-c", code, cwd=folder, PYTHONPATH=PATH, **environment)
            .stdout.strip()
            .splitlines()[-1]
        )
        if said != "ran":
            return said
        with np.load(f"{folder}/out.npz") as file:
            return [
                file[name].view(aval.dtype)
                for name, aval in zip(file.files, program.out_avals, strict=True)
            ]


def export(function, *arguments):
    """Export a function with the custom calls of jaxfp8."""
    from jaxfp8 import ops  # not where only processes are started

    checks = [
        jax.export.DisabledSafetyCheck.custom_call(name)
        for name in ops.custom_call_targets()
    ]
    return jax.export.export(jax.jit(function), disabled_checks=checks)(*arguments)
