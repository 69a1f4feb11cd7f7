"""One layer whose operands, and so its amaxes, are given at every step; and what the
oracle says of any program of it.

A program adds `use(layer, x, grad) = <layer(x), grad>` over several uses. So `grad` is,
to the bit, the gradient at the layer's output, whatever stands around it, and value,
gradients and next state are known. Adapters (functional.py, linen.py, nnx.py) say what
a layer is and how a framework differentiates a program of it:

    Adapter(program, recipe, kernel, state, differentiate)
    .step(kernel, xs, grads)
        -> (value, gradient of the kernel, gradient of xs or None); advances the state
    .state
        -> {"input_scale": ..., "input_amax_history": ..., ...}; empty for recipes
        without state
"""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
import oracle
from equality import assert_same_bits
from oracle import E4M3, F32
from recipes import cases

import jaxfp8

USES, M, K, N, HISTORY = 4, 4, 6, 5, 4
OPERANDS = ("input", "kernel", "output_grad")
OWN = ("kernel", "state")


@dataclasses.dataclass(frozen=True)
class Program:
    """How a program runs the uses.

    Attributes:
        run: `(use, layer, xs, grads) -> total`, in the words of an adapter.
        own: what each use has for itself, stacked on axis 0: any of `OWN`.
        used: the uses that run; the state of others stays.
        groups: uses whose rows are one product, because `jax.vmap` runs over x alone. A
            state gives all uses one scale; of recipes without state each product has
            scales of its own.
        across: uses that several devices run at once, whose tensors have one scale;
            None where one device runs all.
        cast: whether the state crosses a boundary as an argument once a use, so that
            plain autodiff would add.
    """

    run: Callable
    own: tuple = ()
    used: tuple = tuple(range(USES))
    groups: tuple = tuple((use,) for use in range(USES))
    across: tuple | None = None
    cast: bool = False


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A recipe of the package, and the oracle's words for it: options of
    `oracle.dense_step`, or a rule.

    With `is_wgrad_plain` wgrad multiplies x and grad as they are.
    """

    recipe: object
    options: dict | None = None
    rule: cases.Rule | None = None
    is_wgrad_plain: bool = False


def _delayed(**options):
    """Delayed scaling with options that the oracle has by the same names."""
    recipe = jaxfp8.DelayedScaling(amax_history_len=HISTORY, **options)
    return Recipe(recipe, {"options": oracle.Options(**options)})


RECIPES = {
    "delayed": _delayed(),
    "most_recent": _delayed(amax_compute_algo="most_recent"),
    "margin": _delayed(margin=2),
    "e4m3": Recipe(
        jaxfp8.DelayedScaling(amax_history_len=HISTORY, fp8_format=jaxfp8.Format.E4M3),
        {"backward": E4M3},
    ),
    **{
        name: Recipe(recipe, rule=rule)
        for name, (recipe, rule) in cases.RECIPES.items()
        if name in cases.KINDS
    },
}

_DELAYED = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
_MIXED, _MIXED_RULE = cases.RECIPES["current | block | None"]
BY_PRODUCT = {
    "delayed, wgrad plain": Recipe(
        jaxfp8.ByProduct(_DELAYED, _DELAYED), {}, is_wgrad_plain=True
    ),
    "mixed": Recipe(_MIXED, rule=_MIXED_RULE),
}

WITHOUT_STATE = Recipe(jaxfp8.DelayedScaling(), rule=cases.CURRENT)

# ---------------------------------------------------------------------------- the layer


def operands(step, own=(), dtype=F32):
    """x `[USES, M, K]`, kernel `[K, N]` or `[USES, K, N]`, grad `[USES, M, N]`: the
    largest amaxes change places.
    """
    rng = np.random.default_rng(step)
    sizes = F32(2) ** rng.permutation(USES)[:, None, None]
    x = rng.standard_normal((USES, M, K)).astype(F32) * sizes
    grad = rng.standard_normal((USES, M, N)).astype(F32) * sizes[::-1] * F32(1e-3)
    kernel = rng.standard_normal((*([USES] if "kernel" in own else []), K, N)).astype(
        F32
    )
    return x.astype(dtype), kernel, grad.astype(dtype)


def used_state(seed=0) -> oracle.LayerState:
    """Full histories, no two slots alike, and stored scales that no history gives."""
    rng = np.random.default_rng(seed + 1000)
    histories = [rng.uniform(1, 9, HISTORY).astype(F32) for _ in OPERANDS]
    return oracle.LayerState(
        *(oracle.State(history, F32(rng.uniform(1, 2))) for history in histories)
    )


def leaves(state) -> dict:
    """A LayerState, or a list of them as rows, by the names of Flax's variables."""
    if isinstance(state, list):
        return {
            name: np.stack([leaves(row)[name] for row in state])
            for name in leaves(state[0])
        }
    parts = {name: getattr(state, name) for name in OPERANDS}
    return {f"{n}_amax_history": part.amax_history for n, part in parts.items()} | {
        f"{n}_scale": part.scale.reshape(1) for n, part in parts.items()
    }


def packed(leaves) -> jaxfp8.DotGeneralState:
    """Leaves by the names of Flax's variables as the package's pytree."""
    parts = [(leaves[f"{n}_amax_history"], leaves[f"{n}_scale"]) for n in OPERANDS]
    quantizers = (
        jaxfp8.recipes.QuantizerState(*map(jnp.asarray, part)) for part in parts
    )
    return jaxfp8.DotGeneralState(*quantizers)


