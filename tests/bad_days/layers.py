"""Layers from outside: what people pass to layers, optimizers and transforms, and what
was silent about it.
"""

import functools
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from cpu_mesh import mesh_of
from draws import KEY
from flax import nnx
from jax.sharding import PartitionSpec as P

import jaxfp8

from .libraries import HISTORY, OWG
from .steps import same_bits, tally_amaxes
from .trainers import K, N, create, kernel_of, loss, operands
from .verdict import Tally, row

RECIPE = jaxfp8.DelayedScaling(amax_history_len=HISTORY)
OURS_ALONE = "Flax has no FP8 layers for NNX, nor such arguments"


def warned(call) -> list:
    """The warnings about FP8 state, as Python's own filters show them."""
    with warnings.catch_warnings(record=True, action="default") as caught:
        call()
    return [w for w in caught if issubclass(w.category, jaxfp8.FP8StateWarning)]


def tally_warning(tally, call, says: str, what: str) -> None:
    """One warning, which says `says` and points at a line of this file."""
    said = warned(call)
    is_right = [says in str(w.message) and w.filename == __file__ for w in said]
    tally(is_right == [True], f"{what}: {list(map(str, said))}")


def nnx_layer():
    return nnx.Linear(
        K,
        N,
        use_bias=False,
        dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE),
        rngs=nnx.Rngs(0),
    )


def nnx_loss(layer, x, grad):
    return jnp.vdot(layer(x), grad)


@row("a gradient through a layer without its state")
def no_state(library):
    """Flax's usual TrainState holds `params` alone: that trains with other scales, and
    has to be said, with the layer's path; and by the report."""
    model = nn.Sequential([library.dense(N)])
    tally = Tally()
    x, kernel, grad = operands(0)
    params = {"layers_0": {"kernel": kernel}}

    def steps():
        gradient = jax.jit(
            jax.grad(lambda params: jnp.vdot(model.apply({"params": params}, x), grad))
        )
        for _ in range(2):
            gradient(params)
        jax.grad(lambda params: jnp.vdot(model.apply({"params": params}, x), grad))(
            params
        )

    said = warned(steps)
    tally(
        len({w.lineno for w in said}) == len(said) == 2,
        f"{len(said)} warnings for two lines",
    )
    tally(
        all(
            str(w.message).startswith("layers_0: ") and w.filename == __file__
            for w in said
        ),
        str(said),
    )
    tally(not warned(lambda: model.apply({"params": params}, x)), "inference warns")
    if library.is_ours:
        rows = jaxfp8.report(model, x, variables={"params": params}).rows
        tally("no state" in rows[0]["why"], f"the report says {rows[0]['why']}")
    return tally.verdict("a warning with the path")


@row(
    "a gradient through a layer without its state",
    "NNX, of parameters alone",
    peer=OURS_ALONE,
)
def left_out_state(library):
    """The first layer is named: by its path where the gradient is ours; else by its
    kernel, for NNX knows no paths.
    """
    tally = Tally()
    (x, _, grad) = operands(0)
    by_kernel = f"Fp8DotGeneral with a kernel [{K}, {N}]: "
    for gradient, names in ((jaxfp8.nnx.grad, ["0: "]), (nnx.grad, [by_kernel])):
        for wrap in (nnx.jit, lambda step: step):
            layers = nnx.List([nnx_layer(), nnx_layer()])

            @wrap
            def step(layers, gradient=gradient):
                loss = lambda layers: sum(nnx_loss(layer, x, grad) for layer in layers)  # noqa: E731
                gradient(loss, argnums=nnx.DiffState(0, nnx.Param))(layers)

            said = warned(lambda step=step, layers=layers: step(layers))
            starts = [
                str(w.message)[: len(name)]
                for w, name in zip(said, names, strict=False)
            ]
            tally(
                starts == names and len(said) == len(names),
                f"{[str(w.message) for w in said]}",
            )
            tally(
                all(w.filename == __file__ for w in said),
                f"points at {[w.filename for w in said]}",
            )
    return tally.verdict("the path, or the kernel")


