"""The compiler for TPUs: libtpu, in a folder of its own, because JAX would look for a
TPU at every start.
"""

import pathlib
import sys

import another_process

LIBRARY = pathlib.Path(sys.prefix) / "tpu" / "libtpu" / "libtpu.so"


def missing() -> str | None:
    """What there is not, or None where programs can be compiled for TPUs."""
    return (
        None
        if LIBRARY.exists()
        else (
            "needs libtpu in the environment's folder `tpu` (tools/setup.sh installs "
            "it)"
        )
    )


def is_of_goals() -> bool:
    """Tell whether this is the libtpu of our goals, 0.0.50 or newer; JAX 0.10 has an
    older one.
    """
    (folder,) = LIBRARY.parents[1].glob("libtpu-*.dist-info")
    return tuple(map(int, folder.name.split("-")[1].split(".")[:3])) >= (0, 0, 50)


def run(module: str, *arguments: str) -> str:
    """Runs a module of this folder as a program where `tpu` topologies can be made;
    returns what it prints.
    """
    environment = {
        "XLA_FLAGS": None,
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": another_process.PATH,
    }
    environment |= {
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_LIBRARY_PATH": str(LIBRARY),
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    return another_process.python(
        "-m", f"tpu.{module}", *arguments, **environment
    ).stdout
