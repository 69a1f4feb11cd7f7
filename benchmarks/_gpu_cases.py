"""The cases of the GPU benchmark: what is built, checked and timed together, in one process each.

A case takes `Options` and returns `(rows, errors)`: rows by name of the candidate, with `us` and whatever the goals
(_gpu_goals.py) are made of; why a peer is missing.
"""

import dataclasses
import functools

import _gpu_models as models
import _gpu_torch
import _xla_peers
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
from _gpu_timing import Candidate, attempt, measure, program
from _hlo_gemms import gemms
from flax.training.train_state import TrainState
from jax import lax

from jaxfp8 import ops

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Options:
    """`tiny`: a dry run, at sizes for a CPU and with one of several like peers. `turns` of each candidate are timed."""

    tiny: bool
    turns: int

    def size(self, full: int, tiny: int = 64) -> int:
        return tiny if self.tiny else full

    def compilers(self, name: str = "") -> dict:
        """XLA's options that a candidate is compiled with, by the suffix of its name."""
        all_of_them = models.is_peer(name) and not self.tiny
        return models.COMPILERS if all_of_them else {"": None}


def normal(seed, shape, dtype=BF16):
    """Random numbers; zeros would run faster than what people train with."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def expect_close(name, got, want, bound):
    """Raises unless `|got - want| < bound * |want|` in the Euclidean norm; NaN never passes."""
    error = float(_distance(got, want))
    if not error < bound:
        raise AssertionError(f"{name}: off by {error:.2e} of the answer, expected less than {bound:.0e}")


@jax.jit
def _distance(got, want):
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.linalg.norm(got - want) / jnp.linalg.norm(want)


# ------------------------------------------------------------------------------------------------------------ ceilings


def ceilings(options):
    """The rates of the day: a bfloat16 product of 8192^3, and copies of gigabytes on the device."""
    n = options.size(8192)
    pairs = [(normal(i, (n, n)), normal(10 + i, (n, n))) for i in range(2)]
    candidates, errors = {}, {}
    for suffix, compiler in options.compilers().items():
        attempt(candidates, errors, f"bf16 matmul{suffix}", lambda c=compiler: program(jnp.matmul, pairs, c))
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["tflops"] = 2 * n**3 / row["us"] * 1e-6
    for gigabytes in (2, 4):
        words = options.size(gigabytes * 2**28, 2**12)
        source = [(jnp.arange(words, dtype=jnp.int32),)]
        copies = {
            "copy kernel": program(lambda x: x ^ 1, source),
            "copy by the driver": program(jnp.copy, source),
        }
        for name, row in measure(copies, options.turns).items():
            rows[f"{name}, {gigabytes} GB"] = row | {"gb_s": 8 * words / row["us"] * 1e-3}
    return rows, errors


# ---------------------------------------------------------------------------------------------------------------- GEMM


def gemm(options):
    """The FP8 product of random codes, by accumulation."""
    m = n = k = options.size(8192)
    scale = jnp.float32(2.0**-5)
    pairs = [tuple(ops.quantize(normal(10 * i + j, (n, k)), 1 / scale, E4M3)[0] for j in (1, 2)) for i in range(3)]
    wide = [(normal(10 * i, (m, k)), normal(10 * i + 1, (k, n))) for i in range(3)]
    a, b = (codes.astype(jnp.float32) for codes in pairs[0])
    want = jnp.matmul(a, b.T, precision="highest") * scale**2
    candidates, errors = {}, {}

    def ours(precise):
        def step(a, b):
            return ops.scaled_matmul(a, b, scale, scale, precise=precise)

        # bfloat16 rounds by up to 2**-9 of an element, half of that in the root mean square. Fast accumulation is good
        # to 2**-13 of the sum of magnitudes, which is sqrt(k) times the result.
        expect_close("scaled_matmul", jax.jit(step)(*pairs[0]), want, 2e-3 if precise else 2e-2)
        return program(step, pairs)

    def torchs(fast):
        candidate, first = _gpu_torch.scaled_mm(pairs, scale, scale, fast)
        expect_close("torch._scaled_mm", jnp.asarray(first), want, 2e-2)
        return candidate

    for name, precise in (("fast", False), ("precise", True)):
        attempt(candidates, errors, f"jaxfp8 {name}", functools.partial(ours, precise))
        if _gpu_torch.is_there():
            attempt(candidates, errors, f"torch._scaled_mm {name}", functools.partial(torchs, not precise))
    for suffix, compiler in options.compilers().items():
        attempt(candidates, errors, f"bf16{suffix}", lambda c=compiler: program(jnp.matmul, wide, c))
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["tflops"] = 2 * m * n * k / row["us"] * 1e-6
    return rows, errors


# ------------------------------------------------------------------------------------------------------ quantized reads


def quantize(options, op="quantize", dtype=BF16):
    """An op of memory traffic alone, against a copy and against what XLA makes of jnp."""
    n = options.size(8192)
    scale = jnp.float32(448 / 6.3)
    arrays = [(normal(i, (n, n), dtype), scale) for i in range(4)]

    def step(x, scale):
        return getattr(ops, op)(x, scale, E4M3)

    first = jax.jit(step)(*arrays[0])
    corner = np.asarray(arrays[0][0][: min(n, 256)]).astype(np.float32) * np.float32(scale)
    with ops.implementation("reference"):
        reference = jax.jit(lambda x, scale: step(x, scale))(*arrays[0])
    for got, want in zip(first, reference, strict=True):
        bits = [lax.bitcast_convert_type(x, jnp.uint8 if x.dtype.itemsize == 1 else jnp.uint32) for x in (got, want)]
        if not bool(jnp.all(bits[0] == bits[1])):
            raise AssertionError(f"{op}: not bitwise the reference")
    if (np.clip(corner, -448, 448).astype(ml_dtypes.float8_e4m3fn) != np.asarray(first[0][: len(corner)])).any():
        raise AssertionError(f"{op}: not bitwise what ml_dtypes rounds to")

    candidates, errors = {"jaxfp8": program(step, arrays)}, {}
    for name, peer in list(_xla_peers.EXACT[op].items())[: options.size(100, 1)]:
        attempt(candidates, errors, f"XLA: {name}", lambda peer=peer: program(lambda x, s: peer(x, s, E4M3), arrays))
    words = arrays[0][0].size * (jnp.dtype(dtype).itemsize + (1 if op == "quantize" else 2)) // 8
    # As many bytes as the op moves, half of them read.
    candidates["copy"] = program(lambda x: x ^ 1, [(jnp.arange(i, i + words, dtype=jnp.int32),) for i in range(4)])
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["gb_s"] = 8 * words / row["us"] * 1e-3
    return rows, errors


# -------------------------------------------------------------------------------------------------------------- layers


def _layer(options, make, names, m, k, n, sets):
    """Forward and backward of one layer, by all its peers. `make(name)` is a module; x is `[m, k]`, y `[m, n]`."""
    inputs = [(normal(2 * i, (m, k)), normal(2 * i + 1, (m, n))) for i in range(sets)]
    candidates, errors, gradients = {}, {}, {}

    def build(name, compiler):
        model = make(name)
        init = jax.jit(model.init)
        arguments = [(init(jax.random.key(i), x), x, grad) for i, (x, grad) in enumerate(inputs)]
        candidate = program(models.forward_and_backward(model), arguments, compiler)
        gradients[name] = candidate.call()[0][1][1]
        return candidate

    for name in names:
        for suffix, compiler in options.compilers(name).items():
            attempt(candidates, errors, name + suffix, functools.partial(build, name, compiler))

    def check(name):
        """Layers with other parameters (a fused MLP) start from other numbers: their gradient has to be finite."""
        dx = gradients[name]
        if dx.shape != inputs[0][0].shape or not bool(jnp.all(jnp.isfinite(dx))):
            raise AssertionError(f"{name}: the gradient of x is not finite")
        if _same_parameters(make, name.split(",")[0], k):
            # e5m2 keeps two bits of the gradient, e4m3 three: errors of up to 2**-3 and 2**-4 of an element, a third of
            # that in the root mean square, and several products one after the other in an MLP.
            expect_close(f"{name}: gradient of x", dx, gradients[models.BF16], 0.25)

    _drop_wrong(candidates, errors, check)
    gradients.clear()
    return measure(candidates, options.turns), errors


def _drop_wrong(candidates, errors, check):
    """Takes out what `check(name)` raises for: a wrong answer has no time."""
    for name in list(candidates):
        try:
            check(name)
        except AssertionError as error:
            del candidates[name]
            errors[name] = str(error)


def _same_parameters(make, name, k) -> bool:
    def shapes(name):
        variables = jax.eval_shape(make(name).init, jax.random.key(0), jax.ShapeDtypeStruct((16, k), BF16))
        return jax.tree.map(lambda leaf: leaf.shape, variables["params"])

    return shapes(name) == shapes(models.BF16)


LAYERS = (models.OWN, models.DROP_IN, models.FLAX, models.BF16)


def dense(options):
    """A Dense layer of 8192 x 8192 on 8192 rows, forward and backward, delayed scaling."""
    n = options.size(8192)
    rows, errors = _layer(options, lambda name: models.dense(name, n), LAYERS, n, n, n, sets=2)
    for row in rows.values():
        row["tflops"] = 6 * n**3 / row["us"] * 1e-6
    return rows, errors


def small_dense(options):
    """A Dense layer of 1024 x 1024 on 2048 rows, where launches decide."""
    m, n = options.size(2048), options.size(1024)
    return _layer(options, lambda name: models.dense(name, n), LAYERS, m, n, n, sets=options.size(8, 2))


def gated_mlp(options):
    """SwiGLU of 4096 by 14336 on 8192 rows. Ours is the fused layer."""
    m, width, hidden = options.size(8192), options.size(4096), options.size(14336, 128)
    rows, errors = _layer(options, lambda name: models.gated_mlp(name, hidden), LAYERS, m, width, width, sets=1)
    for row in rows.values():
        row["tflops"] = 18 * m * width * hidden / row["us"] * 1e-6
    return rows, errors


def torch_linear(options):
    """The Dense layer beside torch.compile's linear layer in FP8 and in bfloat16."""
    n = options.size(8192)
    rows, errors = _layer(options, lambda name: models.dense(name, n), (models.OWN, models.BF16), n, n, n, sets=1)
    if not _gpu_torch.is_there():
        return rows, errors | {"torch": "not installed, or without a GPU"}
    candidates = {}
    for name, fp8 in (("torch float8 linear", True), ("torch bf16 linear", False)):
        attempt(candidates, errors, name, functools.partial(_gpu_torch.linear, n, n, n, fp8))
    return rows | measure(candidates, options.turns), errors


