"""Custom calls: bad buffers, errors inside programs, programs that are loaded elsewhere. Flax has no custom calls."""

import pathlib
import tempfile

import another_process
import jax
import jax.numpy as jnp
from ops import answers, bad_calls, cases, targets

from .steps import normal, same_bits
from .verdict import Tally, refused, row

NONE = "Flax makes no custom calls"


@row(
    "wrong dtype, rank, size, number of buffers or attribute of a custom call: an error that names it, process alive",
    peer=NONE,
)
def bad_buffers(library):
    tally = Tally()
    for op in targets.SPECS:
        calls = [
            (call, rf"\b{call.target}: {name}: expected")
            for name in targets.names(op)
            for call in bad_calls.bad_buffers(op, name)
        ]
        calls += [(call, rf"\b{call.target}: ") for call in bad_calls.bad_counts(op)]
        calls += bad_calls.bad_attributes(op)
        for call, message in calls:
            refused(lambda call=call: cases.run_target(call), tally, str(call), message or "INVALID_ARGUMENT")
        good = targets.filled(targets.good(op))
        tally(same_bits(cases.run_target(good)[:3], answers.answer(good)[:3]), f"{op}: the call after")
    return tally.verdict(f"{tally.count} of {tally.count} refused by name")


def exported(library):
    """An exported gradient step, its arguments, and what it gives here."""
    layer, x, variables = library.dense(5), normal(0, (6, 8)), library.variables(normal(1, (8, 5)))

    @jax.jit
    def step(variables, x):
        return jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(variables)

    arguments = variables, x
    return another_process.export(step, *arguments), (arguments, {}), jax.tree.leaves(step(*arguments))


@row("export and reload in another process: the same bits")
def reload(library):
    tally, (program, arguments, here) = Tally(), exported(library)
    got = another_process.call_exported(program, arguments, "import jaxfp8" if library.is_ours else "")
    tally(not isinstance(got, str), got, silent=False)
    tally(same_bits(got, here), "other bits")
    return tally.verdict("the same bits")


@row("export and reload without the library: an error that names the call, process alive", peer=NONE)
def reload_without(library):
    tally, (program, arguments, _) = Tally(), exported(library)
    said = another_process.call_exported(program, arguments, "")
    tally("jaxfp8_" in said, said)
    return tally.verdict(said[:100])


@row("a persistent compile cache from another version: an error that names the call, process alive", peer=NONE)
def cache(library):
    """Compiled where the calls are, run where they are not: the program comes from the cache."""
    tally, (program, arguments, here) = Tally(), exported(library)
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
    tally(same_bits(first, here) and same_bits(again, here) and entries > 0, f"with the library: {entries} entries")
    tally("jaxfp8_" in said, f"without it: {said}")
    return tally.verdict(said[:100])
