"""What compiled programs send: codes and scales, no tensor; and what they do not
compute.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from programs.cases import MATMUL

import jaxfp8
from jaxfp8 import collectives
from mesh import collective_cases as cases, hlo

ROWS, WIDTH, HIDDEN = 64, 256, 128
FAST = ("delayed", "block")
RECIPES = {
    name: cases.RECIPES[name][0]
    for name in ("delayed", "current", "rowwise", "block", "mx")
}


def experts(send_rows, send_results, recipe):
    """The compiled step of one expert a device: rows are dispatched, multiplied, and
    combined.
    """

    def shard(x, kernel, states):
        def loss(x, kernel, states):
            rows = send_rows(x, states[0])
            y = jaxfp8.dot_general(rows, kernel, MATMUL, recipe=recipe, state=states[1])
            y = send_results(y.astype(x.dtype), states[2])
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, states)

    dispatch = recipe
    combine = recipe and cases.backward_only(recipe, pipeline_axes=())
    states = [jaxfp8.init_state(r) if r else None for r in (dispatch, recipe, combine)]
    specs = {"in_specs": (P("e"), P("e"), P()), "out_specs": (P("e"), P("e"), P())}
    step = jax.jit(jax.shard_map(shard, mesh=cases.mesh(), **specs))
    x = jnp.ones((8 * ROWS, WIDTH), jnp.bfloat16)
    kernel = jnp.ones((8 * WIDTH, HIDDEN))
    return step.lower(x, kernel, states).compile(hlo.QUICKLY).as_text()


def plainly(x, state):
    del state
    return lax.all_to_all(x, "e", 0, 0, tiled=True)


def sent_by(recipe):
    def rows(x, state):
        return collectives.all_to_all(
            x, "e", 0, 0, recipe=recipe, state=state, tiled=True
        )

    def results(y, state):
        combine = cases.backward_only(recipe, pipeline_axes=())
        return collectives.all_to_all(
            y, "e", 0, 0, recipe=combine, state=state, tiled=True
        ).dequantize(y.dtype)

    return rows, results


def compare(name) -> None:
    recipe = RECIPES[name]
    text = experts(*sent_by(recipe), recipe)
    sent = [c for c in hlo.collectives(text) if not c.is_amax]
    assert {c.kind for c in sent} == {"all-to-all"}
    assert not any(dtype.startswith("f8") for c in sent for dtype, _ in c.results), sent
    # Only the combine's forward sends a tensor; XLA's CPU compiler widens its bfloat16.
    tensors = [
        c
        for c in sent
        if c.bytes == 4 * ROWS * HIDDEN and {dtype for dtype, _ in c.results} == {"f32"}
    ]
    codes = [c for c in sent if c not in tensors]
    assert len(tensors) == 1
    # dispatch both ways, and the combine's backward
    in_bf16 = 2 * ROWS * WIDTH * 2 + 2 * ROWS * HIDDEN
    assert 0.5 * in_bf16 <= sum(c.bytes for c in codes) <= 0.52 * in_bf16
    # The amaxes of delayed scaling are one all-reduce.
    assert sum(c.is_amax for c in hlo.collectives(text)) == 1 or name != "delayed"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[] if n in FAST else pytest.mark.slow) for n in RECIPES],
)
def test_codes_and_scales_alone_are_sent(name):
    compare(name)


def test_the_source_is_not_computed():
    """Beside what the products dequantize on a CPU there is the gradient that arrived,
    once.
    """
    recipe = RECIPES["delayed"]
    rows, _ = sent_by(recipe)
    counts = [
        len(
            re.findall(
                r'custom_call_target="jaxfp8_dequantize', experts(send, plainly, recipe)
            )
        )
        for send in (plainly, rows)
    ]
    assert counts[1] == counts[0] + 1
