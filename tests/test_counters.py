"""Counters in the state of delayed scaling: every layer, transformation and mesh against numpy, and free where absent.

The products are of x `(uses, M, K)`, kernel and grad, all known: `use` is `vdot(layer(x), grad)`, so that grad is, to
the bit, what arrives at the output. Sizes are powers of two, so fractions are exact; of others XLA multiplies by a
rounded 1 / size.
"""

import dataclasses

import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import oracle
import pytest
from flax import linen as nn, nnx, serialization
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxfp8
from jaxfp8.inspect import with_counters, without_counters

M, K, N, H = 16, 32, 8, 3
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
OPERANDS = ("input", "kernel", "output_grad")
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def tensors(seed=0, uses=1, sizes=1.0):
    """x, kernel and grad: in each some elements saturate at scale 1 or become zero, in other numbers in every use."""
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return (rng.standard_normal(shape) * 2.0 ** rng.uniform(-30, 18, shape)).astype(np.float32)

    return draw(uses, M, K) * np.float32(sizes), draw(K, N), draw(uses, M, N)


class Expected:
    """The counters of one product over its steps."""

    def __init__(self):
        self.state = oracle.LayerState.init(H)
        self.counters = dict.fromkeys(OPERANDS, np.zeros(3, np.float32))

    def step(self, uses):
        """A step in which the product ran on each `(x, kernel, grad)` of `uses`."""
        steps = [oracle.dense_step(*of, self.state) for of in uses]
        for i, name in enumerate(OPERANDS):
            fmt = oracle.E5M2 if name == "output_grad" else oracle.E4M3
            fractions = [oracle.counts(of[i], steps[0].scales[name], fmt) / np.float32(of[i].size) for of in uses]
            after = getattr(steps[0].state, name).scale
            is_same = np.float32(after).tobytes() == np.float32(getattr(self.state, name).scale).tobytes()
            unchanged = self.counters[name][2] + 1 if is_same else 0
            self.counters[name] = np.float32([*np.max(fractions, axis=0), unchanged])
        states = [{name: getattr(step.state, name) for name in OPERANDS} for step in steps]
        self.state = oracle.LayerState(
            *(
                oracle.State(np.max([of[name].amax_history for of in states], axis=0), states[0][name].scale)
                for name in OPERANDS
            )
        )
        return self.counters


def assert_counters(got, expected, what, row=()):
    """`got(operand)` is the counters of that operand."""
    for name in OPERANDS:
        oracle.assert_bitwise(np.asarray(got(name))[row], expected[name], f"{what}: {name}")


def use(kernel, state, x, grad):
    return jnp.vdot(jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=RECIPE, state=state), grad)


def of_state(state):
    return lambda name: getattr(state, name).counters


def counted_state():
    return with_counters(jaxfp8.init_state(RECIPE))


# ------------------------------------------------------------------------------------------------------- step by step


class Plain:
    """The same few steps by `jaxfp8.dot_general`, a Linen layer and an NNX layer."""

    def __init__(self, kernel):
        self.state = counted_state()
        self.gradient = jax.jit(jax.grad(use, argnums=1), donate_argnums=1)

    def step(self, x, kernel, grad):
        self.state = jaxfp8.update_state(self.state, self.gradient(kernel, jax.tree.map(jnp.copy, self.state), x, grad))
        return of_state(self.state)


class Linen(Plain):
    def __init__(self, kernel):
        layer = nn.Dense(N, use_bias=False, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(RECIPE))
        variables = with_counters(layer.init(jax.random.key(0), np.ones((M, K), np.float32)))
        self.train = jaxfp8.linen.TrainState.create(apply_fn=layer.apply, params=variables, tx=optax.set_to_zero())
        self.gradient = jax.jit(jax.grad(lambda variables, x, grad: jnp.vdot(layer.apply(variables, x), grad)))

    def step(self, x, kernel, grad):
        params = self.train.params | {"params": {"kernel": jnp.asarray(kernel)}}
        self.train = self.train.replace(params=params)
        self.train = self.train.apply_gradients(grads=self.gradient(params, x, grad))
        (module,) = self.train.params[OWG].values()
        return lambda name: module[f"{name}_counters"]


