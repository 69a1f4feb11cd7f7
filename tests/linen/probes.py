"""Linen programs whose every FP8 product is known beforehand, so that the oracle can say what state must come out.

A probe adds `<dense(x), grad>` to a total. So the gradient of each product's output is the `grad` it was given,
whatever the program around it does, and all uses of a quantizer are known to the bit.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle

import jaxfp8

M, K, N = 4, 6, 5
USES = 4
OPERANDS = ("input", "kernel", "output_grad")
RECIPE = jaxfp8.DelayedScaling(amax_history_len=3)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
FP8 = functools.partial(jaxfp8.Fp8DotGeneral, recipe=RECIPE)


def dense(**options):
    return nn.Dense(N, use_bias=False, dot_general_cls=FP8, **options)


class Probe(nn.Module):
    """`(total, (x, grad)) -> (total + <dense(x), grad>, None)`, in the form of a scan's body."""

    @nn.compact
    def __call__(self, total, use):
        x, grad = use
        return total + jnp.vdot(dense(name="dense")(x), grad), None


def data(step):
    """x `(USES, M, K)` and grad `(USES, M, N)`; the largest values are not always of the same use."""
    rng = np.random.default_rng(step)
    sizes = np.float32(2.0) ** rng.permutation(USES).astype(np.float32)
    x = rng.standard_normal((USES, M, K)).astype(np.float32) * sizes[:, None, None]
    grad = rng.standard_normal((USES, M, N)).astype(np.float32) * 1e-3 * sizes[::-1, None, None]
    return x, grad


def combine(states):
    """The state after several uses in one step: the same tail and scale, and the largest of the new amaxes."""
    result = []
    for name in OPERANDS:
        parts = [getattr(state, name) for state in states]
        for part in parts:
            assert part.scale == parts[0].scale and np.array_equal(part.amax_history[1:], parts[0].amax_history[1:])
        result.append(oracle.State(np.max([part.amax_history for part in parts], axis=0), parts[0].scale))
    return oracle.LayerState(*result)


def sum_of(products, what):
    """The sum of gradients: the errors add, and each of the f32 additions rounds a partial sum once."""
    total = sum(np.abs(p.exact) + p.bound for p in products)
    bound = sum(p.bound for p in products) + len(products) * oracle.PRECISE * total
    return oracle.Product(sum(p.exact for p in products), bound)


def assert_state(variables, wanted: oracle.LayerState, what):
    """Bitwise; `variables` are those of one `Fp8DotGeneral_0`, plain float32."""
    for name in OPERANDS:
        part = getattr(wanted, name)
        oracle.assert_bitwise(variables[f"{name}_amax_history"], part.amax_history, f"{what}: {name} amax_history")
        oracle.assert_bitwise(variables[f"{name}_scale"], part.scale.reshape(1), f"{what}: {name} scale")


def find(tree, key):
    """The one subtree under `key`, at whatever depth."""
    found = (
        [tree[key]] if key in tree else [hit for v in tree.values() if isinstance(v, dict) for hit in [find(v, key)]]
    )
    found = [hit for hit in found if hit is not None]
    return found[0] if found else None


def first_variables(module):
    """What `module.init` gives, with kernels from numpy: tracing without a compilation."""
    shapes = jax.eval_shape(module.init, jax.random.key(0), jnp.float32(0), data(0))
    rng = np.random.default_rng(7)
    values = {"kernel": rng.standard_normal, "amax_history": np.zeros, "scale": np.ones}

    def value(path, shape):
        return np.float32(next(make(shape.shape) for name, make in values.items() if path[-1].key.endswith(name)))

    return jax.tree_util.tree_map_with_path(value, shapes)


def train(module, rows, used=tuple(range(USES)), *, transform=jaxfp8.grad, steps=3):
    """Trains `module(total, (x, grad))` for some steps and compares state and kernel gradient with the oracle.

    Args:
        module: its variables hold one Dense of state.
        rows: None where all uses share one state, else how many rows of state there are: use i has row i.
        used: which uses the program runs.
        transform: jax.grad or jaxfp8.grad.
    """
    variables = first_variables(module)

    @jax.jit
    def step(variables, x, grad):
        def loss(variables):
            total, _ = module.apply(variables, jnp.float32(0), (x, grad))
            return jnp.sum(total)

        return transform(loss)(variables)

    states = [oracle.LayerState.init(RECIPE.amax_history_len) for _ in range(rows or 1)]
    for i in range(steps):
        x, grad = data(i)
        kernel = np.asarray(find(variables["params"], "kernel"))
        gradients = step(variables, x, grad)
        runs = {}
        for use in used:
            own = kernel[use] if kernel.ndim == 3 else kernel
            runs[use] = oracle.dense_step(x[use], own, grad[use], states[use if rows else 0])
        got = find(gradients[OWG], "Fp8DotGeneral_0")
        wgrad = find(gradients["params"], "kernel")
        if rows:
            for use, run in runs.items():
                states[use] = run.state
                assert_state({k: v[use] for k, v in got.items()}, run.state, f"step {i} row {use}")
        else:
            states = [combine([run.state for run in runs.values()])]
            assert_state(got, states[0], f"step {i}")
        if kernel.ndim == 3:
            for use, run in runs.items():
                run.wgrad.check(wgrad[use], f"step {i} kernel gradient {use}")
        else:
            sum_of([run.wgrad for run in runs.values()], "kernel").check(wgrad, f"step {i} kernel gradient")
        params = jax.tree.map(lambda p, g: p - 0.1 * g, variables["params"], gradients["params"])
        variables = {"params": params, OWG: gradients[OWG]}
