"""`jaxfp8.integrations.maxtext` on a stand-in with the names and contracts of MaxText 0.2.5, and, where it is
installed, on MaxText itself: its own training loop at tiny size."""

import dataclasses
import sys
import types

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from flax import nnx
from nnx.cases import assert_state, expected_state

import jaxfp8
import jaxfp8.nnx
from jaxfp8.integrations import maxtext

K, N, H, STEPS = 8, 5, 4, 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=H)


def quantizations():
    class Fp8Quantization:
        def dot_general_cls(self, mesh_axes=()):
            return nn.Fp8DirectDotGeneralOp

        def einsum(self, dtype=jnp.float32):
            return None

    return types.SimpleNamespace(Fp8Quantization=Fp8Quantization)


def gradient_accumulation():
    """One function: parameters are differentiated and added, all other variables go from microbatch to microbatch."""
    module = types.ModuleType("maxtext.utils.gradient_accumulation")
    module.nnx = nnx

    def gradient_accumulation_loss_and_grad(_loss_fn, config, model, params, params_shardings, data, dropout_rng):
        graphdef, params, rest = module.nnx.split(model, module.nnx.Param, ...)
        grad_func = module.nnx.value_and_grad(_loss_fn, argnums=0, has_aux=True)

        def body(carry, data):
            local_model = module.nnx.merge(graphdef, params, carry["rest"], copy=True)
            (loss, _), grad = grad_func(local_model, config, data, None, None, is_train=True)
            _, _, rest = module.nnx.split(local_model, module.nnx.Param, ...)
            total = jax.tree.map(jnp.add, carry["grad"], grad)
            return {"loss": carry["loss"] + loss, "grad": total, "rest": rest}, None

        zeros = {"loss": jnp.float32(0), "grad": jax.tree.map(jnp.zeros_like, params), "rest": rest}
        carry, _ = jax.lax.scan(body, zeros, data)
        module.nnx.update(model, carry["rest"])
        return carry["loss"], {}, carry["grad"]

    module.gradient_accumulation_loss_and_grad = gradient_accumulation_loss_and_grad
    return module


def train_utils():
    def validate_train_config(config):
        assert config.run_name
        assert config.quantization != "fp8" or config.gradient_accumulation_steps == 1, "fp8 can't be used with"

    return types.SimpleNamespace(validate_train_config=validate_train_config)


class Config:
    def set_derived_and_validate_values(self):
        return self