class Nnx(Plain):
    def __init__(self, kernel):
        dot_general = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
        self.layer = nnx.Linear(K, N, use_bias=False, dot_general=dot_general, rngs=nnx.Rngs(0))
        self.layer.kernel.set_value(jnp.asarray(kernel))
        assert with_counters(self.layer) is self.layer
        loss = lambda layer, x, grad: jnp.vdot(layer(x), grad)  # noqa: E731
        self.gradient = nnx.jit(jaxfp8.nnx.grad(loss))

    def step(self, x, kernel, grad):
        jaxfp8.nnx.update_state(self.layer, self.gradient(self.layer, x, grad))
        return lambda name: getattr(self.layer.dot_general, f"{name}_counters").get_value()


@pytest.mark.parametrize("kind", [Plain, Linen, Nnx])
def test_steps(kind):
    """Scale 1, then the first from an amax, then no new largest amax for a while, then one."""
    x, kernel, grad = tensors()
    expected, product = Expected(), kind(kernel)
    seen = []
    for step, size in enumerate(np.float32([1, 1, 0.5, 4, 1])):
        uses = [(x[0] * size, kernel, grad[0])]
        counters = expected.step(uses)
        assert_counters(product.step(*uses[0]), counters, f"step {step}")
        seen.append(counters["input"])
    # The case covers what it is about: both fractions, and a scale that stays, changes, stays and changes.
    assert np.all(np.float32(seen)[:, 1] > 0) and seen[0][0] > 0 and seen[3][0] > 0
    assert [of[2] for of in seen] == [1, 0, 1, 2, 0]


@pytest.mark.parametrize("recipe", [pytest.param("callable", marks=pytest.mark.slow), "first_step"])
def test_any_way_to_a_scale(recipe):
    """An algorithm of the user's own, and a first scale from the tensor in hand: what counts is the scale that ran."""
    options = {"amax_compute_algo": jnp.max} if recipe == "callable" else {"first_step": "current"}
    recipe = dataclasses.replace(RECIPE, **options)
    (x,), kernel, (grad,) = tensors()
    state = with_counters(jaxfp8.init_state(recipe))

    def loss(state):
        return jnp.vdot(jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=recipe, state=state), grad)

    for _ in range(2):
        before, state = state, jaxfp8.update_state(state, jax.jit(jax.grad(loss))(state))
        scale = np.float32(1) / np.asarray(state.input.scale)[0]
        fractions = oracle.counts(x, scale, oracle.E4M3) / np.float32(x.size)
        steps = float(np.array_equal(before.input.scale, state.input.scale)) * (before.input.counters[2] + 1)
        oracle.assert_bitwise(state.input.counters, np.float32([*fractions, steps]), str(options))


# --------------------------------------------------------------------------------------------------- several uses: max


def scanned(kernel, state, x, grad):
    def body(total, of):
        return total + use(kernel, state, *of), None

    return jax.lax.scan(body, jnp.float32(0), (x, grad))[0]


def remat(kernel, state, x, grad):
    return sum(jax.checkpoint(use)(kernel, state, *of) for of in zip(x, grad, strict=True))


def twice(kernel, state, x, grad):
    return sum(use(kernel, state, *of) for of in zip(x, grad, strict=True))


@pytest.mark.parametrize("program", [scanned, *(pytest.param(f, marks=pytest.mark.slow) for f in (remat, twice))])
def test_uses_of_one_state(program):
    x, kernel, grad = tensors(1, uses=3)
    uses = [(of, kernel, g) for of, g in zip(x, grad, strict=True)]
    expected, state = Expected(), counted_state()
    gradient = jax.jit(jaxfp8.grad(program, argnums=1))
    for step in range(2):
        state = jaxfp8.update_state(state, gradient(kernel, state, x, grad))
        assert_counters(of_state(state), expected.step(uses), f"step {step}")


