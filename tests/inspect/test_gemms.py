"""inspect.gemms and assert_fp8: every reason has a program that must be refused for it,
and one that must pass.
"""

import functools
import pathlib
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from cpu_mesh import mesh_of
from flax import errors, nnx
from jax import lax
from jax.sharding import PartitionSpec as P
from lowering import cuda_text
from ops.test_support import gpu
from programs.cases import MATMUL
from programs.linen import STACKED

import jaxfp8
from jaxfp8 import inspect
from jaxfp8.ops import _ffi, _support

KEY = jax.random.key(0)

A = jaxfp8.DelayedScaling(amax_history_len=2)
CURRENT = jaxfp8.Float8CurrentScaling()
BLOCK = jaxfp8.Float8BlockScaling()
MX = jaxfp8.MXFP8BlockScaling()
E4M3 = jaxfp8.Format.E4M3.dtype
X = jax.ShapeDtypeStruct((32, 64), jnp.float32)
K = jax.ShapeDtypeStruct((64, 128), jnp.float32)


def fp8(x, kernel, recipe=CURRENT):
    return jaxfp8.dot_general(x, kernel, MATMUL, recipe=recipe)


def plain(x, kernel):
    return x @ kernel


def gradients(function):
    return jax.grad(lambda x, kernel: jnp.sum(function(x, kernel) ** 2), argnums=(0, 1))


def the_reason(function, *args, **kwargs) -> str:
    """The only reason of all products that would not run in FP8."""
    reasons = {
        row["why"]
        for row in inspect.gemms(function, *args, **kwargs).rows
        if not row["fp8"]
    }
    assert len(reasons) == 1, reasons
    with pytest.raises(AssertionError, match=re.escape(min(reasons))):
        inspect.assert_fp8(function, *args, **kwargs)
    return reasons.pop()


def test_rows():
    found = inspect.gemms(gradients(fp8), X, K)
    products = [
        ("forward", "float8_e4m3fn[32,64] x float8_e4m3fn[128,64]"),
        ("backward", "float8_e5m2[32,128] x float8_e4m3fn[64,128]"),
        ("backward", "float8_e4m3fn[64,32] x float8_e5m2[128,32]"),
    ]
    assert {(row["pass"], row["product"]) for row in found.rows} == set(products)
    assert all(
        row["fp8"] and row["why"] is None and row["times"] == 1 for row in found.rows
    )
    assert {row["line"].split(":")[0] for row in found.rows} == {"test_gemms.py"}
    assert found.platform == "cuda" and str(found).count("FP8") == 3
    inspect.assert_fp8(gradients(fp8), X, K)


def test_the_message_names_layer_shapes_line_and_reason():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.Dense(64, dot_general_cls=jaxfp8.Fp8DotGeneral, name="up")(x)
            return nn.Dense(16, dtype=jnp.bfloat16, name="head")(x)  # this line

    model = Model()
    variables = jax.eval_shape(model.init, KEY, X)

    def step(variables, x):
        return jax.grad(lambda variables: jnp.sum(model.apply(variables, x)))(variables)

    with pytest.raises(AssertionError) as error:
        inspect.assert_fp8(step, variables, X)
    first, _, *lines = str(error.value).split("\n")
    # up: no gradient of x
    assert (
        first
        == "assert_fp8: 3 of 5 matrix products of step would not run in FP8 on cuda:"
    )
    cells = [re.split(r" {2,}", line) for line in lines]
    assert [cell[:3] for cell in cells] == [
        ["head", "forward", "bfloat16[32,64] x bfloat16[64,16]"],
        ["head", "backward", "bfloat16[32,16] x bfloat16[32,64]"],
        ["head", "backward", "bfloat16[32,16] x bfloat16[64,16]"],
    ]
    assert cells[0][3] == "1" and cells[0][5].startswith("no product of jaxfp8")
    file, _, line = cells[0][4].partition(":")
    source = pathlib.Path(__file__).read_text().splitlines()
    assert file == "test_gemms.py" and "# this line" in source[int(line) - 1]
    inspect.assert_fp8(step, variables, X, allow="head$")
    inspect.assert_fp8(step, variables, X, allow=["up", r"test_gemms\.py"])
    assert {row["layer"] for row in inspect.gemms(step, variables, X).rows} == by_layer(
        jaxfp8.report(model, X)
    )


def by_layer(report) -> set[str]:
    return {row["layer"] for row in report.rows}


class OwnProduct(nnx.Module):
    """A layer that multiplies its parameter itself, as tunix's Einsum."""

    def __init__(self, eqn, shape):
        self.eqn = eqn
        self.w = nnx.Param(jnp.ones(shape))

    def __call__(self, x):
        return jnp.einsum(self.eqn, x, self.w.get_value())


