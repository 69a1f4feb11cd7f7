"""The rows for one library, in a process that may die."""

import contextlib
import dataclasses
import os
import warnings

import jax

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from . import libraries, rows, verdict


def work(pipe, name: str, big: bool) -> None:
    """Judge the rows whose names come through a pipe."""
    os.dup2(2, 1)  # what rows print is no part of the table
    # As users have JAX: Flax's own FP8 promotes dtypes.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    warnings.simplefilter("ignore")
    library = dataclasses.replace(libraries.LIBRARIES[name], big=big)
    with contextlib.suppress(EOFError):
        while True:
            pipe.send(verdict.judged(rows.BY_NAME[pipe.recv()], library))
            jax.clear_caches()