def test_microbatches():
    x, kernel, grad = tensors(2, uses=3)
    state, accumulated, gradient = counted_state(), None, jax.jit(jax.grad(use, argnums=1))
    for of in zip(x, grad, strict=True):
        accumulated = jaxfp8.accumulate_gradients(accumulated, gradient(kernel, state, *of))
    uses = [(of, kernel, g) for of, g in zip(x, grad, strict=True)]
    assert_counters(of_state(jaxfp8.update_state(state, accumulated)), Expected().step(uses), "accumulated")


def test_vmap():
    """A batch that shares its state is one larger tensor; states of their own count for themselves."""
    x, kernel, grad = tensors(3, uses=3)
    rows = x.reshape(-1, K), kernel, grad.reshape(-1, N)
    shared = jax.grad(lambda s: jnp.sum(jax.vmap(use, (None, None, 0, 0))(kernel, s, x, grad)))(counted_state())
    assert_counters(of_state(shared), Expected().step([rows]), "shared")
    stacked = with_counters(jax.tree.map(lambda leaf: jnp.stack([leaf] * 3), jaxfp8.init_state(RECIPE)))
    kernels = np.stack([kernel] * 3)
    own = jax.grad(lambda s: jnp.sum(jax.vmap(use)(kernels, s, x, grad)))(stacked)
    for i, of in enumerate(zip(x, grad, strict=True)):
        assert_counters(of_state(own), Expected().step([(of[0], kernel, of[1])]), f"member {i}", i)


@pytest.mark.parametrize("axis", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_layers_of_a_scan(axis):
    """Stacked state, the layers along either axis: a row each, and one that is not touched keeps what it has."""
    model = nn.scan(
        Block, variable_axes={"params": 0, OWG: axis}, split_rngs={"params": True}, variable_broadcast=False, length=3
    )()
    x = tensors(4)[0][0]
    variables = with_counters(model.init(jax.random.key(0), x, None))
    (leaf,) = {leaf.shape for path, leaf in flat(variables).items() if path[-1].endswith("counters")}
    assert leaf == ((3, 3) if axis == 0 else (3, 3))
    grads = jaxfp8.grad(lambda v: jnp.sum(model.apply(v, x, None)[0]))(variables)
    rows = np.asarray(grads[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"])
    rows = rows if axis == 0 else rows.T
    oracle.assert_bitwise(rows[0, :2], oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size), "the first layer")
    history = f"{'input'}_scale"
    module = grads[OWG]["Dense_0"]["Fp8DotGeneral_0"]
    index = (slice(1, 2), slice(None)) if axis == 0 else (slice(None), slice(1, 2))
    module[history] = module[history].at[index].set(0)  # the second layer did not run
    after = jaxfp8.update_state(variables, grads)[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"]
    after = np.asarray(after) if axis == 0 else np.asarray(after).T
    oracle.assert_bitwise(after[[0, 2]], rows[[0, 2]], "layers that ran")
    oracle.assert_bitwise(after[1], np.zeros(3, np.float32), "one that did not")


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.Dense(K, use_bias=False, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(RECIPE))(x), None


def flat(tree):
    return {tuple(str(getattr(k, "key", k)) for k in path): leaf for path, leaf in jax.tree.leaves_with_path(tree)}


# -------------------------------------------------------------------------------------------------------------- meshes


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_meshes(kind):
    """x, kernel and grad cut along different axes: the fractions of whole tensors, which are one device's bits."""
    x, kernel, grad = tensors(5, uses=2)
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(kind,) * 2)
    place = lambda value, *spec: jax.device_put(value, NamedSharding(mesh, P(*spec)))  # noqa: E731
    state, expected = jax.device_put(counted_state(), NamedSharding(mesh, P())), Expected()
    kernel_placed = place(kernel, None, "tp")

    def loss(state, kernel, x, grad):
        out = P("data", "tp") if kind == AxisType.Explicit else None
        y = jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=RECIPE, state=state, out_sharding=out)
        return jnp.sum(y * grad)

    with jax.set_mesh(mesh):
        for step, of in enumerate(zip(x, grad, strict=True)):
            wanted = (0,) if step == 0 else (0, 1)  # without a gradient of the kernel nothing is transposed
            placed = place(of[0], "data"), place(of[1], "data", "tp")
            gradient, *_ = jax.jit(jax.grad(loss, argnums=wanted))(state, kernel_placed, *placed)
            state = jaxfp8.update_state(state, gradient)
            assert_counters(of_state(state), expected.step([(of[0], kernel, of[1])]), f"step {step}")


@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map(check_vma):
    """Each device has a part of the rows, the same on both devices of "tp": the mean of eight fractions."""
    (x,), kernel, (grad,) = tensors(6)
    mesh = jax.make_mesh((4, 2), ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    recipe = dataclasses.replace(RECIPE, pipeline_axes=())

    def local(state, kernel, x, grad):
        def loss(state):
            return jnp.vdot(jaxfp8.dot_general(x, kernel, ROWS_BY_COLUMNS, recipe=recipe, state=state), grad)

        return jax.grad(loss)(state)

    specs = P(), P(), P("data"), P("data")
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    expected = Expected().step([(x, kernel, grad)])
    got = of_state(jax.jit(step)(counted_state(), kernel, x, grad))
    for name in OPERANDS:
        oracle.assert_bitwise(got(name), expected[name], name)


def test_pipeline_stages_count_for_themselves():
    x, kernel, grad = tensors(7, uses=4)
    mesh = jax.make_mesh((4, 2), ("stage", "data"), axis_types=(AxisType.Auto,) * 2)
    states = with_counters(jax.tree.map(lambda leaf: jnp.stack([leaf] * 4), jaxfp8.init_state(RECIPE)))

    def local(state, kernel, x, grad):
        state = jax.tree.map(lambda leaf: leaf[0], state)
        got = jax.grad(use, argnums=1)(kernel, state, x[0], grad[0])
        return jax.tree.map(lambda leaf: leaf[None], got)

    specs = P("stage"), P(), P("stage", "data"), P("stage", "data")
    got = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("stage")))(states, kernel, x, grad)
    for i, of in enumerate(zip(x, grad, strict=True)):
        expected = Expected().step([(of[0], kernel, of[1])])
        assert_counters(of_state(got), expected, f"stage {i}", i)  # halves: their mean is exact