def transformer_layer(options):
    """A layer of Llama 8B with Adam: a training step on two sequences of 4096."""
    length, width = options.size(4096), options.size(4096)
    heads, key_heads, hidden = options.size(32, 4), options.size(8, 2), options.size(14336, 128)
    x, target = normal(0, (2, length, width)), normal(1, (2, length, width))
    candidates, errors, losses = {}, {}, {}

    def loss_fn(variables, apply_fn, x, target):
        return jnp.mean((apply_fn(variables, x) - target).astype(jnp.float32) ** 2)

    def train_step(state, x, target):
        loss, grads = jax.value_and_grad(loss_fn)(state.params, state.apply_fn, x, target)
        return state.apply_gradients(grads=grads), loss

    def build(name, compiler, attention):
        model = models.TransformerLayer(name, heads, key_heads, hidden, attention)
        variables = jax.jit(model.init)(jax.random.key(2), x)
        state = TrainState.create(apply_fn=model.apply, params=variables, tx=optax.adam(1e-4))
        step = jax.jit(train_step, donate_argnums=0).lower(state, x, target).compile(compiler_options=compiler)
        facts = {"gemms": gemms(step.as_text()), "memory_mib": memory_mib(step), "attention": attention or "xla"}
        holder = [state]

        def call():
            holder[0], loss = step(holder[0], x, target)
            return loss

        losses[name] = float(call())
        return Candidate(call, 1, facts)

    on_gpu = jax.default_backend() == "gpu"
    for name in LAYERS:
        for suffix, compiler in options.compilers(name).items():
            attempt(
                candidates, errors, name + suffix, functools.partial(build, name, compiler, "cudnn" if on_gpu else None)
            )
            if name + suffix in errors and on_gpu:
                attempt(candidates, errors, name + suffix, functools.partial(build, name, compiler, "xla"))

    def check(name):
        # Both the target and the residual stream have variance 1 or more; the first losses differ by rounding.
        if not abs(losses[name] - losses[models.BF16]) < 0.1 * losses[models.BF16]:
            raise AssertionError(f"{name}: loss {losses[name]}, bf16 {losses[models.BF16]}")

    _drop_wrong(candidates, errors, check)
    rows = measure(candidates, options.turns)
    stats = jax.devices()[0].memory_stats() or {}
    for row in rows.values():  # of all candidates together; `memory_mib` is each one's own
        row["peak_of_the_process_mib"] = stats.get("peak_bytes_in_use", 0) / 2**20
    return rows, errors


