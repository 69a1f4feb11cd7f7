"""Custom calls: bad buffers, errors inside programs, programs that are loaded elsewhere. Flax has no custom calls."""

import pathlib
import tempfile

import another_process
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from ops import answers, bad_calls, cases, targets

import jaxfp8

from .steps import normal, same_bits
from .verdict import NotRun, Tally, refused, row

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


@row("a handler's error inside a program: the program fails, the process and the next call do not", peer=NONE)
def error_in_a_program(library):
    tally, x = Tally(), normal(1, (9, 11))

    def good(x):
        return jaxfp8.ops.quantize(x, np.float32(2), oracle.E4M3.dtype)

    def bad(x):
        shapes = [jax.ShapeDtypeStruct((7,), np.float32)]
        return jax.ffi.ffi_call(cases.TARGETS["amax"], shapes)(good(x)[0].astype(np.float32))[0]

    with jaxfp8.ops.implementation("ffi"):
        for _ in range(3):
            refused(lambda: jax.jit(bad)(x), tally, "a result of another size", "amax: amax: expected")
            codes, amax = jax.jit(good)(x)
            tally(same_bits((codes, amax), oracle.quantize(x, np.float32(2), oracle.E4M3)), "the next call is wrong")
    return tally.verdict()


LOAD = """
import jax, numpy as np
IMPORT
exported = jax.export.deserialize(bytearray(open("step.bin", "rb").read()))
with np.load("in.npz") as file:
    leaves = [file[name] for name in file.files]
try:
    out = jax.block_until_ready(exported.call(*leaves))
    np.savez("out.npz", *out)
    print("ran")
except Exception as error:
    print(type(error).__name__, str(error)[:300].replace(chr(10), " "))
"""


def exported(library, folder):
    """Writes a gradient step and its arguments; returns what it gives here."""
    layer = library.dense(5)
    leaves, treedef = jax.tree.flatten(library.variables(normal(1, (8, 5))))

    @jax.jit
    def step(x, *leaves):
        v = jax.tree.unflatten(treedef, leaves)
        return jax.tree.leaves(jax.grad(lambda v: jnp.sum(layer.apply(v, x) ** 2))(v))

    x = normal(0, (6, 8))
    checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jaxfp8.ops.custom_call_targets()]
    program = jax.export.export(step, disabled_checks=checks)(x, *leaves)
    (folder / "step.bin").write_bytes(program.serialize())
    np.savez(folder / "in.npz", x, *leaves)
    return step(x, *leaves)


def load(folder, imports, **environment) -> str:
    """What a fresh process says that loads and runs the step; an AssertionError where it died."""
    code = LOAD.replace("IMPORT", imports)
    done = another_process.python("-c", code, cwd=folder, PYTHONPATH=another_process.PATH, **environment)
    return done.stdout.strip().splitlines()[-1]


@row("export and reload in another process: the same bits")
def reload(library):
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        here = exported(library, folder)
        said = load(folder, "import jaxfp8" if library.is_ours else "")
        tally(said == "ran", said, silent=False)
        if said == "ran":
            with np.load(folder / "out.npz") as file:
                tally(same_bits([file[key] for key in file.files], here), "other bits")
    return tally.verdict("the same bits")


@row("export and reload without the library: an error that names the call, process alive", peer=NONE)
def reload_without(library):
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        exported(library, pathlib.Path(name))
        said = load(pathlib.Path(name), "")
    tally("jaxfp8_" in said, said)
    return tally.verdict(said[:100])


@row("a persistent compile cache from another version: an error that names the call, process alive", peer=NONE)
def cache(library):
    """Compiled where the calls are, run where they are not: the program comes from the cache."""
    tally = Tally()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        options = {
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        }
        exported(library, folder)
        first = load(folder, "import jaxfp8", **options)
        entries = len(list((folder / "cache").iterdir()))
        again = load(folder, "import jaxfp8", **options)
        said = load(folder, "", **options)
    tally(first == again == "ran" and entries > 0, f"with the library: {first}, {again}, {entries} entries")
    tally("jaxfp8_" in said, f"without it: {said}")
    return tally.verdict(said[:100])


@row("GPU: graph capture, two streams, small workspace, no algorithm, sm_80", peer=NONE)
def gpus(library):
    raise NotRun("needs a GPU; what can be tested without one is in tests/cuda")
