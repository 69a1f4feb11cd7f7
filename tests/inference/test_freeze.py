"""freeze: the outputs of the model it was, bit by bit, from codes and fixed scales
alone.
"""

import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cpu_mesh import mesh_of
from draws import KEY
from equality import assert_same_bits
from flax import nnx, traverse_util
from jax.sharding import NamedSharding, PartitionSpec as P
from promotion import as_users_have_jax

import jaxfp8
import jaxfp8.nnx
from inference import models
from inference.models import OWG, ROWS_BY_COLUMNS, K, N, X

FAST = {"Dense, bf16", "own Dense", "rules", "Linear, bf16"}


def cases(table):
    return [
        pytest.param(name, marks=() if name in FAST else pytest.mark.slow)
        for name in table
    ]


@pytest.mark.parametrize("name", cases(models.LINEN))
def test_linen(name):
    model, variables, frozen = models.linen(name)
    assert_same_bits(models.run(model, frozen), models.run(model, variables), name)
    assert_same_bits(
        models.run(model, frozen, X / 3),
        models.run(model, variables, X / 3),
        f"{name}, other x",
    )
    assert OWG not in frozen, "fixed scales are parameters, and there is no other state"
    flat = traverse_util.flatten_dict(frozen["params"])
    gone = [path for path, leaf in flat.items() if not jax.tree.leaves(leaf)]
    codes = [
        path for path, leaf in flat.items() if path[-1] == "kernel" and path not in gone
    ]
    codes = [path for path in codes if flat[path].dtype == jnp.float8_e4m3fn]
    assert len(codes) == len(gone) + (name == "tied") > 0
    # A byte for each of four, and the scales of blocks, one for 32 elements at most.
    kernels = sum(flat[path].size for path in codes)
    saved = models.nbytes(variables) - models.nbytes(frozen)
    assert name == "tied" or saved >= 3 * kernels - 4 * kernels / 32 - 64


@pytest.mark.parametrize("name", cases(models.NNX))
def test_nnx(name):
    with as_users_have_jax():
        model = models.NNX[name](nnx.Rngs(0))
        if jax.tree.leaves(nnx.state(model, jaxfp8.nnx.OverwriteWithGradient)):
            jaxfp8.calibrate(model, [X, 2 * X])
        run = nnx.jit(lambda model, x: model(x))
        size = models.nbytes(nnx.state(model))
        wanted = run(model, X)
        other = run(model, X / 3)
        assert jaxfp8.freeze(model, X) is model
        assert_same_bits(run(model, X), wanted, name)
        assert_same_bits(run(model, X / 3), other, f"{name}, other x")
    assert not jax.tree.leaves(nnx.state(model, jaxfp8.nnx.OverwriteWithGradient))
    assert models.nbytes(nnx.state(model)) < 0.33 * size


def test_on_a_mesh():
    """Codes lie as their kernel does, so nothing is gathered; outputs are one device's
    where sums are exact.
    """
    mesh = mesh_of(data=2, model=4)
    model, variables, _ = models.linen("Dense, bf16")

    def place(path, leaf):
        spec = P(None, "model") if path[-1].key == "kernel" else P()
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    placed = jax.tree.map_with_path(place, variables)
    x = jax.device_put(X, NamedSharding(mesh, P("data")))
    frozen = jaxfp8.freeze(model, placed, x)
    codes = frozen["params"]["Fp8DotGeneral_0"]["kernel"]
    assert codes.sharding.is_equivalent_to(NamedSharding(mesh, P("model")), 2)
    assert_same_bits(frozen, models.linen("Dense, bf16")[2], "codes")
    # each sum on one device
    assert_same_bits(
        models.run(model, frozen, x), models.run(model, variables), "outputs"
    )
    text = jax.jit(model.apply).lower(frozen, x).compile().as_text()
    assert not any(
        word in text
        for word in ("all-gather", "all-reduce", "all-to-all", "collective-permute")
    )


