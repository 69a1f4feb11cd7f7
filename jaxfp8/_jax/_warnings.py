"""Warnings that point at the line of the user's program."""

import inspect
import traceback
import warnings
import weakref

# Frames of these libraries lie between the user's line and the warning. Python 3.11 has
# no `skip_file_prefixes`.
_LIBRARIES = {
    "jaxfp8",
    "jax",
    "jaxlib",
    "flax",
    "optax",
    "equinox",
    "contextlib",
    "dataclasses",
    "functools",
    "importlib",
}


def user_line():
    """Find the innermost line outside of the libraries, as `warnings.warn_explicit`
    takes it: file, number, module and registry.
    """
    for frame, line in traceback.walk_stack(inspect.currentframe()):  # noqa: B007
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            break
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    return frame.f_code.co_filename, line, frame.f_globals.get("__name__"), registry


# What was said, by the trace or the scope in which it was: both are alive while their
# program is traced.
_said = weakref.WeakKeyDictionary()


def warn_once(where, layer, message, category):
    """Warn about the first layer alone of all that have one fault.

    Args:
        where: the program that is traced, as its trace or its scope; None warns always.
        layer: the path of the layer; None for a function.
        message: the text, equal for all layers.
        category: the class of the warning.
    """
    said = set() if where is None else _said.setdefault(where, set())
    if message in said:
        return
    said.add(message)
    if layer:
        message = f"{layer}: {message}. Other layers like this one are not named"
    warn(message, category)


def warn(message, category, line=None):
    """Warn at `line`, or at the user's line; Python's filters show a message once for
    each line.

    Args:
        message: the text. A message about a layer names the layer, so that each layer
            has its own warning.
        category: the class of the warning.
        line: an earlier result of `user_line`.
    """
    warnings.warn_explicit(message, category, *(line or user_line()))
