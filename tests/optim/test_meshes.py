"""Optimizer states on meshes: the same bits on each, laid out as their parameters, with
few collectives.
"""

import contextlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cpu_mesh import mesh_of
from equality import assert_same_bits
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

from jaxfp8 import optim, train

# optax raises a float to an integer power
pytestmark = pytest.mark.usefixtures("promotion_as_optax_wants")
# Shards of "odd" and "layers" are not multiples of 128; those of "wide" are.
MESHES = {
    "one device": ({"d": 1}, {}),
    "rows": ({"d": 8}, {"wide": P("d"), "odd": P("d"), "layers": P(None, "d")}),
    "columns": (
        {"d": 8},
        {"wide": P(None, "d"), "odd": P(None, "d"), "layers": P(None, None, "d")},
    ),
    "both": (
        {"d": 4, "t": 2},
        {"wide": P("d", "t"), "odd": P("t", "d"), "layers": P(None, "d", "t")},
    ),
}


def params():
    rng = np.random.default_rng(0)
    shapes = {"wide": (64, 1024), "odd": (64, 8 * 24), "layers": (2, 64, 64)}
    return {
        name: jnp.asarray(rng.normal(size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


def on(name, kind="Auto"):
    """Parameters on a mesh."""
    axes, specs = MESHES[name]
    mesh = mesh_of(kind, **axes)
    return {
        key: jax.device_put(x, NamedSharding(mesh, specs.get(key, P())))
        for key, x in params().items()
    }


def trained(variables, steps=3, start=0, opt_state=None):
    """The state after some steps, and the program of one."""
    tx = optim.quantized(optax.adam(1e-2))
    shardings = optim.shardings(jax.eval_shape(tx.init, variables), variables)
    if opt_state is None:
        opt_state = jax.jit(tx.init, out_shardings=shardings)(variables)
    else:
        opt_state = jax.device_put(opt_state, shardings)
    step = jax.jit(lambda grads, state: tx.update(grads, state)[1], donate_argnums=1)
    program = step.lower(variables, opt_state).compile().as_text()
    for i in range(start, start + steps):
        opt_state = step(
            jax.tree.map(lambda x, i=i: x * jnp.float32(0.1 + i), variables), opt_state
        )
    return opt_state, program


@pytest.fixture(scope="module")
def expected():
    with jax.numpy_dtype_promotion("standard"):
        return jax.device_get(trained(on("one device"))[0])


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("name", list(MESHES)[1:])
def test_bits_do_not_depend_on_the_mesh(name, kind, expected):
    variables = on(name, kind)
    state, program = trained(variables)
    assert_same_bits(jax.device_get(state), expected)
    for moments in (state.inner[0].mu, state.inner[0].nu):
        for key, moment in moments.items():
            shards = {x.shape for x in (s.data for s in moment.data.addressable_shards)}
            assert shards == {s.data.shape for s in variables[key].addressable_shards}
    if name == "rows":
        assert not re.findall(r" (?:all-|collective-|reduce-scatter)\S*\(", program)


def test_a_state_goes_on_on_another_mesh(expected):
    half, _ = trained(on("rows"), steps=1)
    state, _ = trained(on("both"), steps=2, start=1, opt_state=jax.device_get(half))
    assert_same_bits(jax.device_get(state), expected)


def test_shardings_are_those_of_parameters():
    variables = {"layer": on("columns")}
    state = jax.eval_shape(optim.quantized(optax.adam(1e-2)).init, variables)
    adam = optim.shardings(state, variables).inner[0]
    assert (
        adam.mu["layer"]["wide"].data.spec
        == adam.mu["layer"]["wide"].amax.spec
        == P(None, "d")
    )
    assert adam.mu["layer"]["odd"].data.spec == P(None, "d")
    assert (
        adam.mu["layer"]["odd"].amax.spec
        == adam.mu["layer"]["odd"].exponent.spec
        == P(None, None)
    )
    assert adam.count.spec == P()
    plain = optim.shardings(
        jax.eval_shape(optax.adam(1e-2).init, variables), variables
    )[0]
    assert plain.nu["layer"]["odd"].spec == P(None, "d")
    message = (
        r"params: expected a NamedSharding of each leaf, got .* of params\['layers'\]"
    )
    with pytest.raises(ValueError, match=message):
        optim.shardings(state, params())
    with pytest.raises(ValueError, match="params: expected arrays on a mesh, got none"):
        optim.shardings(state, {})


def test_shardings_of_the_variables_of_linen():
    """FP8 layers have their state beside the parameters; optax has the parameters
    alone.
    """
    variables = {"params": on("rows"), "_overwrite_with_gradient": {}}
    tx = optim.quantized(optax.adam(1e-2))
    states = [tx.init(variables["params"]), train.optimizer(tx).init(variables)]
    for placed in (
        optim.shardings(jax.eval_shape(lambda state=state: state), variables)
        for state in states
    ):
        moments = jax.tree.leaves(
            placed, is_leaf=lambda node: isinstance(node, optim.Moment)
        )
        specs = [leaf.data.spec for leaf in moments if isinstance(leaf, optim.Moment)]
        assert len(specs) == 6 and set(specs) == {P("d"), P(None, "d")}


@pytest.mark.parametrize("are_boxed", [(True, True), (True, False), (False, True)])
def test_shardings_of_boxed_parameters(are_boxed):
    """Logical axes of Linen box a parameter; its shape with a sharding mostly comes
    without the box.
    """

    def boxed(tree, is_boxed):
        return nn.LogicallyPartitioned(tree, names=("a", "b")) if is_boxed else tree

    of_state, of_params = (
        {"wide": boxed(on("rows")["wide"], is_boxed)} for is_boxed in are_boxed
    )
    state = jax.eval_shape(optim.quantized(optax.adam(1e-2)).init, of_state)
    mu = nn.unbox(optim.shardings(state, of_params).inner[0].mu["wide"])
    assert mu.data.spec == mu.amax.spec == P("d")


AXES = ("d", "t")
RULES = {"sharding_rules": (("input", "d"), ("output", "t"))}
# How Flax annotates a kernel; the value of an annotation may need the mesh.
ANNOTATIONS = {
    "names": lambda mesh: {"out_sharding": AXES},
    "rules": lambda mesh: {"out_sharding": ("input", "output"), **RULES},
    "spec": lambda mesh: {"out_sharding": P(*AXES)},
    "short spec": lambda mesh: {"out_sharding": P("d")},
    "sharding": lambda mesh: {"out_sharding": NamedSharding(mesh, P(*AXES))},
    "sharding of the optimizer": lambda mesh: {
        "out_sharding": P(),
        "optimizer_sharding": AXES,
    },
}


@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
@pytest.mark.parametrize("annotation", ANNOTATIONS)
def test_annotations_of_nnx_parameters(annotation, kind):
    """The 192 columns are 2 blocks, which 4 devices do not divide: annotations of a
    kernel do not fit its amaxes.
    """
    mesh = mesh_of(kind, d=2, t=4)
    metadata = ANNOTATIONS[annotation](mesh)
    has_mesh = isinstance(metadata["out_sharding"], NamedSharding)
    kernel = np.random.default_rng(0).normal(size=(64, 192)).astype(np.float32)

    def trained(metadata):
        model = nnx.Dict(kernel=nnx.Param(jnp.asarray(kernel), **metadata))
        optimizer = nnx.Optimizer(
            model, optim.quantized(optax.adam(1e-2)), wrt=nnx.Param
        )
        for _ in range(2):
            # the gradient of a sum of squares
            optimizer.update(model, nnx.clone(nnx.state(model)))
        return model, optimizer.opt_state.inner[0].mu["kernel"]

    expected, _ = trained({})
    with contextlib.nullcontext() if has_mesh else jax.set_mesh(mesh):
        model, moment = trained(metadata)
    assert_same_bits(model["kernel"][...], expected["kernel"][...])
    for variable in (moment.amax, moment.exponent):
        spec = variable.get_value().sharding.spec
        assert spec in (P("d"), P("d", None))
        if not has_mesh:  # Flax takes names and specs there
            assert nnx.get_partition_spec(variable).get_value() in (
                P("d"),
                P("d", None),
            )
    assert moment.data.get_value().sharding.spec in (
        (P("d"), P("d", None)) if "short" in annotation else (P(*AXES),)
    )


@pytest.mark.parametrize(
    "tx",
    [optim.quantized(optax.adam(1e-2)), optim.adamw(1e-2)],
    ids=["quantized", "adamw"],
)
def test_explicit_arrays_need_no_mesh_context(tx):
    """As in optax, outside of jit too."""
    states = []
    for variables in (params(), on("both", "Explicit")):
        _, state = tx.update(variables, tx.init(variables), variables)
        states.append(jax.device_get(state))
    assert_same_bits(*states)