def test_it_does_not_train():
    """The gradient of a kernel raises; that of x, and of parameters that are not
    frozen, is there.
    """
    model, variables, frozen = models.linen("Dense, bf16")

    def loss(variables, x):
        return jnp.sum(jnp.square(model.apply(variables, x).astype(jnp.float32)))

    with pytest.raises(TypeError, match=r"A model of jaxfp8.freeze does not train"):
        jax.grad(loss)(frozen, X)
    linear = models.NNX["Linear, bf16"](nnx.Rngs(0))
    jaxfp8.calibrate(linear, [X])
    jaxfp8.freeze(linear, X)
    with pytest.raises(TypeError, match=r"A model of jaxfp8.freeze does not train"):
        jaxfp8.nnx.grad(lambda model: jnp.sum(model(X).astype(jnp.float32)))(linear)
    with warnings.catch_warnings():  # there is no state to update
        warnings.simplefilter("error", jaxfp8.FP8StateWarning)
        got = jax.grad(loss, argnums=1)(frozen, X)
        bias = jax.grad(
            lambda bias: loss(frozen | {"params": frozen["params"] | {"bias": bias}}, X)
        )
        assert np.asarray(bias(frozen["params"]["bias"])).shape == (N,)
    # In the unfrozen model the gradient of y has the scale 1 of its empty history;
    # frozen it has its own.
    wanted = jax.grad(loss, argnums=(0, 1))(variables, X)[1]
    assert np.linalg.norm(got - wanted) < 0.2 * np.linalg.norm(wanted)


class OneProduct(nn.Module):
    """One product for two kernels: their shapes, or their numbers, differ."""

    second: str

    @nn.compact
    def __call__(self, x):
        product = jaxfp8.Fp8DotGeneral(recipe=jaxfp8.Float8CurrentScaling())
        kernel = self.param(
            "kernel",
            nn.initializers.normal(),
            (K, K if self.second != "narrower" else N),
        )
        other = {
            "narrower": kernel.T,
            "another": jnp.flip(kernel),
            "the same": kernel,
        }
        hidden = product(x, kernel, ROWS_BY_COLUMNS)
        return product(hidden, other[self.second], ROWS_BY_COLUMNS)


@pytest.mark.parametrize("second", ["narrower", "another", "the same"])
def test_one_product_with_several_kernels(second):
    """It has room for the codes of one. In NNX every layer has a product of its own
    after `freeze`.
    """
    model = OneProduct(second)
    variables = model.init(KEY, X)
    if second == "the same":
        assert_same_bits(
            model.apply(jaxfp8.freeze(model, variables, X), X),
            model.apply(variables, X),
            second,
        )
        return
    with pytest.raises(
        ValueError,
        match=(
            "freeze: model: expected one kernel for each FP8 product, got a product "
            "with several"
        ),
    ):
        jaxfp8.freeze(model, variables, X)


def test_a_product_of_two_activations_stays():
    """Its second operand is another one for each input; in a scan too."""

    class Scores(nn.Module):
        @nn.compact
        def __call__(self, x):
            keys = models.Scanned()(x)
            einsum = jaxfp8.linen.Fp8Einsum(recipe=models.RECIPE)
            return einsum("bqd,bkd->bqk", x, keys)

    model = Scores()
    variables = jaxfp8.calibrate(model, model.init(KEY, X), [X])
    frozen = jaxfp8.freeze(model, variables, X)
    assert list(frozen["params"]) == ["Scanned_0"]
    assert list(frozen[OWG]) == ["Fp8Einsum_0"]
    y = jnp.flip(X, 1)
    assert_same_bits(model.apply(frozen, y), model.apply(variables, y))


def test_products_in_branches():
    class Branches(nn.Module):
        def setup(self):
            self.a, self.b = (
                nn.Dense(K, dot_general_cls=models.fp8()) for _ in range(2)
            )

        def __call__(self, x):
            if self.is_initializing():
                return self.a(x) + self.b(x)
            return nn.cond(
                jnp.sum(x) > 0, lambda m, x: m.a(x), lambda m, x: m.b(x), self, x
            )

    model = Branches()
    variables = jaxfp8.calibrate(model, model.init(KEY, X), [X, -X])
    with pytest.raises(TypeError, match="cond branch outputs must have the same"):
        jaxfp8.freeze(model, variables, X)