def memory_mib(compiled) -> float:
    """What the program needs at once: arguments, results that are not arguments, temporaries."""
    memory = compiled.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return (sum(getattr(memory, name) for name in names) - memory.alias_size_in_bytes) / 2**20


# ------------------------------------------------------------------------------------------------------------ launches


def launches(options):
    """What one launch costs in a program of many small ones, as XLA's own fusions and as our custom calls."""
    count = options.size(200, 4)

    def chain(step):
        def run(x):
            for _ in range(count):
                x = lax.optimization_barrier(step(x))
            return x

        return run

    def scale(x):
        return ops.amax_to_scale(x, x, fp8_max=448.0)[0]

    small = jnp.ones((1,), jnp.float32)
    candidates = {
        "XLA fusion": program(chain(lambda x: x + 1), [(small,)]),
        "jaxfp8 custom call": program(chain(scale), [(small,)]),
    }
    rows = measure(candidates, options.turns)
    for row in rows.values():
        row["us_a_launch"] = row["us"] / count
    return rows, {}


@dataclasses.dataclass(frozen=True)
class Case:
    """`run(options) -> (rows, errors)`, in a process with `xla_flags`; `seconds` is what it may take on a GPU."""

    run: object
    seconds: int = 120
    xla_flags: str = ""


NO_GRAPHS = "--xla_gpu_enable_command_buffer="
# In order of importance: a budget that runs out takes the last ones.
CASES = {
    "ceilings": Case(ceilings, 60),
    "gemm": Case(gemm),
    "quantize bf16": Case(quantize, 60),
    "quantize_transpose bf16": Case(functools.partial(quantize, op="quantize_transpose"), 60),
    "dense": Case(dense, 180),
    "small_dense": Case(small_dense, 180),
    "launches": Case(launches, 60),
    "launches, no graphs": Case(launches, 60, NO_GRAPHS),
    "gated_mlp": Case(gated_mlp, 180),
    "transformer_layer": Case(transformer_layer, 240),
    "quantize f32": Case(functools.partial(quantize, dtype=jnp.float32), 60),
    "quantize_transpose f32": Case(functools.partial(quantize, op="quantize_transpose", dtype=jnp.float32), 60),
    "torch_linear": Case(torch_linear, 180),
    "small_dense, no graphs": Case(small_dense, 120, NO_GRAPHS),
}