# ------------------------------------------------------------------------------------------------ other ways to codes


def test_kernels_that_were_quantized_before():
    (x,), kernel, (grad,) = tensors(8)

    def loss(kernel, state):
        return use(jaxfp8.quantize_params({"w": kernel}, {"w": state}, RECIPE)["w"], state, x, grad)

    _, got = jax.jit(jax.grad(loss, argnums=(0, 1)))(kernel, counted_state())
    assert_counters(of_state(got), Expected().step([(x, kernel, grad)]), "quantize_params")


def test_inputs_that_are_computed_on_the_way():
    """relu is exact. A vmap that shares the state is more rows."""
    x, kernel, grad = tensors(9, uses=2)

    def loss(state, x, grad):
        return use(kernel, state, jaxfp8.activated(x, "relu"), grad)

    values = np.maximum(x, 0)
    got = jax.jit(jax.grad(loss))(counted_state(), x[0], grad[0])
    assert_counters(of_state(got), Expected().step([(values[0], kernel, grad[0])]), "one")
    got = jax.grad(lambda s: jnp.sum(jax.vmap(loss, (None, 0, 0))(s, x, grad)))(counted_state())
    rows = values.reshape(-1, K), kernel, grad.reshape(-1, N)
    assert_counters(of_state(got), Expected().step([rows]), "vmap")


@pytest.mark.slow
def test_groups_of_rows():
    (x,), _, (grad,) = tensors(10)
    kernels, sizes = np.random.default_rng(0).standard_normal((2, K, N)).astype(np.float32), np.int32([5, M - 5])

    def loss(state):
        return jnp.vdot(jaxfp8.ragged_dot(x, kernels, sizes, recipe=RECIPE, state=state), grad)

    got = jax.grad(loss)(counted_state())
    expected = oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size)
    oracle.assert_bitwise(got.input.counters, np.float32([*expected, 1]), "ragged_dot")