@pytest.mark.parametrize(
    "computed",
    [lambda w: 2 * w, lambda w: w.T, lambda w: w / jnp.std(w)],
    ids=["2w", "wT", "std"],
)
@pytest.mark.parametrize("around", [lambda f: f, jax.jit, jax.checkpoint])
def test_nnx_layers_that_compute_their_kernel(computed, around):
    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.kernel = nnx.Param(rngs.normal((K, K)))
            self.dot_general = models.product(jaxfp8.Float8CurrentScaling())

        def __call__(self, x):
            def multiply(x, kernel):
                return self.dot_general(x, kernel, ROWS_BY_COLUMNS)

            return around(multiply)(x, computed(self.kernel[...]))

    model = nnx.Sequential(Layer(nnx.Rngs(0)))
    with pytest.raises(
        ValueError,
        match=(
            "freeze: layers/0: expected a layer that gives its product its kernel as "
            "it is"
        ),
    ):
        jaxfp8.freeze(model, X)


def test_nnx_products_that_other_methods_run():
    """A layer's product may run in any method; one of several layers has no name."""

    class Tied(nnx.Linear):
        def attend(self, x):
            return self.dot_general(x, self.kernel[...], ROWS_BY_COLUMNS)

    class Model(nnx.Module):
        def __init__(self, *products):
            rngs = nnx.Rngs(0)
            up, down = (Tied(K, K, dot_general=p, rngs=rngs) for p in products)
            self.up, self.down = up, down

        def __call__(self, x):
            return self.up.attend(self.down(x))

    shared, other = (models.product(jaxfp8.Float8CurrentScaling()) for _ in range(2))
    model = Model(shared, other)
    y = model(X)
    assert_same_bits(jaxfp8.freeze(model, X)(X), y)
    assert not isinstance(model.up.kernel, nnx.Param)
    with pytest.raises(ValueError, match="freeze: model: expected layers that call a"):
        jaxfp8.freeze(Model(shared, shared), X)


def test_policies_leave_codes_and_scales_alone():
    policy = jaxfp8.mixed_precision.Policy(*["bfloat16"] * 3)
    model, _, frozen = models.linen("Dense, bf16")
    assert_same_bits(
        policy.cast_to_compute(frozen)["params"]["Fp8DotGeneral_0"],
        frozen["params"]["Fp8DotGeneral_0"],
        "",
    )
    assert policy.cast_to_compute(frozen)["params"]["bias"].dtype == jnp.bfloat16
    model.apply(policy.cast_to_compute(frozen), X)
    layer = models.NNX["Linear, bf16"](nnx.Rngs(0))
    jaxfp8.freeze(jaxfp8.calibrate(layer, [X]), X)
    state = nnx.state(layer)
    assert_same_bits(
        policy.cast_to_compute(state)["dot_general"], state["dot_general"], "NNX"
    )


def test_errors():
    model = nn.Dense(N, dot_general_cls=models.fp8())
    variables = model.init(KEY, X)
    with pytest.raises(
        ValueError,
        match=r"freeze: Fp8DotGeneral_0/input: no amax was recorded.*jaxfp8.calibrate",
    ):
        jaxfp8.freeze(model, variables, X)
    with pytest.raises(
        ValueError, match=r"freeze: input: no amax was recorded.*jaxfp8.calibrate"
    ):
        jaxfp8.freeze(models.NNX["Linear, bf16"](nnx.Rngs(0)), X)
    model, _, frozen = models.linen("Dense, bf16")
    for given in (
        (nn.Dense(N), nn.Dense(N).init(KEY, X), X),
        (model, frozen, X),
        (nnx.Linear(K, N, rngs=nnx.Rngs(0)), X),
    ):
        with pytest.raises(
            ValueError,
            match=(
                "freeze: model: expected FP8 products that are not frozen yet, found "
                "none"
            ),
        ):
            jaxfp8.freeze(*given)
    with pytest.raises(
        ValueError, match=r"freeze: variables: expected a collection 'params'"
    ):
        jaxfp8.freeze(model, frozen["params"], X)
    with pytest.raises(
        TypeError, match=r"freeze: expected freeze\(model, variables, \*args\)"
    ):
        jaxfp8.freeze(model)
    with pytest.raises(
        TypeError, match=r"freeze: model: expected a Linen or an NNX module, got dict"
    ):
        jaxfp8.freeze(frozen)
