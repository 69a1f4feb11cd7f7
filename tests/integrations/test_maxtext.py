"""`jaxfp8.integrations.maxtext` on a stand-in with the names and contracts of MaxText
0.2.5.
"""

import dataclasses
import enum
import functools
import sys
import types
from typing import ClassVar, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import KEY, normal
from equality import assert_same_bits
from flax import nnx
from jax.sharding import PartitionSpec as P
from nnx.cases import assert_state, expected_state
from programs.cases import MATMUL

import jaxfp8
import jaxfp8.nnx
from jaxfp8.integrations import maxtext

K, N, H, STEPS = 8, 5, 4, 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)


def quantizations():
    class Fp8Quantization:
        needs_apply_rngs = False
        quantize_dtype = jnp.float8_e4m3fn

    def configure_quantization(config, quant_mode_str="train"):
        if config.use_qwix_quantization:
            return None
        if config.quantization.startswith("te_"):
            raise ModuleNotFoundError("No module named 'transformer_engine'")
        return (
            Fp8Quantization() if config.quantization == "fp8" else config.quantization
        )

    return types.SimpleNamespace(
        Fp8Quantization=Fp8Quantization, configure_quantization=configure_quantization
    )


def megablox():
    """The grouped product, with the arguments of MaxText's."""

    def gmm(
        lhs,
        rhs,
        group_sizes,
        preferred_element_type=jnp.float32,
        tiling=(128,) * 9,
        lhs_quantize_dtype=None,
        **others,
    ):
        return "megablox", lhs_quantize_dtype, tiling

    return types.SimpleNamespace(gmm=gmm)


def moe(megablox):
    """Experts of rows that know their expert; on each device they are sorted, and
    multiplied in chunks.
    """
    module = types.ModuleType("maxtext.layers.moe")
    module.jax = jax

    class RoutedMoE(nnx.Module):
        def __init__(self, quant, config, mesh, kernels):
            self.quant, self.config, self.mesh = quant, config, mesh
            names = "wi_0", "wi_1", "wo"
            self.kernels = nnx.List(map(nnx.Param, kernels))
            self.quant_einsums = nnx.Dict({name: einsum(quant) for name in names})

        def gmm(self, x, kernel, sizes):
            dtype = self.quant.quantize_dtype
            return megablox.gmm(
                lhs=x,
                rhs=kernel,
                group_sizes=sizes,
                lhs_quantize_dtype=dtype,
                preferred_element_type=jnp.float32,
            )

        def body(self, x, expert, wi_0, wi_1, wo):
            order = jnp.argsort(expert)
            sizes = jnp.bincount(expert, length=wo.shape[0]).astype(jnp.int32)
            if self.config.prefuse_moe_weights:
                both = self.gmm(x[order], jnp.concatenate([wi_0, wi_1], -1), sizes)
                gate, up = jnp.split(both, 2, axis=1)
            else:
                gate, up = (self.gmm(x[order], wi, sizes) for wi in (wi_0, wi_1))
            y = self.gmm(gate * up, wo, sizes)
            return jax.lax.psum_scatter(
                y[jnp.argsort(order)], "tensor", scatter_dimension=1, tiled=True
            )

        def sparse_matmul(self, x, expert):
            columns = P(None, None, "tensor")

            @functools.partial(
                module.jax.shard_map,
                mesh=self.mesh,
                in_specs=(P("fsdp"), P("fsdp"), columns, columns, P(None, "tensor")),
                out_specs=P("fsdp", "tensor"),
                check_vma=False,
            )
            def route_and_compute(x, expert, *kernels):
                count = self.config.num_moe_token_chunks
                chunks = jnp.split(x, count), jnp.split(expert, count)
                chunks = zip(*chunks, strict=True)
                return jnp.concatenate(
                    [self.body(*chunk, *kernels) for chunk in chunks]
                )

            kernels = [kernel.get_value() for kernel in self.kernels]
            return route_and_compute(x, expert, *kernels)

    module.RoutedMoE = RoutedMoE
    return module


def einsum(quant):
    """An einsum with state, as MaxText makes it while the experts are made."""
    bridged = nnx.bridge.ToNNX(quant.einsum(), rngs=nnx.Rngs(0))
    zero = jnp.zeros((1, 1))
    return nnx.bridge.lazy_init(bridged, "ab,bc->ac", zero, zero)