# -------------------------------------------------------------------------------------------------------- update_state


def test_what_was_not_used_stays():
    (x,), kernel, (grad,) = tensors(11)
    state = counted_state()
    new = jax.grad(use, argnums=1)(kernel, state, x, grad)
    without = jaxfp8.update_state(without_counters(state), new)
    assert structure(without) == structure(jaxfp8.init_state(RECIPE))
    state = jaxfp8.update_state(state, new)
    for new in (jax.tree.map(jnp.zeros_like, state), jax.tree.map(lambda leaf: leaf * np.nan, state)):
        after = jaxfp8.update_state(state, new)
        assert_counters(of_state(after), {name: np.asarray(of_state(state)(name)) for name in OPERANDS}, "not used")
    # A gradient that knows of no counters, from a program of before, says nothing about them.
    before, after = (
        nested(tree) for tree in (state, without_counters(jax.grad(use, argnums=1)(kernel, state, x, grad)))
    )
    after = jaxfp8.update_state(before, after)
    oracle.assert_bitwise(after[OWG]["a"]["input_counters"], np.asarray(state.input.counters), "kept")
    assert not np.array_equal(after[OWG]["a"]["input_amax_history"], state.input.amax_history)


def nested(state):
    leaves = {
        f"{name}_{field.name}": getattr(getattr(state, name), field.name)
        for name in OPERANDS
        for field in dataclasses.fields(state.input)
    }
    return {OWG: {"a": {name: leaf for name, leaf in leaves.items() if leaf is not None}}}


@pytest.mark.parametrize("factor", [3.0, 0.25])
def test_what_was_summed_or_scaled_is_undone(factor):
    """As the scale is: under a trace, where nobody can be told. Outside it raises."""
    (x,), kernel, (grad,) = tensors(12)
    state = counted_state()
    for _ in range(2):
        new = jax.grad(use, argnums=1)(kernel, state, x, grad)
        state, before = jaxfp8.update_state(state, new), state
    changed = jax.tree.map(lambda leaf: leaf * np.float32(factor), new)
    after = jax.jit(jaxfp8.update_state)(before, changed)
    for name in OPERANDS:
        # A product and a quotient of f32: two roundings, and one of the factor that is found.
        np.testing.assert_allclose(of_state(after)(name), of_state(state)(name), rtol=3 * 2.0**-23)
    with pytest.raises(ValueError, match="update_state"):
        jaxfp8.update_state(before, changed)


# ------------------------------------------------------------------------------------------------------ trees, programs


def test_free_where_absent():
    """A tree from which counters were taken away gives the very program of one that never had any."""
    (x,), kernel, (grad,) = tensors()
    plain, counted = jaxfp8.init_state(RECIPE), counted_state()
    assert len(jax.tree.leaves(plain.input)) == 2

    def programs(state):
        jaxpr = str(jax.make_jaxpr(jax.grad(use, argnums=1))(kernel, state, x, grad))
        traced = jax.jit(jax.grad(use, argnums=1)).trace(kernel, state, x, grad)
        update = jax.jit(jaxfp8.update_state).lower(state, state).as_text()
        return [jaxpr, update, *(traced.lower(lowering_platforms=(name,)).as_text() for name in ("cpu", "cuda"))]

    never, off, on = (programs(state) for state in (plain, without_counters(counted), counted))
    assert never == off and not any("count" in text for text in (never[0], *never[2:]))
    assert all(a != b for a, b in zip(never, on, strict=True))
    assert "@jaxfp8_quantize_transpose_counted_v1" in on[3] and "@jaxfp8_quantize_transpose_v2" not in on[3]


def test_only_what_is_asked_for():
    """The state decides for each quantizer."""
    (x,), kernel, (grad,) = tensors()
    state = dataclasses.replace(counted_state(), kernel=jaxfp8.init_state(RECIPE).kernel)
    got = jax.grad(use, argnums=1)(kernel, state, x, grad)
    assert got.kernel.counters is None and got.input.counters.shape == (3,)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.LayerNorm()(nn.Dense(K, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(RECIPE))(x))
        x = nn.Dense(K, dot_general_cls=lambda: jaxfp8.Fp8DotGeneral(jaxfp8.Float8CurrentScaling()))(x)
        return nn.Dense(N)(x)