class ForeignModel(nnx.Module):
    def __init__(self):
        self.block = nnx.Dict(q_proj=OwnProduct("BD,DNH->BNH", (64, 4, 16)))
        self.up = jaxfp8.nnx.Linear(64, 64, recipe=CURRENT, rngs=nnx.Rngs(0))
        self.lm_head = OwnProduct("BNH,NHV->BV", (4, 16, 32))

    def __call__(self, x):
        return self.lm_head(self.block.q_proj(self.up(x)))


def test_names_of_a_report_are_patterns():
    """An einsum has its equation behind the name; a model may be the function
    itself.
    """
    model = ForeignModel()
    names = ["block/q_proj", "lm_head", "up"]
    assert sorted(by_layer(jaxfp8.report(model))) == names
    rows = inspect.gemms(model, X).rows
    assert sorted(row["layer"] for row in rows) == [
        "block/q_proj/BD,DNH->BNH",
        "lm_head/BNH,NHV->BV",
        "up",
    ]
    inspect.assert_fp8(model, X, allow=["^block/q_proj$", "^lm_head$"])
    inspect.assert_fp8(model, X, allow=["DNH->BNH", "NHV"])
    with pytest.raises(
        AssertionError, match="2 of 3 matrix products of ForeignModel would"
    ):
        inspect.assert_fp8(model, X)


def test_passes_that_may_stay():
    """The wgrad of a ByProduct; a pass and a layer; forward and backward of products
    that are not ours.
    """
    recipe = jaxfp8.ByProduct(fprop=CURRENT, dgrad=CURRENT)

    def step(x, kernel, head):
        def loss(x, kernel, head):
            with jax.named_scope("up"):
                x = fp8(x, kernel, recipe)
            with jax.named_scope("head"):
                return jnp.sum(plain(x, head) ** 2)

        return jax.grad(loss, (0, 1, 2))(x, kernel, head)

    args = X, K, jax.ShapeDtypeStruct((128, 8), jnp.float32)
    rows = inspect.gemms(step, *args).rows
    assert [(row["layer"], row["pass"], row["gemm"], row["fp8"]) for row in rows] == [
        ("up", "forward", "fprop", True),
        ("head", "forward", None, False),
        ("head", "backward", None, False),
        ("head", "backward", None, False),
        ("up", "backward", "dgrad", True),
        ("up", "backward", "wgrad", False),
    ]
    assert re.search(r"up +wgrad ", str(inspect.gemms(step, *args)))
    for allow in (
        ["wgrad", "head"],
        ["wgrad:^up", "forward:head", "backward:head"],
        ["forward", "backward"],
    ):
        inspect.assert_fp8(step, *args, allow=allow)
    for allow, left in {
        ("dgrad", "head"): 1,
        ("wgrad:^head$", "head"): 1,
        ("wgrad", "backward:head"): 1,
    }.items():
        with pytest.raises(AssertionError, match=f"{left} of 6"):
            inspect.assert_fp8(step, *args, allow=allow)


def test_a_pattern_that_matches_nothing_is_said():
    with pytest.warns(
        UserWarning, match=r"allow: no product of plain matches 'haed'; is the path"
    ):
        inspect.assert_fp8(plain, X, K, allow=["", "haed"])
    matches = pytest.warns(UserWarning, match=r"plain matches 'haed', 'wgrad:x'")
    with matches, pytest.raises(AssertionError):
        inspect.assert_fp8(plain, X, K, allow=["haed", "wgrad:x"])


def test_a_linen_model_is_no_function():
    with pytest.raises(errors.CallCompactUnboundModuleError):
        inspect.assert_fp8(nn.Dense(4), X)


def in_recipe(recipe):
    return functools.partial(fp8, recipe=recipe)


def convolution(x, k):
    return lax.conv(x[None, None], k[None, None, :3, :3], (1, 1), "SAME")


def ragged(x, k):
    return lax.ragged_dot(x, k[None], jnp.array([32], jnp.int32))


def of_e5m2(x, k):
    return x.astype(jnp.float8_e5m2) @ k.astype(jnp.float8_e5m2)


MX_INPUT = jaxfp8.CustomRecipe(
    lambda role: (
        jaxfp8.recipes.MXFP8Quantizer(E4M3) if role != "linear_weight" else None
    )
)
REASONS = {
    "plain": (plain, "no product of jaxfp8: no recipe reaches it"),
    "None": (in_recipe(None), "the recipe is None"),
    "HighPrecision": (in_recipe(jaxfp8.HighPrecision()), "the recipe is None"),
    "min_size": (
        in_recipe(jaxfp8.Float8CurrentScaling(min_size=65)),
        "smaller than min_size=65 of the recipe",
    ),
    "dtype": (
        lambda x, k: x.astype(jnp.int8) @ k.astype(jnp.int8),
        "operands are int8",
    ),
    "convolution": (convolution, "convolutions have no FP8 product"),
    "ragged": (ragged, "not jaxfp8.ragged_dot: no recipe reaches it"),
    "e5m2": (
        in_recipe(jaxfp8.Float8CurrentScaling(jaxfp8.Format.E5M2)),
        "no tensor core multiplies two float8_e5m2",
    ),
    "e5m2 by XLA": (of_e5m2, "no tensor core multiplies two float8_e5m2"),
    "no quantizer": (in_recipe(MX_INPUT), "the recipe keeps an operand in float32"),
}