def nnx_decoders():
    class NNXDecoder:
        def minimal_policy(self, with_context=False, with_quantization=False):
            names = ["context"] * with_context + ["quantization"] * with_quantization
            return jax.checkpoint_policies.save_only_these_names("mlpwo", *names)

    return types.SimpleNamespace(NNXDecoder=NNXDecoder)


def gradient_accumulation():
    """One function: parameters are differentiated and added, all other variables go
    from microbatch to microbatch.
    """
    module = types.ModuleType("maxtext.utils.gradient_accumulation")
    module.nnx = nnx

    def gradient_accumulation_loss_and_grad(
        _loss_fn, config, model, params, params_shardings, data, dropout_rng
    ):
        graphdef, params, rest = module.nnx.split(model, module.nnx.Param, ...)
        grad_func = module.nnx.value_and_grad(_loss_fn, argnums=0, has_aux=True)

        def body(carry, data):
            local_model = module.nnx.merge(graphdef, params, carry["rest"], copy=True)
            _, grad = grad_func(local_model, config, data, None, None, is_train=True)
            _, _, rest = module.nnx.split(local_model, module.nnx.Param, ...)
            total = jax.tree.map(jnp.add, carry["grad"], grad)
            return {"grad": total, "rest": rest}, None

        zeros = {"grad": jax.tree.map(jnp.zeros_like, params), "rest": rest}
        carry, _ = jax.lax.scan(body, zeros, data)
        module.nnx.update(model, carry["rest"])
        return None, {}, carry["grad"]

    module.gradient_accumulation_loss_and_grad = gradient_accumulation_loss_and_grad
    return module


def train_utils():
    def validate_train_config(config):
        assert config.run_name
        assert (
            config.quantization != "fp8" or config.gradient_accumulation_steps == 1
        ), "fp8 can't be used with"

    return types.SimpleNamespace(validate_train_config=validate_train_config)


class Config:
    """A configuration, as it is after its validation."""

    model_fields: ClassVar = {
        "quantization": types.SimpleNamespace(annotation=enum.Enum)
    }
    quantization = "fp8"
    gradient_accumulation_steps = 4
    megablox = False

    def set_derived_and_validate_values(self):
        if self.quantization == "fp8" and self.gradient_accumulation_steps > 1:
            raise ValueError(
                "FP8 quantization is not compatible with gradient accumulation."
            )
        self.validated_as = self.quantization
        return self


@pytest.fixture
def standin(monkeypatch):
    """The modules, and one that has imported the accumulation by name, as MaxText's
    `train` does.
    """
    pyconfig = types.SimpleNamespace(
        _initialize_pydantic=lambda argv, config_class=Config: config_class,
        types=types.SimpleNamespace(MaxTextConfig=Config),
    )
    modules = {
        "layers.quantizations": quantizations(),
        "kernels.megablox": (grouped_products := megablox()),
        "layers.moe": moe(grouped_products),
        "layers.nnx_decoders": nnx_decoders(),
        "utils.gradient_accumulation": gradient_accumulation(),
        "configs.pyconfig": pyconfig,
        "utils.train_utils": train_utils(),
    }
    accumulate = modules[
        "utils.gradient_accumulation"
    ].gradient_accumulation_loss_and_grad
    modules["trainers.pre_train.train"] = types.SimpleNamespace(
        gradient_accumulation_loss_and_grad=accumulate, loss_fn=loss_fn
    )
    for name in modules:
        *packages, _ = f"maxtext.{name}".split(".")
        for n in range(len(packages)):
            monkeypatch.setitem(
                sys.modules, ".".join(packages[: n + 1]), types.ModuleType(packages[n])
            )
    for name, module in modules.items():
        module.__name__ = f"maxtext.{name}"
        monkeypatch.setitem(sys.modules, f"maxtext.{name}", module)
    pydantic = types.SimpleNamespace(
        model_validator=lambda mode: lambda validator: validator
    )
    monkeypatch.setitem(sys.modules, "pydantic", pydantic)
    yield types.SimpleNamespace(
        **{name.split(".")[-1]: module for name, module in modules.items()}
    )
    maxtext._installed.close()


@dataclasses.dataclass
class TrainConfig:
    quantization: str
    gradient_accumulation_steps: int = 1
    use_qwix_quantization: bool = False
    run_name: str = "run"
    act_quantization_calibration_method: str = "absmax"
    weight_quantization_calibration_method: str = "absmax"
    bwd_quantization_calibration_method: str = "absmax"


