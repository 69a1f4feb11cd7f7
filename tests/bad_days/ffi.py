"""Programs that are loaded elsewhere. Flax has no custom calls."""

import pathlib
import tempfile

import another_process
import jax
import jax.numpy as jnp

from .steps import normal, same_bits
from .verdict import Tally, row

NONE = "Flax makes no custom calls"


def exported(library):
    """An exported gradient step, its arguments, and what it gives here."""
    layer = library.dense(5)
    x = normal(0, (6, 8))
    variables = library.variables(normal(1, (8, 5)))

    @jax.jit
    def step(variables, x):
        return jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)

    arguments = variables, x
    return (
        another_process.export(step, *arguments),
        (arguments, {}),
        jax.tree.leaves(step(*arguments)),
    )


@row("export and reload in another process: the same bits")
def reload(library):
    tally = Tally()
    (program, arguments, here) = exported(library)
    got = another_process.call_exported(
        program, arguments, "import jaxfp8" if library.is_ours else ""
    )
    tally(not isinstance(got, str), got, silent=False)
    tally(same_bits(got, here), "other bits")
    return tally.verdict("the same bits")


@row("export, reload without the library: an error names the call", peer=NONE)
def reload_without(library):
    tally = Tally()
    (program, arguments, _) = exported(library)
    said = another_process.call_exported(program, arguments, "")
    tally("jaxfp8_" in said, said)
    return tally.verdict(said[:100])


@row("a compile cache of another version: an error names the call", peer=NONE)
def cache(library):
    """Compiled where the calls are, run where they are not: the program comes from the
    cache.
    """
    tally = Tally()
    (program, arguments, here) = exported(library)
    with tempfile.TemporaryDirectory() as folder:
        options = {
            "JAX_COMPILATION_CACHE_DIR": folder,
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        first = another_process.call_exported(program, arguments, **options)
        entries = len(list(pathlib.Path(folder).iterdir()))
        again = another_process.call_exported(program, arguments, **options)
        said = another_process.call_exported(program, arguments, "", **options)
    tally(
        same_bits(first, here) and same_bits(again, here) and entries > 0,
        f"with the library: {entries} entries",
    )
    tally("jaxfp8_" in said, f"without it: {said}")
    return tally.verdict(said[:100])
