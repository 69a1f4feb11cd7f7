"""Every program of every adapter, and every recipe: value, gradients and state are the
oracle's.
"""

import flax.nnx
import jax
import oracle
import pytest
from parametrize import each_row
from recipes.cases import KINDS

from . import functional, linen, nnx
from .known_amax import BY_PRODUCT, RECIPES, WITHOUT_STATE, check

ADAPTERS = {
    "jax": (functional.Functional, functional.PROGRAMS, jax.value_and_grad),
    "linen": (linen.Linen, linen.PROGRAMS, jax.value_and_grad),
    "nnx": (nnx.NNX, nnx.PROGRAMS, nnx.plain),
}
PROGRAMS = {
    f"{name}, {program}": (adapter, programs[program], plain)
    for name, (adapter, programs, plain) in ADAPTERS.items()
    for program in programs
}


WITH_STATE = [name for name, recipe in RECIPES.items() if recipe.rule is None]


def cases(programs, recipes, every=1):
    """Every program with delayed scaling, a third of them in `make test`; every recipe,
    or every so many, once; nightly each with each.
    """
    for place, program in enumerate(programs):
        for number, recipe in enumerate(recipes):
            is_shown = number in (0, place) and place % (every if number else 3) == 0
            marks = (
                []
                if is_shown
                else [pytest.mark.ci if number == 0 else pytest.mark.slow]
            )
            yield pytest.param(program, recipe, marks=marks, id=f"{program}-{recipe}")


OF_ADAPTERS = {
    adapter: [name for name in PROGRAMS if name.startswith(adapter)]
    for adapter in ADAPTERS
}
# a layer of Flax hands its recipe on
CASES = [
    case
    for adapter, names in OF_ADAPTERS.items()
    for case in cases(names, RECIPES, every=1 if adapter == "jax" else 3)
]


@pytest.mark.parametrize("program, recipe", CASES)
def test_programs(program, recipe):
    adapter, program, _ = PROGRAMS[program]
    check(adapter, program, RECIPES[recipe])


@pytest.mark.parametrize("program, recipe", list(cases(functional.RAGGED, WITH_STATE)))
def test_ragged_dot(program, recipe):
    """Its recipes are those with a scale for a whole tensor; without a state each
    member has its own.
    """
    check(functional.Ragged, functional.RAGGED[program], RECIPES[recipe])


@pytest.mark.parametrize(
    "program, recipe",
    [
        ("jax, scan", "mixed"),
        ("jax, members", "mixed"),
        ("linen, scan of layers, remat", "mixed"),
        ("jax, vmap", "delayed, wgrad plain"),
        ("jax, layers in a scan", "delayed, wgrad plain"),
        ("nnx, remat of each", "mixed"),
        ("linen, scan of layers", "delayed, wgrad plain"),
    ],
)
def test_by_product(program, recipe):
    """A recipe for each product, with state and without."""
    adapter, program, _ = PROGRAMS[program]
    check(adapter, program, BY_PRODUCT[recipe])


# One of each kind of loop, branch and boundary.
PLAIN = {
    f"jax, {name}"
    for name in (
        *functional.RAGGED,
        "branches in scan",
        "cond with arguments",
        "not taken",
        "some iterations",
    )
}


@pytest.mark.ci
@pytest.mark.parametrize(
    "program",
    [
        pytest.param(name, marks=[] if name in PLAIN else pytest.mark.slow)
        for name in PROGRAMS
    ],
)
def test_plain_gradient(program):
    """Without ours: right wherever all uses are seen at once, and a sum, which the
    comparison sees, elsewhere.
    """
    adapter, program, plain = PROGRAMS[program]
    if not program.cast:
        check(adapter, program, differentiate=plain, steps=1)
    else:
        with pytest.raises((AssertionError, ValueError), match="state"):
            check(adapter, program, differentiate=plain, steps=1)


@pytest.mark.parametrize(
    "program", ["remat with arguments", "cond with arguments", "carry"]
)
def test_max_grad(program):
    """One cast at the top of a loss that is differentiated by JAX."""
    check(
        functional.Functional,
        functional.PROGRAMS[program],
        differentiate=functional.max_grad,
        steps=1,
    )


@pytest.mark.parametrize("recipe", ["delayed", *KINDS])
def test_accumulation(recipe):
    check(
        functional.Functional,
        functional.PROGRAMS["loop"],
        RECIPES[recipe],
        differentiate=functional.accumulated,
    )


def test_max_grad_of_nnx():
    check(nnx.NNX, nnx.PROGRAMS["remat of each"], differentiate=nnx.max_grad)


@pytest.mark.parametrize("program", ["vmap", "members", "experts of one state"])
def test_without_state(program):
    """Delayed scaling then has the scale of the tensor at hand: one for a batch of x,
    one for each kernel.
    """
    check(functional.Functional, functional.PROGRAMS[program], WITHOUT_STATE)


@pytest.mark.parametrize(
    "program", ["vmap of vmap", "branches in scan", "remat with arguments"]
)
def test_bfloat16(program):
    check(functional.Functional, functional.PROGRAMS[program], dtype=oracle.BF16)


@pytest.mark.parametrize("program", ["loop", "carry"])
def test_without_jit(program):
    check(functional.Functional, functional.PROGRAMS[program], jit=False)


def test_disable_jit():
    """Every loop and every branch in Python, every operation by itself."""
    with jax.disable_jit():
        check(functional.Functional, functional.PROGRAMS["branches in scan"])


def test_nnx_without_jit():
    check(nnx.NNX, nnx.PROGRAMS["calls"], jit=False)


OTHER_LAYERS = {
    "nnx.Einsum": (nnx.Einsum, nnx.PROGRAMS["calls"]),
    "Linen in NNX": (nnx.LinenInNNX, nnx.PROGRAMS["remat of each"]),
    "linen.Fp8Einsum": (linen.Einsum, linen.PROGRAMS["scan"]),
    "NNX in Linen": (linen.NNXInLinen, linen.PROGRAMS["called"]),
}


@each_row("adapter, program", OTHER_LAYERS)
def test_other_layers(adapter, program):
    check(adapter, program, steps=3)


def test_nnx_state_as_argument():
    check(nnx.NNX, nnx.PROGRAMS["remat of each"], differentiate=nnx.of_split_state)


def test_nnx_without_the_graph_protocol():
    """NNX differentiates the whole module; the state comes with it."""
    with flax.nnx.set_graph_mode(False):
        check(nnx.NNX, nnx.PROGRAMS["calls"], jit=False)
