"""`jaxfp8.autocast`: which recipe a layer has, what state that makes, and when a
program is traced anew.
"""

import concurrent.futures
import contextlib
import functools
import threading

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from draws import KEY, normal
from flax import nnx
from numpy.testing import assert_array_equal

import jaxfp8
import jaxfp8.linen
import jaxfp8.nnx
from jaxfp8.recipes._autocast import resolve
from recipes.cases import MATMUL

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
K, N = 40, 6
CURRENT = jaxfp8.Float8CurrentScaling()
MX = jaxfp8.MXFP8BlockScaling()
ROWWISE = jaxfp8.Float8RowwiseScaling()
DELAYED = jaxfp8.DelayedScaling(amax_history_len=2)
X = normal(8, K)


def layer(recipe=None):
    return jaxfp8.linen.Dense(N, use_bias=False, recipe=recipe)


PARAMS = {"params": layer(CURRENT).init(KEY, X)["params"]}
KERNEL = PARAMS["params"]["kernel"]


def of(recipe):
    """What a layer gives that runs this recipe; None is high precision."""
    if recipe is None:
        return X @ KERNEL
    state = jaxfp8.DotGeneralState(None, None, None)
    return jaxfp8.dot_general(X, KERNEL, MATMUL, recipe=recipe, state=state)


# What delayed scaling gives without state: its scales are those of the tensors at hand.
WITHOUT_STATE = CURRENT


def assert_runs(recipe, model=None, variables=PARAMS):
    y = (model or layer()).apply(variables, X)
    assert_array_equal(y, of(recipe))


def test_regions():
    """Nested regions: the innermost wins, and outside all is as before; an error leaves
    a region too.
    """
    assert_runs(WITHOUT_STATE)
    with jaxfp8.autocast(MX):
        assert_runs(MX)
        with jaxfp8.autocast(ROWWISE):
            assert_runs(ROWWISE)
            with jaxfp8.autocast(enabled=False):
                assert_runs(None)
                with jaxfp8.autocast(MX):
                    assert_runs(MX)
            assert_runs(ROWWISE)
        with jaxfp8.autocast():
            assert_runs(WITHOUT_STATE)
        with pytest.raises(KeyError), jaxfp8.autocast(CURRENT):
            raise KeyError
        assert_runs(MX)
    assert_runs(WITHOUT_STATE)


def region_of(recipe):
    with jaxfp8.autocast(recipe):
        yield


def test_an_error_inside_has_no_other_error_above_it():
    with pytest.raises(ZeroDivisionError) as caught, jaxfp8.autocast(MX):
        raise ZeroDivisionError
    assert caught.value.__context__ is None


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 0, 1), (2, 1, 0)])
def test_regions_that_end_in_another_order(order):
    """Regions of generators: the innermost that is open wins, and after all of them
    none is left.
    """
    recipes = (MX, ROWWISE, CURRENT)
    generators = [region_of(recipe) for recipe in recipes]
    for generator in generators:
        next(generator)
    is_open = [True] * len(recipes)
    for i in order:
        generators[i].close()
        is_open[i] = False
        innermost = max((j for j in range(len(recipes)) if is_open[j]), default=None)
        expected = DELAYED if innermost is None else recipes[innermost]
        assert resolve(None, DELAYED) == expected
    with jaxfp8.autocast(MX):
        assert resolve(None, DELAYED) == MX


def flax_layer(recipe=None):
    return nn.Dense(
        N,
        use_bias=False,
        dot_general_cls=functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe),
    )


@pytest.mark.parametrize("make", [layer, flax_layer], ids=["ours", "nn.Dense"])
def test_layers_that_name_their_recipe(make):
    """They keep it; only a region without FP8 wins over it. HighPrecision is a name
    too.
    """
    with jaxfp8.autocast(MX):
        assert_runs(ROWWISE, make(ROWWISE))
        assert_runs(MX, make())
        assert_runs(None, make(jaxfp8.HighPrecision()))
        with jaxfp8.autocast(CURRENT, enabled=False):
            assert_runs(None, make(ROWWISE))
            assert_runs(None, make())
    assert_runs(ROWWISE, make(ROWWISE))
    assert_runs(None, make(jaxfp8.HighPrecision()))


