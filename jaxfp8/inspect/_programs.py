"""List the equations of a traced program, those of loops, branches and calls included, with the place of each."""

import os
import sys
import sysconfig
from collections.abc import Iterator
from typing import NamedTuple

import jax

from .._jax._jaxprs import inner_jaxprs
from ..dot import _scopes

# Scopes that transforms add, which do not name modules.
_OF_TRANSFORMS = ("rematted_computation", "checkpoint")
_OF_PRODUCTS = ("Fp8DotGeneral_", "Fp8Einsum_", "dot_general")
_PACKAGES = [sys.modules[name] for name in ("jax", "jaxlib", "flax") if name in sys.modules]
_FOLDERS = [os.path.dirname(os.path.dirname(__file__)), *(os.path.dirname(package.__file__) for package in _PACKAGES)]
_FOLDERS += [sysconfig.get_paths()[kind] for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
_LIBRARIES = tuple(os.path.join(folder, "") for folder in _FOLDERS)


class Place(NamedTuple):
    """The place from which an equation came.

    Attributes:
        layer: the scopes around the equation, joined by `/`: the path of the module, where the library names scopes.
        is_backward: whether the equation belongs to a gradient.
        reason: why jaxfp8 keeps the equation in high precision; None where jaxfp8 left no reason.
        line: `file.py:12`, the innermost source line outside of libraries; "" where there is none.
    """

    layer: str
    is_backward: bool
    reason: str | None
    line: str


def equations(jaxpr, outer=()) -> Iterator[tuple]:
    """Yield `(equation, Place)` for every equation of a jaxpr that holds no other equation."""
    for eqn in jaxpr.eqns:
        stack = (*outer, *eqn.source_info.name_stack.stack)
        inner = list(inner_jaxprs(eqn))
        # Of calls, loops and branches only the inner equations are listed.
        if not inner:
            yield eqn, _place(stack, eqn)
        for inner_jaxpr in inner:
            yield from equations(inner_jaxpr, stack)


def _place(stack, eqn) -> Place:
    scopes = [item.name for item in stack if type(item).__name__ == "Scope"]
    is_backward = any(type(item).__name__ == "Transform" and item.name == "transpose" for item in stack)
    reasons = [reason for scope in scopes if (reason := _scopes.reason(scope))]
    scopes = [scope for scope in scopes if scope not in _OF_TRANSFORMS and not _scopes.reason(scope)]
    return Place(_joined(scopes), is_backward, reasons[0] if reasons else None, _line(eqn.source_info.traceback))


def _joined(scopes) -> str:
    """Join scopes to one path, without the scopes that nested transforms repeat; NNX scopes are whole paths."""
    path = []
    for scope in scopes:
        parts = [scope] if "->" in scope else scope.split("/")  # an equation is one name
        path = parts if parts[: len(path)] == path else path + parts
    # Drop a repeated prefix, and the names that jaxfp8's products add to the layer that holds them.
    for size in range(len(path) // 2, 0, -1):
        if path[:size] == path[size : 2 * size]:
            path = path[size:]
    while len(path) > 1 and path[-1].startswith(_OF_PRODUCTS):
        path = path[:-1]
    return "/".join(path)


def _line(traceback) -> str:
    frames = () if traceback is None else traceback.frames
    # The first frame is the innermost one.
    for frame in frames:
        if not frame.file_name.startswith(_LIBRARIES):
            return f"{os.path.basename(frame.file_name)}:{frame.line_num}"
    return ""


def traced(fn, arrays):
    """Return the jaxpr of `fn(arrays)`; `fn` may return any object."""

    # JAX would refuse a result that is not an array. Without results all equations still stay in the jaxpr.
    def without_result(arrays):
        fn(arrays)

    return jax.make_jaxpr(without_result)(arrays).jaxpr