@row("variables with another library's state", peer="Flax reads no other state")
def foreign_state(library):
    """Flax's or TransformerEngine's state beside a layer that does not read it: the
    warning says how to convert it, and the product is that without a state.
    """
    model = nn.Sequential([library.dense(N)])
    tally = Tally()
    x, kernel, _ = operands(0)
    theirs = nn.Sequential(
        [nn.Dense(N, use_bias=False, dot_general_cls=nn.Fp8DotGeneral)]
    )
    state = theirs.init(KEY, x)[OWG]
    te = {"layers_0": {"x_amax_history": np.zeros(HISTORY, np.float32)}}
    by_hand = (
        "scale = 1 / its scale, and amax_history = jnp.roll(its amax_history, 1, "
        "axis=-1)"
    )
    for collections, way_out in (
        ({OWG: state}, "from_flax"),
        ({"fp8_metas": te}, by_hand),
    ):
        variables = {"params": {"layers_0": {"kernel": kernel}}, **collections}
        tally_warning(tally, lambda v=variables: model.apply(v, x), way_out, way_out)
        alone = {"params": variables["params"]}
        with warnings.catch_warnings(action="ignore", category=jaxfp8.FP8StateWarning):
            got, expected = (model.apply(v, x) for v in (variables, alone))
        tally(same_bits(got, expected), f"{way_out}: another product")
    return tally.verdict("how to convert it")


@row("an optimizer of parameters alone drops the state", peer=OURS_ALONE)
def dropped_state(library):
    """Flax's nnx.Optimizer of parameters drops the next state without a word; beside
    update_state it is right.
    """
    tally = Tally()
    (x, _, grad) = operands(0)

    def run(stores, wrap, make=nnx.Optimizer):
        layer = nnx_layer()
        optimizer = make(layer, optax.sgd(1e-3), wrt=nnx.Param)

        def step(layer, optimizer):
            _, gradients = jaxfp8.nnx.value_and_grad(nnx_loss)(layer, x, grad)
            optimizer.update(layer, gradients)
            if stores:
                jaxfp8.nnx.update_state(layer, gradients)

        step = wrap(step)
        for _ in range(2):
            step(layer, optimizer)

    for wrap in (nnx.jit, lambda step: step):
        tally_warning(
            tally, lambda wrap=wrap: run(False, wrap), "jaxfp8.nnx.Optimizer", "dropped"
        )
        tally(
            not warned(lambda wrap=wrap: run(True, wrap)),
            "stored beside it, and a warning",
        )
        tally(
            not warned(lambda wrap=wrap: run(False, wrap, jaxfp8.nnx.Optimizer)),
            "our optimizer warns",
        )
    return tally.verdict("a warning")


@row("two gradients of one point are stored", "two apply_gradients")
def two_gradients(library):
    """Two losses at the same parameters, one after the other stored: one step, whose
    amaxes are the larger ones.
    """
    train = create(library, optax.sgd(1e-3))
    tally = Tally()
    before = 0

    @jax.jit
    def step(train, *uses):
        gradients = [
            jax.grad(lambda v, u=use: loss(train, v, *u))(train.params) for use in uses
        ]
        for gradient in gradients:
            train = train.apply_gradients(grads=gradient)
        return train

    for i in range(HISTORY + 1):
        kernel = kernel_of(train)
        uses = [operands(2 * i)[::2], operands(2 * i + 1)[::2]]
        train = step(train, *(uses if i % 2 else uses[::-1]))
        x, grad = (np.concatenate([use[j] for use in uses]) for j in (0, 1))
        tally_amaxes(tally, library, train.params, (x, kernel, grad))
        got = library.history(train.params, "input")[-1]
        tally(got == before, f"step {i}: the entry before is {got}, not {before}")
        before = np.abs(x).max()
    return tally.verdict("the larger amax")


@row("two gradients of one point are stored", "two NNX optimizers", peer=OURS_ALONE)
def two_optimizers(library):
    """Groups of parameters with an optimizer each: the run of one optimizer, but for
    the order of f32 sums.
    """
    tally = Tally()

    class Model(nnx.Module):
        def __init__(self):
            self.a = nnx_layer()
            self.b = nnx.Linear(
                N, N, rngs=nnx.Rngs(1), dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE)
            )

        def __call__(self, x):
            return self.b(self.a(x))

    @nnx.jit
    def step(model, optimizers, x, grad):
        _, gradients = jaxfp8.nnx.value_and_grad(nnx_loss)(model, x, grad)
        for optimizer in optimizers:
            optimizer.update(model, gradients)

    def run(*filters):
        model = Model()
        optimizers = nnx.List(
            [jaxfp8.nnx.Optimizer(model, optax.sgd(1e-3), wrt=wrt) for wrt in filters]
        )
        for i in range(HISTORY + 2):
            x, _, grad = operands(i)
            step(model, optimizers, x, grad)
        return jax.device_get(nnx.to_pure_dict(nnx.state(model)))

    groups = [nnx.All(nnx.Param, nnx.PathContains(name)) for name in "ab"]
    for got, expected in zip(
        *(jax.tree.leaves(run(*filters)) for filters in (groups, [nnx.Param])),
        strict=True,
    ):
        tally(
            np.allclose(got, expected, rtol=1e-5, atol=1e-6),
            f"{got}, with one optimizer {expected}",
        )
    return tally.verdict("as one optimizer")


