"""The compiled modules of this installation: their files, and the reason where a module is missing.

A build writes `_modules.txt` beside the modules. Each line says how a module was built, or why it was not.
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from . import _elf

_PACKAGE = __package__.split(".")[0]
# This file lies beside the sources, which a Python that is started in a checkout imports.
_SOURCES = Path(__file__).parents[2] / "CMakeLists.txt"


class Unavailable(Exception):
    """A compiled module that cannot be used; the message is a clause that says why."""


def path(name: str) -> str | None:
    """Return the file of the module `name`, such as `"_cpu"`; None if there is no file for this Python."""
    spec = importlib.util.find_spec(f"{_PACKAGE}.{name}")
    return None if spec is None else spec.origin


def load(name: str) -> ModuleType:
    """Import the module `name`.

    Raises:
        Unavailable: the module is not there, damaged, or refused by the system's loader.
    """
    file = path(name)
    if file is None:
        raise Unavailable(_why_missing(name))
    try:
        # Look at the file before the import: Python cannot catch what the loader does with a truncated one.
        if fault := _elf.fault(file):
            raise Unavailable(f"does not load: {fault}; install jaxfp8 again")
        return importlib.import_module(f"{_PACKAGE}.{name}")
    except (ImportError, OSError, SystemError) as error:
        raise Unavailable(f"does not load: {error}") from error


def _why_missing(name: str) -> str:
    built = _build_report().get(name.removeprefix("_"), "")
    if built.startswith("not built: "):
        return built
    # Python imports from the folder that it is started in, where sources hide an installed package.
    if not built and _SOURCES.exists():
        return f"not in {_SOURCES.parent}, which are the sources: run from another folder, or install jaxfp8"
    report = f" ({built})" if built else ""
    return f"this installation has no file for Python {sys.version.split()[0]}{report}: install jaxfp8 again"


def _build_report() -> dict[str, str]:
    """Return `{module: line of the build}`. An editable install has two folders: the sources and the built modules."""
    files = (Path(folder) / "_modules.txt" for folder in sys.modules[_PACKAGE].__path__)
    lines = [line for file in files if file.exists() for line in file.read_text().splitlines()]
    return dict(line.split(": ", 1) for line in lines if ": " in line)
