"""Layers, forward and backward: jaxfp8, Flax's FP8, bfloat16, PyTorch."""

import functools

import _gpu_models as models
import _gpu_torch
import jax
import jax.numpy as jnp
from _gpu_answers import expect_close
from _gpu_inputs import BF16, normal
from _gpu_timing import attempt, measure, program


def _layer(options, make, names, m, k, n, sets):
    """Time forward and backward of `make(name)`, a module with x `[m, k]` and y
    `[m, n]`, for each of `names`.
    """
    inputs = [(normal(2 * i, (m, k)), normal(2 * i + 1, (m, n))) for i in range(sets)]
    candidates, errors, gradients = {}, {}, {}

    def build(name, suffix, compiler):
        model = make(name)
        init = jax.jit(model.init)
        arguments = [
            (init(jax.random.key(i), x), x, grad) for i, (x, grad) in enumerate(inputs)
        ]
        candidate = program(models.forward_and_backward(model), arguments, compiler)
        gradients[name + suffix] = candidate.call()[0][1][1]
        return candidate

    for name in names:
        for suffix, compiler in options.compilers(name).items():
            attempt(
                candidates,
                errors,
                name + suffix,
                functools.partial(build, name, suffix, compiler),
            )

    def check(name):
        """Raise an AssertionError unless the gradient of x is finite and, with equal
        parameters, near bfloat16's.
        """
        dx = gradients[name]
        if dx.shape != inputs[0][0].shape or not bool(jnp.all(jnp.isfinite(dx))):
            raise AssertionError(f"{name}: the gradient of x is not finite")
        if _same_parameters(make, name.split(",")[0], k):
            # e5m2 keeps two bits of the gradient, e4m3 three: errors of up to 2**-3 and
            # 2**-4 of an element, a third of these in the root mean square. An MLP has
            # several products in a row.
            expect_close(f"{name}: gradient of x", dx, gradients[models.BF16], 0.25)

    _drop_wrong(candidates, errors, check)
    gradients.clear()
    return measure(candidates, options.turns), errors


def _drop_wrong(candidates, errors, check):
    """Remove candidates for which `check(name)` raises: a wrong answer is not timed."""
    for name in list(candidates):
        try:
            check(name)
        except AssertionError as error:
            del candidates[name]
            errors[name] = str(error)


def _same_parameters(make, name, k) -> bool:
    def shapes(name):
        variables = jax.eval_shape(
            make(name).init, jax.random.key(0), jax.ShapeDtypeStruct((16, k), BF16)
        )
        return jax.tree.map(lambda leaf: leaf.shape, variables["params"])

    return shapes(name) == shapes(models.BF16)


LAYERS = (models.OWN, models.DROP_IN, models.FLAX, models.BF16)


def dense(options):
    """Time a Dense layer of 8192 x 8192 on 8192 rows, forward and backward, with
    delayed scaling.
    """
    n = options.size(8192)
    rows, errors = _layer(
        options, lambda name: models.dense(name, n), LAYERS, n, n, n, sets=2
    )
    for row in rows.values():
        row["tflops"] = 6 * n**3 / row["us"] * 1e-6
    return rows, errors


def small_dense(options):
    """Time a Dense layer of 1024 x 1024 on 2048 rows, where the cost of launches
    decides.
    """
    m, n = options.size(2048), options.size(1024)
    return _layer(
        options,
        lambda name: models.dense(name, n),
        LAYERS,
        m,
        n,
        n,
        sets=options.size(8, 2),
    )


def gated_mlp(options):
    """Time SwiGLU of 4096 by 14336 on 8192 rows; "jaxfp8 own" is the fused layer."""
    m, width, hidden = options.size(8192), options.size(4096), options.size(14336, 128)
    rows, errors = _layer(
        options,
        lambda name: models.gated_mlp(name, hidden),
        LAYERS,
        m,
        width,
        width,
        sets=1,
    )
    for row in rows.values():
        row["tflops"] = 18 * m * width * hidden / row["us"] * 1e-6
    return rows, errors


def torch_linear(options):
    """Time the Dense layer beside torch.compile's linear layer in FP8 and in
    bfloat16.
    """
    n = options.size(8192)
    rows, errors = _layer(
        options,
        lambda name: models.dense(name, n),
        (models.OWN, models.BF16),
        n,
        n,
        n,
        sets=1,
    )
    if not _gpu_torch.is_there():
        return rows, errors | {"torch": "not installed, or without a GPU"}
    candidates = {}
    for name, fp8 in (("torch float8 linear", True), ("torch bf16 linear", False)):
        attempt(
            candidates, errors, name, functools.partial(_gpu_torch.linear, n, n, n, fp8)
        )
    return rows | measure(candidates, options.turns), errors


def memory_mib(compiled) -> float:
    """Return the MiB that the program needs at once: arguments, results that reuse no
    argument, temporaries.
    """
    memory = compiled.memory_analysis()
    names = ("argument_size_in_bytes", "output_size_in_bytes", "temp_size_in_bytes")
    return (
        sum(getattr(memory, name) for name in names) - memory.alias_size_in_bytes
    ) / 2**20