def named(state: jaxfp8.DotGeneralState) -> dict:
    """The reverse of `packed`."""
    return {
        f"{name}_{leaf}": getattr(getattr(state, name), leaf)
        for name in OPERANDS
        for leaf in ("amax_history", "scale")
    }


# --------------------------------------------------------------------------- the oracle


def sum_of(products) -> oracle.Product:
    """The sum of gradients: the errors add, and each of the f32 additions rounds a
    partial sum once.
    """
    total = sum(np.abs(p.exact) + p.bound for p in products)
    bound = sum(p.bound for p in products) + len(products) * oracle.PRECISE * total
    return oracle.Product(sum(p.exact for p in products), bound)


def merged(states) -> oracle.LayerState:
    """The state after several uses in one step: the same tail and scale, and the
    largest of the new amaxes.
    """

    def largest(name):
        parts = [getattr(state, name) for state in states]
        assert all(
            p.scale == parts[0].scale
            and np.array_equal(p.amax_history[1:], parts[0].amax_history[1:])
            for p in parts
        )
        return oracle.State(
            np.max([part.amax_history for part in parts], axis=0), parts[0].scale
        )

    return oracle.LayerState(*map(largest, OPERANDS))


def _product(recipe: Recipe, x, kernel, grad, state):
    """y, dx and dkernel of one product, and the next state."""
    if recipe.rule is None:
        step = oracle.dense_step(
            x,
            kernel,
            grad,
            state,
            **recipe.options,
            out_dtype=x.dtype,
            dgrad_dtype=x.dtype,
        )
        wgrad = step.wgrad
        if recipe.is_wgrad_plain:
            wgrad = (
                cases.dense(len(x), K, N).expected(cases.PLAIN, x, kernel, grad).dkernel
            )
            wgrad = oracle.Product(wgrad.exact[0].T, wgrad.bound[0].T)
        return step.y, step.dgrad, wgrad, step.state
    step = cases.dense(len(x), K, N).expected(recipe.rule, x, kernel, grad)
    y, dx, dkernel = (
        oracle.Product(p.exact[0], p.bound[0]) for p in (step.y, step.dx, step.dkernel)
    )
    return y, dx, oracle.Product(dkernel.exact.T, dkernel.bound.T), None


def check(
    adapter,
    program: Program,
    recipe: Recipe = RECIPES["delayed"],
    *,
    steps=2,
    dtype=F32,
    **options,
):
    """Run some steps of a program; compare value, gradients and state with the oracle,
    the state bit by bit.
    """
    has_own_state = "state" in program.own
    states = [used_state(i) for i in range(USES if has_own_state else 1)]
    is_delayed = recipe.rule is None
    groups = program.groups
    if is_delayed:
        groups = [(use,) for use in program.used]
    elif isinstance(recipe.recipe, jaxfp8.Float8CurrentScaling):
        groups = program.across or program.groups
    groups = [group for group in groups if set(group) <= set(program.used)]

    def state():
        return leaves(states if has_own_state else states[0]) if is_delayed else {}

    layer = None
    for i in range(steps):
        xs, kernel, grads = operands(i, program.own, dtype)
        if layer is None:
            layer = adapter(program, recipe.recipe, kernel, state(), **options)
        runs = {}
        for group in groups:
            x, grad = (np.concatenate(array[list(group)]) for array in (xs, grads))
            first = group[0]
            own = kernel[first] if "kernel" in program.own else kernel
            runs[group] = _product(
                recipe, x, own, grad, states[first if has_own_state else 0]
            )
        if is_delayed and has_own_state:
            states = [
                runs[(use,)][3] if (use,) in runs else state
                for use, state in enumerate(states)
            ]
        elif is_delayed and runs:
            states = [merged([run[3] for run in runs.values()])]
        value, got_kernel, got_xs = layer.step(kernel, xs, grads)

        assert_same_bits(dict(layer.state), state(), f"step {i}: state")
        _total([(run[0], grads[list(group)]) for group, run in runs.items()]).check(
            value, f"step {i}: value"
        )
        if "kernel" in program.own:
            for (use,), run in runs.items():
                run[2].check(got_kernel[use], f"step {i}: gradient of kernel {use}")
        elif runs:
            sum_of([run[2] for run in runs.values()]).check(
                got_kernel, f"step {i}: gradient of the kernel"
            )
        else:
            assert not np.any(got_kernel)
        for group, run in runs.items() if got_xs is not None else ():
            run[1].check(
                got_xs[np.array(group)].reshape(-1, K),
                f"step {i}: gradient of x {group}",
            )


def _total(terms) -> oracle.Product:
    """The sum of `<y, grad>`: its f32 additions and products round less often than
    there are terms, twice.
    """
    pairs = [
        (y.exact, y.bound, oracle.widen(grad, np.float64).reshape(-1, N))
        for y, grad in terms
    ]
    size = sum(
        np.sum((np.abs(exact) + bound) * np.abs(grad)) for exact, bound, grad in pairs
    )
    bound = sum(np.sum(bound * np.abs(grad)) for _, bound, grad in pairs)
    exact = sum(np.sum(exact * grad) for exact, _, grad in pairs)
    return oracle.Product(
        np.float64(exact), bound + 2 * USES * M * N * oracle.PRECISE * size
    )