@pytest.fixture(scope="module")
def variables():
    return Mlp().init(jax.random.key(0), np.ones((M, K), np.float32))


def structure(tree):
    return jax.tree.structure(tree)


def test_trees(variables):
    """Whatever holds state: counters beside each quantizer, nothing else changed, and gone again."""
    counted = with_counters(variables)
    names = {"/".join(path) for path in flat(counted).keys() - flat(variables).keys()}
    assert names == {f"{OWG}/Dense_0/Fp8DotGeneral_0/{name}_counters" for name in OPERANDS}
    assert structure(with_counters(counted)) == structure(counted)
    assert structure(without_counters(counted)) == structure(variables)
    assert flat(with_counters(variables[OWG])).keys() == flat(counted[OWG]).keys()
    frozen = with_counters(flax.core.freeze(variables))
    assert isinstance(frozen, flax.core.FrozenDict) and structure(frozen.unfreeze()) == structure(counted)
    shapes = with_counters(jax.eval_shape(lambda: variables))
    assert shapes[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"] == jax.ShapeDtypeStruct((3,), jnp.float32)
    tree = [counted_state(), (jaxfp8.init_state(RECIPE), 3)]
    assert structure(with_counters(tree)) == structure([counted_state(), (counted_state(), 3)])
    ones = jax.tree.map(jnp.ones_like, counted)
    assert all(np.all(leaf == 1) for leaf in jax.tree.leaves(with_counters(ones))), "those that are there stay"
    with pytest.raises(ValueError, match=r"with_counters: input_scale: expected .* got shapes \(2,\) and \(3,\)"):
        with_counters({"input_amax_history": jnp.ones(3), "input_scale": jnp.ones(2)})


@pytest.mark.slow
def test_optimizers_that_were_made_before(variables):
    """In the middle of training: a TrainState, and the state of a bare optax optimizer."""
    x = tensors()[0][0]

    def gradient(variables):
        return jax.grad(lambda v: jnp.sum(Mlp().apply(v, x)))(variables)

    train = jaxfp8.linen.TrainState.create(apply_fn=None, params=variables, tx=optax.sgd(1e-3, momentum=0.9))
    train = with_counters(train)
    train = train.apply_gradients(grads=gradient(train.params))
    tx = jaxfp8.train.optimizer(optax.sgd(1e-3, momentum=0.9))
    bare, opt_state = with_counters((variables, tx.init(variables)))
    updates, opt_state = tx.update(gradient(bare), opt_state, bare)
    for after in (train.params, optax.apply_updates(bare, updates)):
        counters = after[OWG]["Dense_0"]["Fp8DotGeneral_0"]["input_counters"]
        expected = oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size)
        oracle.assert_bitwise(counters, np.float32([*expected, 1]), "input")


def test_nnx_models():
    """In place, with the optimizer that was made before; states as trees; a bridged Linen model."""
    dot_general = jaxfp8.nnx.Fp8DotGeneral(RECIPE)
    model = nnx.Sequential(nnx.Linear(K, N, dot_general=dot_general, rngs=nnx.Rngs(0)), nnx.relu)
    before = nnx.state(model)
    optimizer = jaxfp8.nnx.Optimizer(model, optax.sgd(1e-3, momentum=0.9))
    with_counters(model), with_counters(optimizer)
    counters = model.layers[0].dot_general.input_counters
    assert type(counters) is jaxfp8.nnx.OverwriteWithGradient and counters.get_value().shape == (3,)
    x = tensors()[0][0]
    optimizer.update(model, jaxfp8.nnx.grad(lambda model: jnp.sum(model(x)))(model))
    assert model.layers[0].dot_general.input_counters.get_value()[2] == 1
    graph, state = nnx.split(model)
    again = with_counters(without_counters(state))
    assert structure(again) == structure(state) and structure(without_counters(state)) == structure(before)
    nnx.merge(graph, again)(x)
    assert structure(nnx.state(without_counters(model))) == structure(before)

    bridged = nnx.bridge.lazy_init(nnx.bridge.ToNNX(Mlp(), rngs=nnx.Rngs(0)), x)
    with_counters(bridged)
    jaxfp8.nnx.update_state(bridged, jaxfp8.nnx.grad(lambda model: jnp.sum(model(x)))(bridged))
    module = bridged.Dense_0["Fp8DotGeneral_0"]
    expected = oracle.counts(x, 1, oracle.E4M3) / np.float32(x.size)
    oracle.assert_bitwise(module["input_counters"].get_value(), np.float32([*expected, 1]), "bridged")


