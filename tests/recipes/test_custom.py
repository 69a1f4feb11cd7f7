"""CustomRecipe: who is asked for what, which codes each product reads."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest

import jaxfp8
from recipes import grids
from recipes.grids import MATMUL, ROLES, Grid, TwoGrids


def recipe_of(quantizers: dict, **options):
    return jaxfp8.CustomRecipe(lambda role: quantizers.get(role), **options)


def run(recipe, x, kernel, grad, state=None, dimension_numbers=MATMUL, **options):
    """(y, dx, dkernel, next state)."""

    def product(x, kernel, state):
        return jaxfp8.dot_general(
            x, kernel, dimension_numbers, recipe=recipe, state=state, **options
        )

    y, vjp = jax.vjp(
        product, x, kernel, jaxfp8.init_state(recipe) if state is None else state
    )
    return y, *vjp(jnp.asarray(grad, y.dtype))


def assert_layer(got, expected):
    for name, g, e in zip(("y", "dx", "dkernel"), got, expected, strict=False):
        # zeros without a sign
        oracle.assert_bitwise(
            np.asarray(g) + 0, np.asarray(e, np.asarray(g).dtype) + 0, name
        )


# Roles --------------------------------------------------------------------------------


def test_each_role_is_asked_for_once():
    asked = []
    recipe = jaxfp8.CustomRecipe(lambda role: asked.append(role))
    for _ in range(2):
        run(recipe, *grids.data())
    assert sorted(asked) == sorted(ROLES)


BATCHES = (((2,), (1,)), ((0,), (0,)))
STEPS = {"linear_input": 16, "linear_weight": 8, "linear_grad_output": 4}


WITH_RESULTS = STEPS | {"linear_output": 2, "linear_grad_input": 1}


@pytest.mark.parametrize("roles", [(), *((role,) for role in STEPS), WITH_RESULTS])
def test_none_keeps_a_tensor_as_it_is(roles):
    """The others are quantized, and results dequantized."""
    steps = {role: WITH_RESULTS[role] for role in roles}
    got = run(recipe_of({role: Grid(s) for role, s in steps.items()}), *grids.data())
    assert_layer(got, grids.layer(*grids.data(), steps))


# of what is read transposed
STEPS_T = {"linear_input": 1, "linear_weight": 32, "linear_grad_output": 2}
TWO_GRIDS = {role: TwoGrids(STEPS[role], STEPS_T[role]) for role in STEPS}


def test_each_product_reads_its_own_codes():
    got = run(recipe_of(TWO_GRIDS), *grids.data())
    assert_layer(got, grids.layer(*grids.data(), STEPS, STEPS_T))


def members(*operands):
    """y, dx and dkernel of each member of a batch."""
    each = [
        grids.layer(*member, STEPS, STEPS_T) for member in zip(*operands, strict=True)
    ]
    return list(map(np.stack, zip(*each, strict=True)))


def test_batches_are_matrices():
    """A batch dimension, and members under vmap: each a matrix, each as it is alone."""
    recipe = recipe_of(TWO_GRIDS)
    each = [grids.data(seed) for seed in (0, 7, 9)]
    operands = list(map(np.stack, zip(*each, strict=True)))
    expected = members(*operands)
    assert_layer(run(recipe, *operands, dimension_numbers=BATCHES), expected)
    mapped = jax.jit(jax.vmap(lambda *member: run(recipe, *member)[:3]))
    assert_layer(mapped(*operands), expected)


# The quantizer's own product ----------------------------------------------------------

SEEN = []
FACTORS = {"fprop": 1, "dgrad": 2, "wgrad": 4}


@dataclasses.dataclass(frozen=True)
class OwnProduct(TwoGrids):
    """Multiplies by a number that tells the products apart."""

    name: str = ""

    def qgemm(self, qx, qw, *, sx, sw, out_dtype, gemm_type, qresult_x, qresult_w):
        shapes = tuple(None if a is None else a.shape for a in (qx, qw, sx, sw))
        SEEN.append((self.name, str(gemm_type), shapes, qx.dtype.name, qw.dtype.name))
        assert qresult_x.data is qx and qresult_w.data is qw
        assert qresult_x.scale_inv is sx and qresult_w.scale_inv is sw
        assert out_dtype == jnp.float32 and gemm_type is jaxfp8.recipes.GEMMType(
            str(gemm_type)
        )
        a = qx.astype(jnp.float32) * (1 if sx is None else sx)
        b = qw.astype(jnp.float32) * (1 if sw is None else sw)
        return (a @ b.T) * FACTORS[gemm_type]


def seen_in(recipe, *arrays, **options):
    SEEN.clear()
    got = run(recipe, *arrays, **options)
    return got, sorted(set(SEEN))


OWN = {role: OwnProduct(STEPS[role], STEPS_T[role], role) for role in STEPS}


@pytest.mark.parametrize(
    ("owner", "products"),
    [
        ("linear_input", "fprop wgrad"),
        ("linear_weight", "fprop dgrad"),
        ("linear_grad_output", "dgrad wgrad"),
    ],
)
@pytest.mark.parametrize("others", [True, False], ids=["codes", "high-precision"])
def test_qgemm_gets_the_products_of_its_quantizer(owner, products, others):
    """Of the others there are codes, or there are none: then their scales are None."""
    quantizers = (TWO_GRIDS if others else {}) | {owner: OWN[owner]}
    got, seen = seen_in(recipe_of(quantizers), *grids.data())
    assert [(name, kind) for name, kind, *_ in seen] == [
        (owner, kind) for kind in sorted(products.split())
    ]
    without_scales = sum(shapes[2:].count(None) for _, _, shapes, *_ in seen)
    assert without_scales == (0 if others else 2)
    steps = STEPS if others else {owner: STEPS[owner]}
    expected = grids.layer(
        *grids.data(), steps, {role: STEPS_T[role] for role in steps}
    )
    factors = [factor if kind in products else 1 for kind, factor in FACTORS.items()]
    assert_layer(got, [e * factor for e, factor in zip(expected, factors, strict=True)])


def test_qgemm_with_a_bias_and_a_batch():
    """Of two quantizers with a product of their own the first operand's has it."""
    operands = [np.stack([a, 2 * a]) for a in grids.data()]
    bias = grids.fractions((grids.N,), 5)
    expected = members(*operands)
    got, seen = seen_in(recipe_of(OWN), *operands, dimension_numbers=BATCHES, bias=bias)
    assert_layer(got, [expected[0] + bias, 2 * expected[1], 4 * expected[2]])
    assert [(name, kind) for name, kind, *_ in seen] == [
        ("linear_grad_output", "dgrad"),
        ("linear_input", "fprop"),
        ("linear_input", "wgrad"),
    ]
    assert all(len(shape) == 2 for _, _, shapes, *_ in seen for shape in shapes)