@row("initializers with names of mesh axes", peer=OURS_ALONE)
def named_initializers(library):
    """The layers of ours with `with_partitioning`: the numbers of the plain layer, and
    the names where they belong.
    """
    tally = Tally()
    x = operands(0)[0]
    key = KEY
    init = nn.initializers.lecun_normal()
    linen = jaxfp8.linen
    cases = {
        "kernel": (linen.Dense((2, N)), (None, None, "m"), P(None, None, "m")),
        "wi": (linen.GatedMLP(N), (None, "m"), P(None, None, "m")),
        "dense": (linen.NormDense((N, 2)), (None, "m", None), P(None, "m", None)),
    }
    for name, (layer, names, spec) in cases.items():
        for wrap in (nn.with_partitioning, nn.with_logical_partitioning):
            with tally.raising(name):
                variables = layer.clone(kernel_init=wrap(init, names)).init(key, x)
                unboxed = nn.meta.unbox(variables)
                tally(same_bits(unboxed, layer.init(key, x)), f"{name}: parameters")
                specs = nn.get_partition_spec(variables)["params"][name]
                (got,) = jax.tree.leaves(specs)
                tally(got == spec, f"{name}: {got}")
    of_nnx = jaxfp8.nnx
    cases = {
        (None, None, "m"): lambda **o: of_nnx.Linear(K, (2, N), rngs=nnx.Rngs(0), **o),
        (None, "m"): lambda **o: of_nnx.GatedMLP(K, N, rngs=nnx.Rngs(0), **o).wi,
    }
    for names, make in cases.items():
        with tally.raising(str(names)), jax.set_mesh(mesh_of(m=2)):
            named = make(kernel_init=nnx.with_partitioning(init, names)).kernel[...]
            plain = make(kernel_init=init).kernel[...]
            tally(same_bits(np.asarray(named), np.asarray(plain)), f"{names}: kernel")
            spec = named.sharding.spec
            tally(spec == P(None, None, "m"), f"{names}: {spec}")
    return tally.verdict()


@row("out_sharding", peer=OURS_ALONE)
def out_sharding(library):
    """On a mesh with explicit axes the caller says where the result of a layer lies;
    its numbers are one device's.
    """
    tally = Tally()
    mesh = mesh_of("Explicit", d=2, m=2)
    x = operands(0)[0]
    linen = jaxfp8.linen
    of_nnx = jaxfp8.nnx
    spec = P("d", "m")
    cases = [
        functools.partial(layer.apply, layer.init(KEY, x))
        for layer in (linen.Dense(N), linen.GatedMLP(N), linen.NormDense(N))
    ]
    cases += [
        of_nnx.Linear(K, N, rngs=nnx.Rngs(0)),
        of_nnx.NormDense(K, N, rngs=nnx.Rngs(0)),
    ]
    for i, layer in enumerate(cases):
        expected = np.asarray(layer(x))
        with tally.raising(str(i)), jax.set_mesh(mesh):
            y = jax.jit(functools.partial(layer, out_sharding=spec))(x)
            tally(y.sharding.spec == spec, f"layer {i}: {y.sharding}")
            # f32 sums of K terms in another order: below K 2**-24 = 1.5e-6 of a sum of
            # magnitudes that is below 10
            tally(
                np.allclose(y, expected, rtol=1e-5, atol=1.5e-5),
                f"layer {i}: other numbers",
            )
    return tally.verdict()


@row("the max dtype", "a scale that the loss logs in a variable", peer=OURS_ALONE)
def logged_scale(library):
    """A scale that a module keeps is float32 afterwards: the internal dtype would break
    its checkpoint.
    """
    tally = Tally()
    (x, _, grad) = operands(0)

    class Logs(nnx.Module):
        def __init__(self):
            self.layer = nnx_layer()
            self.log = nnx.Variable(jnp.zeros(1))

        def __call__(self, x):
            self.log.set_value(self.layer.dot_general.input_scale.get_value())
            return self.layer(x)

    for wrap in (lambda f: f, nnx.jit):
        model = Logs()
        wrap(lambda model: jaxfp8.nnx.value_and_grad(nnx_loss)(model, x, grad))(model)
        tally(
            model.log.get_value().dtype == jnp.float32, f"{model.log.get_value().dtype}"
        )
    gradient = jaxfp8.grad(lambda tree: tree["w"] * 2.0, allow_int=True)(
        {"w": 3.0, "n": 4}
    )
    tally(gradient["w"] == 2 and gradient["n"].dtype == jax.dtypes.float0, "allow_int")
    return tally.verdict()