def quantization(standin, flag="fp8"):
    return standin.quantizations.configure_quantization(
        TrainConfig(flag), quant_mode_str="train"
    )


class Model(nnx.Module):
    """A kernel and a bridged Linen product, as MaxText's dense layer has them."""

    def __init__(self, quantization):
        self.kernel = nnx.Param(jnp.asarray(normal(K, N)))
        self.product = nnx.bridge.ToNNX(
            quantization.dot_general_cls()(), rngs=nnx.Rngs(0)
        )
        nnx.bridge.lazy_init(
            self.product,
            jnp.zeros((1, K)),
            self.kernel.get_value(),
            MATMUL,
        )

    def __call__(self, x):
        y = self.product(x, self.kernel.get_value(), MATMUL)
        # MaxText's bridge stores anew what it has read
        for name, variable in list(vars(self.product).items()):
            if isinstance(variable, jaxfp8.nnx.OverwriteWithGradient):
                setattr(
                    self.product,
                    name,
                    jaxfp8.nnx.OverwriteWithGradient(variable.get_value()),
                )
        return y


def loss_fn(model, config, data, dropout_rng, params, is_train=True):
    del config, dropout_rng, params, is_train
    x, grad = data
    return jnp.vdot(model(x), grad), {}


def test_accumulation_is_one_step_of_the_largest_amaxes(standin):
    """Two steps of four microbatches against the oracle: each runs on the state from
    before the step.
    """
    with maxtext.install(RECIPE):
        model = Model(quantization(standin))
        accumulate = standin.train.gradient_accumulation_loss_and_grad
        graphdef, state = nnx.split(model)

        @jax.jit
        def step(state, data):
            model = nnx.merge(graphdef, state)
            _, _, grads = accumulate(loss_fn, None, model, None, None, data, None)
            return nnx.state(model), grads

        expected = oracle.LayerState.init(H)
        kernel = np.asarray(model.kernel.get_value())
        for i in range(2):
            rng = np.random.default_rng(i)
            # the largest is neither first nor last
            sizes = np.roll([1.0, 8.0, 2.0, 4.0], i)[:, None, None]
            x, grad = (
                (rng.standard_normal((STEPS, 6, n)) * sizes).astype(np.float32)
                for n in (K, N)
            )
            state, grads = step(state, (x, grad))
            uses = list(zip(x, [kernel] * STEPS, grad, strict=True))
            steps = [oracle.dense_step(*microbatch, expected) for microbatch in uses]
            expected = expected_state(uses, expected)
            assert_state(nnx.merge(graphdef, state).product, expected, f"step {i}")
            assert not hasattr(nnx.merge(graphdef, state), "fp8_next_state")
            exact, bound = (
                sum(getattr(of.wgrad, name) for of in steps)
                for name in ("exact", "bound")
            )
            # Beside the bounds of the products, STEPS sums in f32.
            room = STEPS * 2.0**-24 * sum(np.abs(of.wgrad.exact) for of in steps)
            oracle.Product(exact, bound + room).check(grads["kernel"].get_value())


def test_state_of_linen_is_not_added_up(standin):
    """MaxText before 0.2.5 has Linen models, whose state is among the parameters that
    it sums.
    """
    with maxtext.install(RECIPE):
        model = nn.Dense(N, dot_general_cls=quantization(standin).dot_general_cls())
        params = model.init(KEY, jnp.ones((1, K)))
        with pytest.raises(
            TypeError,
            match=(
                "maxtext: model: expected an NNX model .* got a Dense: .* add up its "
                "state"
            ),
        ):
            standin.train.gradient_accumulation_loss_and_grad(
                loss_fn, None, model, params, None, None, None
            )


