"""Warnings that point at the line of the user's program."""

import dis
import inspect
import traceback
import warnings

# Frames of these libraries lie between the user's line and the warning. Python 3.11 has no `skip_file_prefixes`.
_LIBRARIES = {"jaxfp8", "jax", "jaxlib", "flax", "optax", "equinox", "contextlib", "functools"}


def user_line() -> dict:
    """Find the innermost line outside of the libraries, as keywords of `warn`."""
    for frame, line in traceback.walk_stack(inspect.currentframe()):  # noqa: B007
        if frame.f_globals.get("__name__", "").partition(".")[0] not in _LIBRARIES:
            break
    return {
        "filename": frame.f_code.co_filename,
        "lineno": line,
        "module": frame.f_globals.get("__name__"),
        "registry": frame.f_globals.setdefault("__warningregistry__", {}),
    }


def is_result_dropped() -> bool:
    """Tell whether the caller of the function that calls this one is a statement that drops the function's result."""
    frame = inspect.currentframe().f_back.f_back
    instructions = (i.opname for i in dis.get_instructions(frame.f_code) if i.offset > frame.f_lasti)
    return next((name for name in instructions if name not in ("CACHE", "EXTENDED_ARG")), None) == "POP_TOP"


def warn(message: str, category: type[Warning], line: dict | None = None) -> None:
    """Warn at `line`, or at the user's line; Python's filters show a message once for each line.

    Args:
        message: the text. A message about a layer names the layer, so that each layer has its own warning.
        category: the class of the warning.
        line: an earlier result of `user_line`.
    """
    warnings.warn_explicit(message, category, **(line or user_line()))