def test_state_is_that_of_the_region():
    init = layer().init
    assert OWG in init(KEY, X)
    with jaxfp8.autocast(DELAYED):
        state = init(KEY, X)[OWG]["Fp8DotGeneral_0"]
        assert state["input_amax_history"].shape == (2,)
    for options in (
        {"recipe": MX},
        {"recipe": jaxfp8.HighPrecision()},
        {"enabled": False},
    ):
        with jaxfp8.autocast(**options):
            assert list(init(KEY, X)) == ["params"]


def test_jit_caches():
    """Another region is another program, the same one is not, and equal recipes are
    one.
    """
    traces = []

    @jax.jit
    def step(variables):
        traces.append(None)
        return jax.value_and_grad(
            lambda variables: jnp.sum(layer().apply(variables, X) ** 2)
        )(variables)

    regions = {
        "none": contextlib.nullcontext,
        "mx": lambda: jaxfp8.autocast(MX),
        "rowwise": lambda: jaxfp8.autocast(ROWWISE),
        "disabled": lambda: jaxfp8.autocast(enabled=False),
        "mx again": lambda: jaxfp8.autocast(jaxfp8.MXFP8BlockScaling()),
    }
    values = {}
    for _ in range(2):
        for name, region in regions.items():
            with region():
                value = float(step(PARAMS)[0])
            assert values.setdefault(name, value) == value
    assert len(traces) == len(set(values.values())) == 4
    assert values["mx again"] == values["mx"]


def test_threads():
    """A region is that of its thread."""
    barrier = threading.Barrier(2)

    def run(recipe):
        with jaxfp8.autocast(recipe):
            barrier.wait(60)
            return np.asarray(layer().apply(PARAMS, X))

    recipes = MX, ROWWISE
    with (
        jaxfp8.autocast(enabled=False),
        concurrent.futures.ThreadPoolExecutor(2) as pool,
    ):
        found = list(pool.map(run, recipes))
        assert_runs(None)
    assert_array_equal(found, list(map(of, recipes)))


def test_nnx():
    """NNX layers make their state where they are made, and say so when a region wants
    other state.
    """

    def linear(recipe=None):
        module = jaxfp8.nnx.Linear(
            K, N, use_bias=False, recipe=recipe, rngs=nnx.Rngs(0)
        )
        module.kernel.set_value(KERNEL)
        return module

    with jaxfp8.autocast(MX):
        made_for_mx = linear()
        assert not jax.tree.leaves(
            nnx.state(made_for_mx, jaxfp8.nnx.OverwriteWithGradient)
        )
    assert_array_equal(made_for_mx(X), of(MX))
    with jaxfp8.autocast(ROWWISE):
        assert_array_equal(made_for_mx(X), of(ROWWISE))
    with (
        jaxfp8.autocast(DELAYED),
        pytest.raises(
            ValueError, match="has state 'input_amax_history', which this layer lacks"
        ),
    ):
        made_for_mx(X)
    with jaxfp8.autocast(ROWWISE), jaxfp8.autocast(enabled=False):
        assert not jax.tree.leaves(
            nnx.state(linear(DELAYED), jaxfp8.nnx.OverwriteWithGradient)
        )
        assert_array_equal(made_for_mx(X), of(None))
    with jaxfp8.autocast(MX):
        assert_array_equal(linear(ROWWISE)(X), of(ROWWISE))


WRONG = [
    ({"recipe": "mx"}, "recipe"),
    ({"recipe": jaxfp8.MXFP8BlockScaling}, "recipe"),
    ({"enabled": 1}, "enabled"),
]


@pytest.mark.parametrize("options, name", WRONG, ids=["string", "class", "no bool"])
def test_errors(options, name):
    with (
        pytest.raises(TypeError, match=f"autocast: {name}: expected"),
        jaxfp8.autocast(**options),
    ):
        pass