@pytest.mark.parametrize(
    ("flag", "recipe"),
    [
        ("fp8", jaxfp8.DelayedScaling()),
        ("te_fp8_delayedscaling", jaxfp8.DelayedScaling()),
        ("te_fp8_currentscaling", jaxfp8.Float8CurrentScaling()),
        ("te_fp8_blockscaling", jaxfp8.Float8BlockScaling()),
        ("te_mxfp8", jaxfp8.MXFP8BlockScaling()),
    ],
)
def test_flags(standin, flag, recipe):
    """The name of the class is that of Flax's, which gives state its path, so that
    checkpoints interchange.
    """
    with maxtext.install():
        ours = quantization(standin, flag)
        product = ours.dot_general_cls(mesh_axes=("embed", "mlp"))()
        assert isinstance(ours, standin.quantizations.Fp8Quantization)
        assert not ours.needs_apply_rngs
        assert isinstance(product, jaxfp8.Fp8DotGeneral)
        assert type(product).__name__ == "Fp8DirectDotGeneralOp"
        assert product.recipe == ours.einsum().recipe == recipe
        assert ours.quantize_dtype == recipe
        assert ours == quantization(standin, flag)
        assert (ours == quantization(standin, "te_mxfp8")) == (flag == "te_mxfp8")
        assert (
            standin.quantizations.configure_quantization(
                TrainConfig(flag, use_qwix_quantization=True)
            )
            is None
        )
    with maxtext.install(RECIPE):
        assert quantization(standin, flag).dot_general_cls()().recipe == RECIPE


def calibrated(standin, flag="te_fp8_currentscaling", **methods):
    """The recipe of a dense layer by MaxText's flags of calibration."""
    flags = {
        f"{tensor}_quantization_calibration_method": method
        for tensor, method in methods.items()
    }
    config = TrainConfig(flag, **flags)
    made = standin.quantizations.configure_quantization(config)
    return made.dot_general_cls()().recipe


def test_calibration_methods(standin):
    fixed = "fixed,-224,224"
    with maxtext.install():
        assert calibrated(standin) == jaxfp8.Float8CurrentScaling()
        assert calibrated(standin, act=fixed, weight=fixed) == jaxfp8.StaticScaling(
            224.0, 224.0, None
        )
        assert calibrated(
            standin, act=fixed, bwd="fixed, -1.5, 1.5"
        ) == jaxfp8.StaticScaling(224.0, None, 1.5)
        assert calibrated(standin, "fp8", act=fixed) == jaxfp8.DelayedScaling()
    with maxtext.install(RECIPE):
        assert calibrated(standin, act=fixed) == RECIPE


@pytest.mark.parametrize(
    "method",
    [
        "minmax",
        "fixed",
        "fixed,-1,2",
        "fixed,0,0",
        "fixed,1,-1",
        "fixed,-a,a",
        "fixed,-nan,nan",
        "absmax,0.8",
    ],
)
def test_calibration_methods_that_are_refused(standin, method):
    with (
        maxtext.install(),
        pytest.raises(
            ValueError,
            match='act_quantization_calibration_method: expected "absmax" or',
        ),
    ):
        calibrated(standin, act=method)


def test_flags_that_stay_maxtexts(standin):
    own = standin.quantizations.configure_quantization
    maxtext.install()
    maxtext.install().close()  # takes back the first as well
    assert standin.quantizations.configure_quantization is own
    maxtext.install()
    assert quantization(standin, "int8") == "int8"
    with pytest.raises(ModuleNotFoundError, match="transformer_engine"):
        quantization(standin, "te_nvfp4")


def test_einsum(standin):
    maxtext.install(RECIPE)
    x = jnp.ones((2, K), jnp.bfloat16)
    kernel = jnp.ones((K, N))
    einsum = quantization(standin).einsum(dtype=jnp.bfloat16)
    y, variables = einsum.init_with_output(KEY, "ab,bc->ac", x, kernel)
    assert y.dtype == jnp.bfloat16
    mask = jnp.eye(2, dtype=bool)  # of tokens to experts
    np.testing.assert_array_equal(einsum.apply(variables, "ab,bc->ac", mask, x), x)
    assert variables["_overwrite_with_gradient"]["fp8_einsum"][
        "input_amax_history"
    ].shape == (H,)


def grouped(standin, lhs, rhs, group_sizes, **changed):
    """A grouped product as MaxText's experts call it."""
    dtype = quantization(standin).quantize_dtype
    call = {
        "preferred_element_type": jnp.float32,
        "tiling": (512,) * 9,
        "group_offset": 0,
        "lhs_quantize_dtype": dtype,
        "rhs_quantize_dtype": dtype,
        "use_tokamax_backend": False,
        "partial_sum": None,
    }
    return standin.megablox.gmm(
        lhs=lhs, rhs=rhs, group_sizes=group_sizes, **call | changed
    )


STATELESS = [
    jaxfp8.Float8CurrentScaling(),
    jaxfp8.Float8RowwiseScaling(),
    jaxfp8.Float8BlockScaling(),
    jaxfp8.MXFP8BlockScaling(),
]
SIZES = np.asarray([[40, 0, 88], [1, 100, 27], [128, 0, 0], [0, 3, 125]], np.int32)
DEVICES, EXPERTS = SIZES.shape
ROWS, WIDTH, HIDDEN = 128, 128, 256