@pytest.fixture
def standin(monkeypatch):
    """The four modules, and one that has imported the accumulation by name, as MaxText's `train` does."""
    pyconfig = types.SimpleNamespace(
        _initialize_pydantic=lambda argv, config_class=Config: config_class,
        types=types.SimpleNamespace(MaxTextConfig=Config),
    )
    modules = {
        "layers.quantizations": quantizations(),
        "utils.gradient_accumulation": gradient_accumulation(),
        "configs.pyconfig": pyconfig,
        "utils.train_utils": train_utils(),
    }
    accumulate = modules["utils.gradient_accumulation"].gradient_accumulation_loss_and_grad
    modules["train"] = types.SimpleNamespace(gradient_accumulation_loss_and_grad=accumulate)
    for name in ("maxtext", "maxtext.layers", "maxtext.utils", "maxtext.configs"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in modules.items():
        module.__name__ = f"maxtext.{name}"
        monkeypatch.setitem(sys.modules, f"maxtext.{name}", module)
    yield types.SimpleNamespace(**{name.split(".")[-1]: module for name, module in modules.items()})
    maxtext._installed.close()


class Model(nnx.Module):
    """A kernel and a bridged Linen product, as MaxText's dense layer has them."""

    def __init__(self, quantization):
        self.kernel = nnx.Param(jnp.asarray(np.random.default_rng(0).standard_normal((K, N)), jnp.float32))
        self.product = nnx.bridge.ToNNX(quantization.dot_general_cls()(), rngs=nnx.Rngs(0))
        nnx.bridge.lazy_init(self.product, jnp.zeros((1, K)), self.kernel.get_value(), (((1,), (0,)), ((), ())))

    def __call__(self, x):
        y = self.product(x, self.kernel.get_value(), (((1,), (0,)), ((), ())))
        for name, variable in list(vars(self.product).items()):  # MaxText's bridge stores anew what it has read
            if isinstance(variable, jaxfp8.nnx.OverwriteWithGradient):
                setattr(self.product, name, jaxfp8.nnx.OverwriteWithGradient(variable.get_value()))
        return y


def loss_fn(model, config, data, dropout_rng, params, is_train=True):
    del config, dropout_rng, params, is_train
    x, grad = data
    return jnp.vdot(model(x), grad), {}


def test_accumulation_is_one_step_of_the_largest_amaxes(standin):
    """Two steps of four microbatches against the oracle: each runs on the state from before the step."""
    with maxtext.install(RECIPE):
        model = Model(standin.quantizations.Fp8Quantization())
        accumulate = jax.jit(
            lambda state, data: step(standin.train.gradient_accumulation_loss_and_grad, graphdef, state, data)
        )
        graphdef, state = nnx.split(model)
        expected = oracle.LayerState.init(H)
        kernel = np.asarray(model.kernel.get_value())
        for i in range(2):
            rng = np.random.default_rng(i)
            sizes = np.roll([1.0, 8.0, 2.0, 4.0], i)[:, None, None]  # the largest is neither first nor last
            x, grad = ((rng.standard_normal((STEPS, 6, n)) * sizes).astype(np.float32) for n in (K, N))
            state, grads = accumulate(state, (x, grad))
            uses = list(zip(x, [kernel] * STEPS, grad, strict=True))
            steps = [oracle.dense_step(*microbatch, expected) for microbatch in uses]
            expected = expected_state(uses, expected)
            assert_state(nnx.merge(graphdef, state).product, expected, f"step {i}")
            assert not hasattr(nnx.merge(graphdef, state), "fp8_next_state")
            exact, bound = (sum(getattr(of.wgrad, name) for of in steps) for name in ("exact", "bound"))
            # Beside the bounds of the products, STEPS sums in f32.
            room = STEPS * 2.0**-24 * sum(np.abs(of.wgrad.exact) for of in steps)
            oracle.Product(exact, bound + room).check(grads["kernel"].get_value())


def step(accumulate, graphdef, state, data):
    model = nnx.merge(graphdef, state)
    _, _, grads = accumulate(loss_fn, None, model, None, None, data, None)
    return nnx.state(model), grads


def test_state_of_linen_is_not_added_up(standin):
    """MaxText before 0.2.5 has Linen models, whose state is among the parameters that it sums."""
    with maxtext.install(RECIPE):
        model = nn.Dense(N, dot_general_cls=standin.quantizations.Fp8Quantization().dot_general_cls())
        params = model.init(jax.random.key(0), jnp.ones((1, K)))
        with pytest.raises(
            TypeError, match="maxtext: model: expected an NNX model .* got a Dense: .* add up its state"
        ):
            standin.train.gradient_accumulation_loss_and_grad(loss_fn, None, model, params, None, None, None)


def test_classes(standin):
    """Names are those that Flax's classes give to state, so that checkpoints interchange."""
    quantization = standin.quantizations.Fp8Quantization
    own = quantization.dot_general_cls
    maxtext.install()
    undo = maxtext.install(jaxfp8.Float8CurrentScaling())  # takes back the first
    product = quantization().dot_general_cls(mesh_axes=("embed", "mlp"))()
    assert isinstance(product, jaxfp8.Fp8DotGeneral) and type(product).__name__ == "Fp8DirectDotGeneralOp"
    assert product.recipe == jaxfp8.Float8CurrentScaling()
    undo.close()
    assert quantization.dot_general_cls is own
    maxtext.install(RECIPE)
    x, kernel = jnp.ones((2, K), jnp.bfloat16), jnp.ones((K, N))
    y, variables = quantization().einsum(dtype=jnp.bfloat16).init_with_output(jax.random.key(0), "ab,bc->ac", x, kernel)
    assert y.dtype == jnp.bfloat16
    mask = jnp.eye(2, dtype=bool)  # of tokens to experts
    np.testing.assert_array_equal(quantization().einsum(dtype=jnp.bfloat16).apply(variables, "ab,bc->ac", mask, x), x)
    assert variables["_overwrite_with_gradient"]["fp8_einsum"]["input_amax_history"].shape == (H,)


@dataclasses.dataclass
class TrainConfig:
    run_name: str
    quantization: str
    gradient_accumulation_steps: int


def test_its_checks(standin):
    check = standin.train_utils.validate_train_config
    with pytest.raises(AssertionError, match="fp8 can't be used with"):
        check(TrainConfig("run", "fp8", 4))
    maxtext.install()
    standin.train_utils.validate_train_config(TrainConfig("run", "fp8", 4))
    with pytest.raises(AssertionError):  # all else is checked
        standin.train_utils.validate_train_config(TrainConfig("", "fp8", 4))


@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("quantizations", "Fp8Quantization", "dot_general_cls"),
        ("quantizations", "Fp8Quantization", "einsum"),
        ("gradient_accumulation", None, "gradient_accumulation_loss_and_grad"),
        ("pyconfig", None, "_initialize_pydantic"),
        ("train_utils", None, "validate_train_config"),
    ],
)
def test_a_maxtext_without_a_hook(standin, module, owner, name):
    of = getattr(standin, module)
    delattr(getattr(of, owner) if owner else of, name)
    before = dict(vars(standin.quantizations.Fp8Quantization))
    with pytest.raises(ImportError, match=rf"maxtext.install: expected .*\.{name}, which MaxText .* does not have"):
        maxtext.install()
    assert dict(vars(standin.quantizations.Fp8Quantization)) == before


# ------------------------------------------------------------------------------------------------- MaxText itself
