"""Modules of conformance/, which is no package: its programs need numpy alone."""

import importlib.util
import pathlib

FOLDER = pathlib.Path(__file__).parents[2] / "conformance"


def load(name):
    """Import a file of that folder."""
    spec = importlib.util.spec_from_file_location(
        f"conformance_{name}", FOLDER / f"{name}.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