def operands():
    """x of each device, larger than that of the one before, and kernels."""
    size = 8.0 ** np.arange(float(DEVICES))[:, None, None]
    x = normal(DEVICES, ROWS, WIDTH) * size.astype(np.float32)
    return jnp.asarray(x), jnp.asarray(normal(EXPERTS, WIDTH, HIDDEN, seed=1))


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: type(recipe).__name__)
def test_grouped_product(standin, recipe):
    """That of `ragged_dot` in every bit. A ring of experts gives the sizes of all
    experts, those of the kernels at hand first; the last rows are of no expert.
    """
    x, kernel = operands()
    grad = normal(ROWS, HIDDEN, seed=2)
    sizes = jnp.asarray([40, 0, 80], jnp.int32)
    of_all = jnp.asarray([40, 0, 80, 5, 3], jnp.int32)

    def of_jaxfp8(x, kernel):
        return jaxfp8.ragged_dot(x, kernel, sizes, recipe=recipe)

    def of_maxtext(x, kernel):
        return grouped(standin, x, kernel, of_all)

    maxtext.install(recipe)
    results = []
    for product in (of_jaxfp8, of_maxtext):
        y, vjp = jax.vjp(product, x[0], kernel)
        results.append((y, vjp(grad)))
    assert_same_bits(*results)


def test_stages_have_scales_of_their_own(standin, recwarn):
    """MaxText's pipelines map a layer over stages, on a mesh axis of that name. Devices
    that hold parts of one stage share its scales, without a warning.
    """
    recipe = jaxfp8.Float8CurrentScaling()
    maxtext.install(recipe)
    x, kernel = operands()
    mesh = mesh_of(stage=2, fsdp=2)
    x = x.reshape(2, 2 * ROWS, WIDTH)
    sizes = jnp.asarray(SIZES.reshape(2, 2 * EXPERTS))
    kernels = jnp.stack([kernel, 3 * kernel])

    @functools.partial(jax.vmap, spmd_axis_name="stage")
    @functools.partial(
        jax.shard_map,
        mesh=mesh,
        in_specs=(P("fsdp"), P(), P("fsdp")),
        out_specs=P("fsdp"),
        check_vma=False,
    )
    def product(x, kernel, sizes):
        return grouped(standin, x, kernel, sizes)

    y = jax.jit(product)(x, kernels, sizes)
    for stage in range(2):
        both = jnp.concatenate([kernels[stage]] * 2)
        alone = jaxfp8.ragged_dot(x[stage], both, sizes[stage], recipe=recipe)
        assert_same_bits(y[stage], alone)
    assert not recwarn.list


class QArray:
    """Codes of Qwix, or of AQT."""

    shape = (EXPERTS, WIDTH, HIDDEN)


@pytest.mark.parametrize(
    ("flag", "changed"),
    [
        ("use_tokamax_gmm", {"use_tokamax_backend": True}),
        ("num_moe_emb_chunks", {"partial_sum": jnp.zeros((ROWS, HIDDEN))}),
        ("use_ragged_sort", {"group_offset": jnp.int32(0)}),
        ("use_ragged_sort", {"group_offset": 2}),
        ("moe_quantize_token_all_gather", {"lhs": QArray()}),
        ("checkpoint_is_quantized", {"rhs": QArray()}),
    ],
)
def test_grouped_products_that_are_refused(standin, flag, changed):
    x, kernel = operands()
    call = {"lhs": x[0], "rhs": kernel, "group_sizes": jnp.asarray(SIZES[0])} | changed
    maxtext.install(jaxfp8.MXFP8BlockScaling())
    with pytest.raises(ValueError, match=f"maxtext: {flag}: expected its default"):
        grouped(standin, **call)


def test_grouped_products_have_no_state(standin):
    x, kernel = operands()
    maxtext.install()
    with pytest.raises(ValueError, match="sparse_matmul: .* got one of another class"):
        grouped(standin, x[0], kernel, jnp.asarray(SIZES[0]))


@pytest.mark.parametrize("dtype", [None, jnp.float8_e4m3fn])
def test_grouped_products_that_stay_maxtexts(standin, dtype):
    maxtext.install()
    result = standin.megablox.gmm(
        None, None, None, jnp.float32, (64,) * 9, lhs_quantize_dtype=dtype
    )
    assert result == ("megablox", dtype, (64,) * 9)