def test_placed_as_the_scale_is():
    mesh = jax.make_mesh((8,), ("stage",), axis_types=(AxisType.Auto,))
    sharding = NamedSharding(mesh, P("stage"))
    stacked = jax.tree.map(lambda leaf: jnp.stack([leaf] * 8), jaxfp8.init_state(RECIPE))
    counted = with_counters(jax.device_put(stacked, sharding))
    assert counted.input.counters.shape == (8, 3) and counted.input.counters.sharding == sharding


def test_state_of_another_shape_is_named():
    state = dataclasses.replace(counted_state().input, counters=jnp.zeros(2))
    state = dataclasses.replace(counted_state(), input=state)
    (x,), kernel, (grad,) = tensors()
    with pytest.raises(ValueError, match=r"state.input: expected counters \(3,\), got \(2,\); .*with_counters"):
        use(kernel, state, x, grad)


# --------------------------------------------------------------------------------------------------------- checkpoints


@pytest.mark.parametrize("saved_with", [False, True])
@pytest.mark.parametrize("used_with", [False, True])
def test_checkpoints(variables, saved_with, used_with):
    """The program that runs now says whether there are counters; a checkpoint without them is as any was before."""
    plain = jax.tree.map(lambda leaf: leaf + 1, jaxfp8.init_state(RECIPE))
    counted = jax.tree.map(lambda leaf: leaf + 1, counted_state())
    target = counted_state() if used_with else jaxfp8.init_state(RECIPE)
    got = serialization.from_bytes(target, serialization.to_bytes(counted if saved_with else plain))
    assert structure(got) == structure(target)
    np.testing.assert_array_equal(got.input.scale, 2)
    if used_with:
        np.testing.assert_array_equal(got.input.counters, float(saved_with))
    assert set(serialization.to_state_dict(plain.input)) == {"amax_history", "scale"}

    model, saved = (with_counters(variables) if flag else variables for flag in (used_with, saved_with))
    assert flat(jaxfp8.convert.merge_state(model, saved)).keys() == flat(model).keys()


def test_conversions_leave_them_out(variables):
    small = {OWG: {"a": {"Fp8DotGeneral_0": variables[OWG]["Dense_0"]["Fp8DotGeneral_0"]}}}
    assert structure(jaxfp8.convert.to_flax(with_counters(small))) == structure(jaxfp8.convert.to_flax(small))
    to_te = jaxfp8.convert.to_transformer_engine
    assert structure(to_te(with_counters(small))) == structure(to_te(small))


@pytest.mark.slow
def test_exported_programs():
    """Programs that take state are saved with the names of its classes, counters or not."""
    (x,), kernel, (grad,) = tensors()
    for state in (jaxfp8.init_state(RECIPE), counted_state()):
        checks = [jax.export.DisabledSafetyCheck.custom_call(name) for name in jaxfp8.ops._ffi.custom_call_targets()]
        exported = jax.export.export(jax.jit(jax.grad(use, argnums=1)), disabled_checks=checks)(kernel, state, x, grad)
        again = jax.export.deserialize(exported.serialize())
        jax.tree.map(
            np.testing.assert_array_equal, again.call(kernel, state, x, grad), exported.call(kernel, state, x, grad)
        )