# Errors -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("qfactory", "message"),
    [
        (
            lambda role: Grid,
            "qfactory: expected a jaxfp8.Quantizer or None for 'linear_input'.*it is "
            "the class, call",
        ),
        (
            lambda role: "e4m3",
            "qfactory: expected a jaxfp8.Quantizer or None for 'linear_input', got "
            "'e4m3'",
        ),
        (Grid, "qfactory: expected a function of a role"),
        ("int6", "qfactory: expected a function of a role"),
        ({}, "qfactory: expected a function of a role"),
    ],
)
def test_qfactory_that_is_none(qfactory, message):
    with pytest.raises(TypeError, match=message):
        run(jaxfp8.CustomRecipe(qfactory), *grids.data())


@dataclasses.dataclass
class Mutable(jaxfp8.Quantizer):  # has == and so no hash
    steps: int = 1


def test_quantizer_without_a_hash():
    with pytest.raises(
        TypeError, match="a quantizer with a hash.*Mutable.*frozen=True"
    ):
        run(jaxfp8.CustomRecipe(lambda role: Mutable()), *grids.data())


def test_qfactory_without_a_hash():
    @dataclasses.dataclass
    class Factory:
        steps: int = 1

        def __call__(self, role):
            return Grid(self.steps)

    needed = "expected options that hash.*unhashable type: 'Factory'"
    with pytest.raises(TypeError, match=f"CustomRecipe: {needed}"):
        jaxfp8.CustomRecipe(Factory())
    with pytest.raises(TypeError, match=f"DelayedScaling: {needed}"):
        jaxfp8.DelayedScaling(amax_compute_algo=Factory())