@pytest.mark.parametrize("case", REASONS)
def test_reasons(case):
    function, wanted = REASONS[case]
    assert the_reason(function, X, K) == wanted


def test_autocast():
    dense = nn.Dense(16, dot_general_cls=jaxfp8.Fp8DotGeneral)
    variables = jax.eval_shape(dense.init, KEY, X)
    inspect.assert_fp8(dense.apply, variables, X)
    with jaxfp8.autocast(enabled=False):
        assert the_reason(dense.apply, variables, X) == "autocast is off"


def test_rules():
    rules = [("layers_0", A), ("layers_1", None)]
    model = jaxfp8.linen.quantize(nn.Sequential([nn.Dense(64), nn.Dense(64)]), rules)
    variables = jax.eval_shape(model.init, KEY, X)
    assert the_reason(model.apply, variables, X) == "rule 1 says None"
    inspect.assert_fp8(model.apply, variables, X, allow="layers_1")
    width = X.shape[-1]
    layers = [nnx.Linear(width, width, rngs=nnx.Rngs(0)) for _ in range(2)]
    model = jaxfp8.nnx.quantize(
        nnx.Sequential(*layers), [("layers/0", A), ("layers/1", None)]
    )
    assert the_reason(model, X) == "rule 1 says None"


@pytest.mark.filterwarnings("ignore::jaxfp8.FP8StateWarning")
def test_platforms():
    def of_codes(x, kernel):
        return x.astype(jnp.float8_e4m3fn) @ kernel.astype(jnp.float8_e4m3fn)

    inspect.assert_fp8(of_codes, X, K)
    delayed = functools.partial(
        jaxfp8.dot_general,
        dimension_numbers=MATMUL,
        recipe=A,
        state=jaxfp8.init_state(A),
    )
    for platform in (None, "cuda", "gpu", "sm_89", "sm_90a", "sm_103"):
        inspect.assert_fp8(gradients(delayed), X, K, platform=platform)
    for platform in ("cpu", "tpu", "rocm"):
        for function in (gradients(delayed), of_codes):
            reason = the_reason(function, X, K, platform=platform)
            assert reason.startswith(f"{platform} has no FP8 GEMM")
    wanted = "sm_80 has compute capability 8.0, FP8 needs 8.9 or newer"
    assert the_reason(gradients(delayed), X, K, platform="sm_80") == wanted
    ragged = functools.partial(jaxfp8.ragged_dot, recipe=CURRENT)
    args = (
        X,
        jax.ShapeDtypeStruct((4, 64, 128), jnp.float32),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    inspect.assert_fp8(ragged, *args, platform="sm_89")
    assert the_reason(ragged, *args, platform="sm_80") == wanted
    with pytest.raises(TypeError, match="object is not callable"):
        inspect.assert_fp8(X)  # a result in place of a function
    with pytest.raises(
        ValueError, match="gemms: platform: expected None, .*got 'hopper'"
    ):
        inspect.assert_fp8(plain, X, K, platform="hopper")


@pytest.mark.parametrize(
    "recipe, runs_on, not_on, reason",
    [
        (
            BLOCK,
            "sm_90",
            "sm_100",
            "1x128 by 128x128 on compute capability 9.0, this GPU has 10.0",
        ),
        (
            MX,
            "sm_100",
            "sm_90",
            "1x32 by 1x32 on compute capability 10.0 or newer, this GPU has 9.0",
        ),
        (
            jaxfp8.Float8RowwiseScaling(),
            "sm_90",
            "sm_89",
            "on compute capability 9.0, this GPU has 8.9",
        ),
    ],
)
def test_recipes_that_not_every_gpu_has(recipe, runs_on, not_on, reason):
    function = in_recipe(recipe)
    inspect.assert_fp8(gradients(function), X, K)
    inspect.assert_fp8(gradients(function), X, K, platform=runs_on)
    assert reason in the_reason(function, X, K, platform=not_on)


def test_this_machine(monkeypatch):
    """What a machine with a GPU lacks counts; one without is taken to develop for one
    that has everything.
    """
    a100 = gpu("8.0", "NVIDIA A100")
    monkeypatch.delitem(_ffi._modules, "cuda", raising=False)
    inspect.assert_fp8(fp8, X, K)
    monkeypatch.setattr(_support, "local_gpus", lambda: [a100])
    assert the_reason(fp8, X, K) == "jaxfp8 was installed without its CUDA library"
    monkeypatch.setitem(_ffi._modules, "cuda", None)
    assert "NVIDIA A100 has compute capability 8.0" in the_reason(fp8, X, K)
    with jaxfp8.ops.implementation("xla"):
        assert "NVIDIA A100 has compute capability 8.0" in the_reason(fp8, X, K)
    a100.compute_capability = "9.0"

    def no_cublaslt():
        raise RuntimeError("libcublasLt.so.13 cannot be opened")

    monkeypatch.setattr(_ffi, "cublaslt_version", no_cublaslt)
    assert the_reason(fp8, X, K) == "libcublasLt.so.13 cannot be opened"
    with jaxfp8.ops.implementation("xla"):
        inspect.assert_fp8(fp8, X, K)


WRAPPERS = {
    "jit in remat": lambda product: jax.checkpoint(jax.jit(product)),
    "scan": lambda product: (
        lambda x, k: lax.scan(
            lambda carry, _: (carry, product(carry, k)), x, None, length=3
        )[1]
    ),
    "cond": lambda product: (
        lambda x, k: lax.cond(
            jnp.sum(x) > 0, product, lambda x, k: jnp.zeros((32, 128)), x, k
        )
    ),
    "while": lambda product: (
        lambda x, k: lax.while_loop(
            lambda y: y[0, 0] > 0, lambda y: product(x, k) + y, jnp.ones((32, 128))
        )
    ),
    "custom_vjp": lambda product: _custom_vjp(product),
    "shard_map": lambda product: jax.shard_map(
        product,
        mesh=mesh_of(data=8),
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    ),
}


def _custom_vjp(product):
    function = jax.custom_vjp(product)
    function.defvjp(
        lambda x, k: (product(x, k), (x, k)), lambda kept, ct: gradients(product)(*kept)
    )
    return function


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_products_inside(wrapper):
    wrapped = WRAPPERS[wrapper](in_recipe(CURRENT))
    inspect.assert_fp8(wrapped, X, K)
    if wrapper != "while":  # has no reverse mode
        inspect.assert_fp8(gradients(wrapped), X, K)
    hidden = WRAPPERS[wrapper](lambda x, k: fp8(x, k) + plain(x, k))
    assert the_reason(hidden, X, K).startswith("no product of jaxfp8")
    if wrapper != "while":
        reasons = [
            row["pass"]
            for row in inspect.gemms(gradients(hidden), X, K).rows
            if not row["fp8"]
        ]
        assert reasons.count("backward") >= 2 and "forward" in reasons


def test_layers_of_linen():
    class Body(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            dense = nn.Dense(64, name="mix", dot_general_cls=jaxfp8.Fp8DotGeneral)
            return dense(x), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            scan = nn.scan(nn.remat(Body), **STACKED, length=3)
            x, _ = scan(name="stack")(x, None)
            return nn.MultiHeadDotProductAttention(4, name="attention")(x[None])

    model = jaxfp8.linen.quantize(Model(), [("attention/(query|key|value)", CURRENT)])
    variables = jax.eval_shape(model.init, KEY, X)
    step = jax.grad(lambda v, x: jnp.sum(model.apply(v, x)))
    for function in (step, model.apply):
        rows = inspect.gemms(function, variables, X).rows
        assert {row["layer"]: row["fp8"] for row in rows} == {
            "stack/mix": True,
            "attention/query": True,
            "attention/key": True,
            "attention/value": True,
            "attention/...qhd,...khd->...hqk": False,
            "attention/...hqk,...khd->...qhd": False,
            "attention/out": False,
        }


@pytest.mark.parametrize("recipe", [CURRENT, BLOCK], ids=["current", "block"])
def test_what_is_said_is_what_is_lowered(recipe, cuda_custom_calls):
    def product(x, kernel):
        return fp8(x, kernel, recipe)

    loss = gradients(
        lambda x, kernel: (
            product(jax.checkpoint(product)(x, kernel), kernel.T) @ jnp.ones((64, 8))
        )
    )
    rows = inspect.gemms(loss, X, K).rows
    text = cuda_text(loss, X, K)
    wanted = sum(row["times"] for row in rows if row["fp8"])
    assert wanted == 6
    assert (
        len(re.findall(r"custom_call @jaxfp8_(?:block_)?scaled_matmul", text)) == wanted
    )
    assert (
        text.count("stablehlo.dot_general")
        == sum(row["times"] for row in rows if not row["fp8"])
        == 2
    )
