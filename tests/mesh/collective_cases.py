"""Collectives in numpy, as a choice of elements; programs of several uses of one state,
and what they must give.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from cpu_mesh import mesh_of
from equality import assert_same_bits
from jax import lax
from jax.sharding import PartitionSpec as P
from oracle import BF16, F32, blocks as oracle_blocks
from programs.cases import pack, row, stack_rows
from programs.known_amax import HISTORY, used_state
from recipes import cases as recipe_cases

import jaxfp8
from jaxfp8 import collectives

DEVICES, USES = 8, 2
# Of x on one device. 160 is no multiple of a block; y of "all_to_all" has this shape
# too, so that no wrong collective fails because of shapes.
LOCAL = (8, 8, 160)


def mesh():
    return mesh_of(e=DEVICES)


# -------------------------------------------------------------------------- collectives


@dataclasses.dataclass(frozen=True)
class Case:
    """A collective: of the package without x, recipe and state; and in numpy, of
    `[DEVICES, *shard]`.

    Attributes:
        sums_back: whether cotangents are summed, in high precision.
    """

    send: Callable
    choose: Callable
    sums_back: bool = False


def _all_to_all(x):
    """split 0, concat 2, untiled."""
    return np.stack(
        [np.stack([x[s, d] for s in range(DEVICES)], axis=1) for d in range(DEVICES)]
    )


def _all_to_all_tiled(x):
    """split 0, concat 1."""
    parts = np.stack(np.split(x, DEVICES, axis=1))  # [destination, source, ...]
    return np.stack([np.concatenate(list(part), axis=1) for part in parts])


CASES = {
    "all_to_all tiled": Case(
        functools.partial(
            collectives.all_to_all,
            axis_name="e",
            split_axis=0,
            concat_axis=1,
            tiled=True,
        ),
        _all_to_all_tiled,
    ),
    "all_to_all": Case(
        functools.partial(
            collectives.all_to_all, axis_name="e", split_axis=0, concat_axis=-2
        ),
        _all_to_all,
    ),
    "all_gather": Case(
        functools.partial(collectives.all_gather, axis_name="e", axis=1),
        lambda x: np.stack([np.moveaxis(x, 0, 1)] * DEVICES),
        sums_back=True,
    ),
    "all_gather tiled": Case(
        functools.partial(collectives.all_gather, axis_name="e", tiled=True),
        lambda x: np.stack([np.concatenate(list(x))] * DEVICES),
        sums_back=True,
    ),
}


# ------------------------------------------------------------------------------ recipes


def backward_only(recipe):
    """A recipe that sends x in high precision and its cotangent as `recipe` does."""
    output_grad = recipe.quantizers()[2]
    return jaxfp8.CustomRecipe(
        lambda role: output_grad if role == "linear_grad_output" else None
    )


_RECIPES = {
    name: pair
    for name, pair in recipe_cases.RECIPES.items()
    if name in recipe_cases.KINDS
}
_RECIPES["delayed"] = (jaxfp8.DelayedScaling(amax_history_len=HISTORY), None)
_RECIPES["mx backward"] = (backward_only(jaxfp8.MXFP8BlockScaling()), recipe_cases.MX)
_RECIPES["none"] = (None, recipe_cases.CURRENT)
# name -> (recipe, rule in numpy; None is delayed scaling)
RECIPES = {
    name: (recipe and dataclasses.replace(recipe, pipeline_axes=()), rule)
    for name, (recipe, rule) in _RECIPES.items()
}


def quantized(name, x, state: oracle.State, is_grad: bool) -> np.ndarray:
    """What a recipe makes of all shards `[DEVICES, ..., n]`: quantized and dequantized,
    in their dtype.
    """
    _, rule = RECIPES[name]
    if name == "none" or (name == "mx backward" and not is_grad):
        return x
    if rule is None:
        codes, scale, _ = oracle.step(x, state, oracle.E5M2 if is_grad else oracle.E4M3)
        return oracle.dequantize(codes, F32(1) / scale, x.dtype)
    codes = rule.quantize(
        x.reshape(DEVICES, -1, x.shape[-1]),
        rule.tile,
        rule.backward if is_grad else rule.forward,
    )
    parts = zip(codes.codes, codes.scales, strict=True)
    values = np.stack([oracle_blocks.dequantize(*part, codes.block) for part in parts])
    return values.astype(F32).astype(x.dtype).reshape(x.shape)


# ----------------------------------------------------------------------------- programs


def loop(use, xs, grads, state):
    return stack_rows(use(*pair, state) for pair in zip(xs, grads, strict=True))


def scan(use, xs, grads, state):
    return lax.map(lambda pair: use(*pair, state), (xs, grads))


def vmap(use, xs, grads, state):
    return jax.vmap(use, (0, 0, None))(xs, grads, state)


def remat(use, xs, grads, state):
    return loop(jax.checkpoint(use), xs, grads, state)


def remat_in_scan(use, xs, grads, state):
    return scan(
        jax.checkpoint(use, policy=jaxfp8.checkpoint_policies.save_fp8_residuals),
        xs,
        grads,
        state,
    )


def layers(use, xs, grads, states):
    """A scan over layers with a state each, which `max_grad` reads before the loop."""
    return lax.map(lambda each: use(*each), (xs, grads, states))


PROGRAMS = [loop, scan, vmap, remat, remat_in_scan]


def step(case: Case, recipe, program=loop, check_vma=True, state_spec=None):
    """A jitted step `(xs, grads, state) -> (ys, gradient of xs, next state)`; arrays
    are `[USES, DEVICES, *shard]`.
    """

    def use(x, grad, state):
        y = case.send(x, recipe=recipe, state=state).dequantize(x.dtype)
        return jnp.sum(y.astype(jnp.float32) * grad.astype(jnp.float32)), y

    def shard(xs, grads, state):
        xs = xs[:, 0]
        grads = grads[:, 0]
        state = row(state, 0) if state_spec else state

        def loss(xs, state):
            values, ys = program(use, xs, grads, state)
            return jnp.sum(values), ys

        (_, ys), (dxs, state) = jaxfp8.value_and_grad(
            loss, argnums=(0, 1), has_aux=True
        )(xs, state)
        state = jax.tree.map(lambda leaf: leaf[None], state) if state_spec else state
        return ys[:, None], dxs[:, None], state

    specs = P(None, "e"), P(None, "e"), state_spec or P()
    specs = {"in_specs": specs, "out_specs": specs}
    return jax.jit(jax.shard_map(shard, mesh=mesh(), check_vma=check_vma, **specs))


def operands(case: Case, seed=0, dtype=BF16):
    """xs and grads. The grads are integers times 2**-6 whose sums over devices bfloat16
    holds.
    """
    rng = np.random.default_rng(seed)
    xs = rng.standard_normal((USES, DEVICES, *LOCAL)) * 2.0 ** rng.integers(
        -3, 4, (USES, DEVICES, 1, 1, 1)
    )
    shape = case.choose(np.zeros((DEVICES, *LOCAL))).shape
    grads = rng.integers(1, 13, (USES, *shape)) * np.array([2.0**-6, 2.0**-5]).reshape(
        USES, *[1] * len(shape)
    )
    return xs.astype(F32).astype(dtype), grads.astype(dtype)


def results(case: Case, name, x, grad, state: oracle.LayerState):
    """`(y, dx)` of one use, in numpy."""
    elements = case.choose(np.arange(x.size).reshape(x.shape))
    y = quantized(name, x, state.input, False).reshape(-1)[elements]
    if case.sums_back:
        dx = np.zeros(x.size)
        np.add.at(dx, elements.reshape(-1), grad.astype(np.float64).reshape(-1))
    else:
        dx = np.zeros(x.size, grad.dtype)
        dx[elements] = quantized(name, grad, state.output_grad, True)
    return y, dx.astype(grad.dtype).reshape(x.shape)


def next_state(case: Case, xs, grads, state: oracle.LayerState):
    """The next state of delayed scaling: the largest amax of the uses that have one;
    zeros of what is not used.
    """

    def after(old, fmt, tensors):
        amaxes = [amax for amax in map(oracle.amax, tensors) if np.isfinite(amax)]
        return oracle.next_state(old, oracle.select_scale(old, fmt), max(amaxes))

    unused = oracle.State(np.zeros(HISTORY, F32), F32(0))
    grad = unused if case.sums_back else after(state.output_grad, oracle.E5M2, grads)
    return pack(oracle.LayerState(after(state.input, oracle.E4M3, xs), unused, grad))


def compare(case_name, recipe_name, program=loop, check_vma=True, given=None) -> None:
    """Compare a step with numpy, to the bit; a NaN is a NaN."""
    case = CASES[case_name]
    (recipe, rule) = RECIPES[recipe_name]
    xs, grads = given or operands(case)
    state = used_state()
    start = pack(state) if rule is None else None
    ys, dxs, after = step(case, recipe, program, check_vma)(xs, grads, start)
    expected = [
        results(case, recipe_name, x, grad, state)
        for x, grad in zip(xs, grads, strict=True)
    ]
    for got, parts, what in ((ys, 0, "y"), (dxs, 1, "dx")):
        wanted = np.stack([pair[parts] for pair in expected])
        got = np.where(np.isnan(wanted) & np.isnan(got), wanted, got)
        oracle.assert_bitwise(got, wanted, what)
    if rule is None:
        assert_same_bits(after, next_state(case, xs, grads, state), "next state")