def wrong(quantize, init=None, qgemm=None):
    """A recipe whose quantizer of x does this."""
    methods = (
        {"quantize": quantize}
        | ({"init": init} if init else {})
        | ({"qgemm": qgemm} if qgemm else {})
    )
    quantizer = type("Wrong", (jaxfp8.Quantizer,), methods)()
    return jaxfp8.CustomRecipe(
        lambda role: quantizer if role == "linear_input" else None
    )


def codes(x):
    return jnp.round(x).astype(jnp.int8)


ONE, COL = np.ones((1,), np.float32), jnp.ones((6, 1))
Q = jaxfp8.QTensor


@pytest.mark.parametrize(
    ("result", "message"),
    [
        (lambda q: Q(q, ONE), r"expected \(QTensor, state\)"),
        (lambda q: (q, None), r"expected \(QTensor, state\)"),
        (lambda q: (Q(q.T, ONE), None), r"data: .*\(6, 10\)"),
        (lambda q: (Q(q, ONE, q), None), r"data_t: expected shape \(10, 6\)"),
        (lambda q: (Q(q, None), None), "scale_inv: expected"),
        (lambda q: (Q(q, 1.0), None), "scale_inv: expected"),
        (lambda q: (Q(q, jnp.ones((6, 1, 1))), None), "scale_inv: expected"),
        (lambda q: (Q(q, ONE, None, ONE), None), "scale_inv_t: expected data_t"),
        (lambda q: (Q(q, ONE), {"new": ONE}), "expected a state of shapes None"),
    ],
)
def test_quantize_that_returns_the_wrong_thing(result, message):
    with pytest.raises((TypeError, ValueError), match=f"Wrong.quantize: {message}"):
        run(wrong(lambda self, x, state: result(codes(x))), *grids.data())


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize(
    "q",
    [
        lambda q: Q(q, jnp.ones((5, 1)), block=(1, None)),
        lambda q: Q(q, COL, q.T, COL, block=(1, None)),  # data_t has 10 rows
        lambda q: Q(q, jnp.ones((4, 1))),
        lambda q: Q(q, jnp.ones(6)),
    ],
)
def test_scales_that_are_not_of_each_block(q, dtype):
    """The product that reads them raises."""
    with pytest.raises((TypeError, ValueError), match="scale_inv: expected|reshape"):
        run(
            wrong(lambda self, x, state: (q(x.astype(dtype)), state)),
            *grids.data(),
        )


@pytest.mark.parametrize(
    ("result", "found"),
    [
        (lambda y: y.T, r"float32\(8, 6\)"),
        (lambda y: y.astype(jnp.bfloat16), "bfloat16"),
        (lambda y: None, "None"),
    ],
)
def test_qgemm_that_returns_the_wrong_thing(result, found):
    recipe = wrong(
        lambda self, x, state: (Q(codes(x), ONE), state),
        qgemm=lambda self, qx, qw, **others: result(qx.astype(jnp.float32) @ qw.T),
    )
    with pytest.raises(
        TypeError, match=rf"fprop: expected float32\(6, 8\), got .*{found}"
    ):
        run(recipe, *grids.data())


def test_state_of_another_quantizer():
    recipe = recipe_of({"linear_input": grids.Counting()})
    state = jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2))
    with pytest.raises(
        (TypeError, ValueError), match=r"dot_general: state\.input: Counting: "
    ):
        run(recipe, *grids.data(), state=state)
    with pytest.raises(
        ValueError, match="dot_general: state: CustomRecipe keeps state"
    ):
        jaxfp8.dot_general(*grids.data()[:2], MATMUL, recipe=recipe)