def test_state_of_the_loss_combines_by_max(standin):
    """State that a rematerialized function takes as an argument, twice: JAX alone would
    add up what comes back.
    """
    layer = jaxfp8.nnx.Linear(K, N, recipe=RECIPE, use_bias=False, rngs=nnx.Rngs(0))
    graphdef, state, kernel = nnx.split(layer, jaxfp8.nnx.OverwriteWithGradient, ...)

    def twice(model, config, data):
        def apply(state, x):
            return nnx.merge(graphdef, state, kernel)(x)

        state = nnx.state(model, jaxfp8.nnx.OverwriteWithGradient)
        apply = jax.checkpoint(apply)
        return (apply(state, 3 * data) + apply(state, 2 * data)).sum()

    standin.train.loss_fn = twice
    maxtext.install(RECIPE)
    new = jax.grad(
        lambda state: standin.train.loss_fn(
            nnx.merge(graphdef, state, kernel), None, jnp.eye(K)
        )
    )(state)
    newest = {path[-1]: leaf.get_value()[0] for path, leaf in nnx.to_flat_state(new)}
    assert newest["input_amax_history"] == 3  # not 5


@pytest.mark.parametrize("with_quantization", [False, True])
def test_policy_of_codes(standin, with_quantization):
    """The codes of a product are kept where MaxText keeps those of
    TransformerEngine.
    """
    maxtext.install(RECIPE)
    policy = standin.nnx_decoders.NNXDecoder().minimal_policy(
        with_quantization=with_quantization
    )

    @functools.partial(jax.checkpoint, policy=policy)
    def layer(x, kernel):
        return jnp.sin(
            jaxfp8.dot_general(
                x,
                kernel,
                MATMUL,
                recipe=jaxfp8.Float8CurrentScaling(),
            )
        )

    _, vjp = jax.eval_shape(
        lambda *a: jax.vjp(layer, *a), jnp.ones((6, K)), jnp.ones((K, N))
    )
    # as bytes
    codes = [leaf.shape for leaf in jax.tree.leaves(vjp) if leaf.dtype == jnp.uint8]
    assert codes == ([(K, 6), (K, N)] if with_quantization else [])


def test_its_checks(standin):
    check = standin.train_utils.validate_train_config
    with pytest.raises(AssertionError, match="fp8 can't be used with"):
        check(TrainConfig("fp8", 4))
    maxtext.install()
    standin.train_utils.validate_train_config(TrainConfig("fp8", 4))
    with pytest.raises(AssertionError):  # all else is checked
        standin.train_utils.validate_train_config(TrainConfig("fp8", 4, run_name=""))


@pytest.mark.parametrize(
    ("flag", "steps", "validated_as"),
    [
        ("fp8", 4, "te_no_quant"),
        ("te_fp8_blockscaling", 4, "te_no_quant"),
        ("te_fp8_blockscaling", 1, "te_fp8_blockscaling"),
        ("fp8", 1, "fp8"),
        ("int8", 4, "int8"),
    ],
)
def test_its_configuration(standin, flag, steps, validated_as):
    maxtext.install()
    config_class = standin.pyconfig._initialize_pydantic([])
    assert config_class.quantization is Config.model_fields["quantization"]
    annotation = config_class.__annotations__["quantization"]
    assert annotation == enum.Enum | Literal["te_fp8_blockscaling"]
    config = config_class()
    config.quantization, config.gradient_accumulation_steps = flag, steps
    assert config.set_derived_and_validate_values() is config
    assert (config.quantization, config.validated_as) == (flag, validated_as)
    assert config.megablox == (flag != "int8")


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("quantizations", None, "configure_quantization"),
        ("moe", "RoutedMoE", "sparse_matmul"),
        ("train", None, "loss_fn"),
    ],
)
def test_a_maxtext_without_a_hook(standin, module, owner, name):
    of = getattr(standin, module)
    delattr(getattr(of, owner) if owner else of, name)
    before = [dict(vars(module)) for module in vars(standin).values()]
    with pytest.raises(
        ImportError,
        match=rf"maxtext.install: expected .*\.{name}, which MaxText .* does not have",
    ):
        maxtext.install()
    assert [dict(vars(module)) for module in vars(standin).values()] == before
