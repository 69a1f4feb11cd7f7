"""all_to_all and all_gather: values, gradients and next states are numpy's, to the
bit.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from equality import assert_same_bits
from jax.sharding import PartitionSpec as P
from oracle import BF16, E4M3, F32, blocks as oracle_blocks
from programs.cases import MATMUL, pack, row
from programs.known_amax import used_state

import jaxfp8
from jaxfp8 import collectives
from mesh import collective_cases as cases

UNUSED = oracle.LayerState(None, None, None)
RECIPES = ["delayed", *(name for name in cases.RECIPES if name != "delayed")]
CHECK_VMA = pytest.mark.parametrize("check_vma", [True, False])


def moved_rows(x, recipe, state):
    return collectives.all_to_all(x, "e", 0, 0, recipe=recipe, state=state, tiled=True)


@pytest.mark.parametrize("case", cases.CASES)
@pytest.mark.parametrize("recipe", RECIPES)
@CHECK_VMA
def test_recipes(case, recipe, check_vma):
    cases.compare(case, recipe, check_vma=check_vma)


@pytest.mark.parametrize(
    "program", cases.PROGRAMS[1:], ids=lambda program: program.__name__
)
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
@pytest.mark.parametrize("case", ["all_to_all", "all_gather"])
@CHECK_VMA
def test_programs(program, recipe, case, check_vma):
    cases.compare(case, recipe, program, check_vma)


def test_layers_in_a_loop():
    """Without a cotangent of `output_grad`, of which the reading tells nothing."""
    collective = cases.CASES["all_gather"]
    states = [used_state(seed) for seed in range(cases.USES)]
    xs, grads = cases.operands(collective)
    step = cases.step(collective, cases.RECIPES["delayed"][0], cases.layers)
    ys, dxs, after = step(xs, grads, pack(states))
    for i, state in enumerate(states):
        y, dx = cases.results(collective, "delayed", xs[i], grads[i], state)
        oracle.assert_bitwise(ys[i], y, "y")
        oracle.assert_bitwise(dxs[i], dx, "dx")
        one = cases.next_state(collective, xs[i : i + 1], grads[i : i + 1], state)
        assert_same_bits(row(after, i), one, "state")


@pytest.mark.parametrize("recipe", ["delayed", "block", "mx"])
def test_nan_and_inf_arrive_as_nan(recipe):
    """They enter no amax of a state; they are where the elements arrive."""
    xs, grads = cases.operands(cases.CASES["all_to_all"])
    xs[0, 2, 3, 1, 5] = np.nan
    xs[0, 4, 0, 0, 159] = -np.inf
    grads[1, 0, 1, 1, 0] = np.inf
    cases.compare("all_to_all", recipe, given=(xs, grads))


@pytest.mark.parametrize(
    "case, check_vma", [("all_to_all", True), ("all_to_all tiled", False)]
)
def test_states_of_stages(case, check_vma):
    """Each device has a state of its own: a scale travels with each row, and no amax is
    reduced.
    """
    collective = cases.CASES[case]
    recipe = dataclasses.replace(cases.RECIPES["delayed"][0], pipeline_axes=("e",))
    xs, grads = cases.operands(collective)
    states = [used_state(seed) for seed in range(cases.DEVICES)]
    ys, dxs, after = cases.step(
        collective, recipe, check_vma=check_vma, state_spec=P("e")
    )(xs, grads, pack(states))

    def quantized(tensor, name, fmt):
        steps = [
            oracle.step(x, getattr(state, name), fmt)
            for x, state in zip(tensor, states, strict=True)
        ]
        return np.stack(
            [
                oracle.dequantize(codes, F32(1) / scale, BF16)
                for codes, scale, _ in steps
            ]
        )

    for i, (x, grad) in enumerate(zip(xs, grads, strict=True)):
        # numpy moves values that are quantized already, without a recipe.
        y, dx = cases.results(
            collective,
            "none",
            quantized(x, "input", oracle.E4M3),
            quantized(grad, "output_grad", oracle.E5M2),
            UNUSED,
        )
        oracle.assert_bitwise(ys[i], y, "y")
        oracle.assert_bitwise(dxs[i], dx, "dx")
    for i, state in enumerate(states):
        one = cases.next_state(collective, xs[:, i], grads[:, i], state)
        assert_same_bits(row(after, i), one, f"state {i}")


def test_remat_keeps_the_codes():
    """A policy that saves FP8 residuals saves what arrived: it is not sent once
    more.
    """
    recipe = cases.RECIPES["delayed"][0]

    def sent(**options):
        def shard(x, state):
            @functools.partial(jax.checkpoint, **options)
            def block(x, state):
                y = jaxfp8.dot_general(
                    moved_rows(x, recipe, state),
                    jnp.ones((16, 4)),
                    MATMUL,
                    recipe=recipe,
                    state=state,
                )
                return jax.nn.gelu(y)

            def loss(*both):
                return jax.lax.psum(jnp.sum(block(*both)), "e")

            return jax.value_and_grad(loss, argnums=(0, 1))(x, state)

        specs = {"in_specs": (P("e"), P()), "out_specs": (P(), (P("e"), P()))}
        step = jax.jit(jax.shard_map(shard, mesh=cases.mesh(), **specs))
        # XLA drops what nothing needs: in a jaxpr, the value of a product needs its
        # operands. On CPUs XLA would also join what remat computes twice.
        lowered = step.lower(jnp.ones((64, 16)), pack(used_state()))
        compiled = lowered.compile(compiler_options={"xla_disable_hlo_passes": "cse"})
        return compiled.as_text().count(" all-to-all(")

    assert (sent(), sent(policy=jaxfp8.checkpoint_policies.save_fp8_residuals)) == (
        3,
        2,
    )


# ----------------------------------------------------------------------------- products


@pytest.mark.parametrize("recipe, batch", [("delayed", True), ("block", False)])
def test_products_take_the_codes(recipe, batch):
    """As they take the values in bfloat16, which are so close to codes times scales
    that they give these again.
    """
    recipe, rule = cases.RECIPES[recipe]
    state = pack(used_state()) if rule is None else jaxfp8.init_state(recipe)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 6, 160)).astype(BF16)
    kernel = rng.standard_normal((8, 160, 16)).astype(F32)
    numbers, kernel = (
        ((((2,), (1,)), ((0,), (0,))), kernel)
        if batch
        else ((((2,), (0,)), ((), ())), kernel[0])
    )

    specs = {"in_specs": (P("e"), P(), P()), "out_specs": (P("e"), P("e"), P())}

    def results(arrived):
        def product(x, kernel, state):
            q = arrived(moved_rows(x, recipe, state))
            return jaxfp8.dot_general(q, kernel, numbers, recipe=recipe, state=state)

        def shard(*operands):
            y, vjp = jax.vjp(product, *operands)
            return y, *vjp(jnp.cos(y))[:2]

        run = jax.jit(jax.shard_map(shard, mesh=cases.mesh(), **specs))
        return run(x, kernel, state)

    assert_same_bits(results(lambda q: q), results(lambda q: q.dequantize(x.dtype)))


@pytest.mark.parametrize("recipe", [
    jaxfp8.MXFP8BlockScaling(), jaxfp8.Float8BlockScaling(power_2_scale=True),
], ids=["mx", "block"])  # fmt: skip
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_wgrad_of_codes_in_one_layout(recipe, dtype):
    """The other layout is quantized from the values of the codes; the oracle's gives
    the same gradient. The largest float16 is rounded up.
    """
    rng = np.random.default_rng(0)
    x = rng.standard_normal((160, 256)).astype(F32) * np.exp2(
        rng.integers(-12, 12, (160, 2)).repeat(128, axis=1)
    )
    x = jnp.asarray(x * (65504 / np.abs(x).max()), dtype)
    q, _ = recipe.quantizers()[0].quantize(x, None)
    q = dataclasses.replace(q, data_t=None, scale_inv_t=None, source=x)
    codes, scales = np.asarray(q.data), np.asarray(q.scale_inv)
    values = oracle_blocks.dequantize(codes, scales, q.block)
    is_e8m0 = scales.dtype == oracle_blocks.E8M0
    data_t, scale_inv_t = oracle_blocks.quantize(
        values.T.astype(F32),
        E4M3,
        q.block,
        scale="e8m0" if is_e8m0 else "f32",
        power_2_scale=not is_e8m0,
    )
    both = dataclasses.replace(
        q, data_t=jnp.asarray(data_t), scale_inv_t=jnp.asarray(scale_inv_t)
    )

    def dkernel(q):
        kernel = jnp.ones((256, 32), jnp.float32)
        return jax.grad(
            lambda kernel: jnp.sum(
                jnp.sin(jaxfp8.dot_general(q, kernel, MATMUL, recipe=recipe))
            )
        )(kernel)

    oracle.assert_bitwise(dkernel(q), dkernel(both), "gradient of the kernel")


BLOCK = jaxfp8.Float8BlockScaling(pipeline_axes=())
ERRORS = {
    "all_to_all: recipe: .*whole rows": lambda x: collectives.all_to_all(
        x, "e", 0, 1, recipe=BLOCK, tiled=True
    ),
    "all_gather: recipe: .*whole rows": lambda x: collectives.all_gather(
        x, "e", axis=-1, recipe=BLOCK
    ),
    "all_to_all: split_axis: axis 2 is out of bounds": lambda x: collectives.all_to_all(
        x, "e", 2, 0, recipe=BLOCK
    ),
    "unbound axis name: d": lambda x: collectives.all_gather(x, "d", recipe=BLOCK),
    "all_to_all: state: DelayedScaling keeps state": lambda x: moved_rows(
        x, jaxfp8.DelayedScaling(), None
    ),
    "all_to_all: x: expected bfloat16, float16 or float32, got bool": lambda x: (
        moved_rows(x > 0, BLOCK, None)
    ),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors(message):
    x = jnp.ones((64, 256), jnp.bfloat16)
    send = ERRORS[message]
    with pytest.raises((NameError, TypeError, ValueError), match=message):
        jax.shard_map(
            lambda x: send(x).data, mesh=cases.mesh(), in_specs=P("e"), out_specs=P("e")
        )(x)


def test_nothing_to_send():
    """The state is not touched, and zeros come back; without a recipe the array is that
    of JAX.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=4)

    def shard(x, state):
        return jax.grad(
            lambda s: jnp.sum(moved_rows(x, recipe, s).dequantize(jnp.float32))
        )(state)

    specs = {"in_specs": (P("e"), P()), "out_specs": P()}
    after = jax.shard_map(shard, mesh=cases.mesh(), **specs)(
        jnp.ones((64, 0)), jaxfp8.init_state(recipe)
    )
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(after))
