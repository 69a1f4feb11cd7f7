"""The programs in which the selftest launches each op first, compiled for an H200;
prints whether it is in a graph.
"""

import pathlib
import re
import tempfile

import jax

from jaxfp8.inspect import _op_calls
from jaxfp8.selftest import _cases, _checks

from . import programs


def is_recorded(op: str) -> bool:
    """Whether every custom call is in a graph, by the thunks that XLA dumps."""
    case = next(_cases.cases(op))
    arguments = programs.on_one(case.arguments)
    with tempfile.TemporaryDirectory() as folder:
        options = _checks.GRAPHS | {"xla_dump_to": folder}
        jax.jit(case.function).lower(*arguments).compile(options)
        paths = pathlib.Path(folder).glob("*thunk_sequence_after_thunk_passes*")
        thunks = "".join(map(pathlib.Path.read_text, paths))
    left = re.search(r"^\d+: kCustomCall", thunks, re.MULTILINE)
    return "kCommandBuffer" in thunks and not left


def main() -> None:
    for op in _op_calls.OPS:
        print(op, is_recorded(op))
    _checks.GRAPHS["xla_gpu_enable_command_buffer"] = ""
    print("without", is_recorded("amax"))


if __name__ == "__main__":
    main()
