"""What a compiled program of experts sends: codes and scales."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from programs.cases import MATMUL

import jaxfp8
from jaxfp8 import collectives
from mesh import collective_cases as cases, hlo

ROWS, WIDTH, HIDDEN = 64, 256, 128


def experts(recipe) -> list[hlo.Collective]:
    """Those of a step of one expert a device: rows are dispatched, multiplied, and
    combined.
    """
    combine = cases.backward_only(recipe, pipeline_axes=())

    def send(x, recipe, state):
        return collectives.all_to_all(
            x, "e", 0, 0, recipe=recipe, state=state, tiled=True
        )

    def shard(x, kernel, states):
        def loss(x, kernel, states):
            rows = send(x, recipe, states[0])
            y = jaxfp8.dot_general(rows, kernel, MATMUL, recipe=recipe, state=states[1])
            y = send(y.astype(x.dtype), combine, states[2]).dequantize(x.dtype)
            return jnp.sum(jnp.sin(y.astype(jnp.float32)))

        return jax.grad(loss, argnums=(0, 1, 2))(x, kernel, states)

    states = [jaxfp8.init_state(r) for r in (recipe, recipe, combine)]
    specs = {"in_specs": (P("e"), P("e"), P()), "out_specs": (P("e"), P("e"), P())}
    step = jax.jit(jax.shard_map(shard, mesh=cases.mesh(), **specs))
    x = jnp.ones((8 * ROWS, WIDTH), jnp.bfloat16)
    kernel = jnp.ones((8 * WIDTH, HIDDEN))
    lowered = step.lower(x, kernel, states)
    return hlo.collectives(lowered.compile(hlo.QUICKLY).as_text())


@pytest.mark.parametrize("name", ["delayed", "block"])
def test_codes_and_scales_alone_are_sent(name):
    found = experts(cases.RECIPES[name][0])
    sent = [c for c in found if not c.is_amax]
    assert {c.kind for c in sent} == {"all-to-all"}
    assert not any(dtype.startswith("f8") for c in sent for dtype, _ in c.results), sent
    # Only the combine's forward sends a tensor; XLA's CPU compiler widens its bfloat16.
    size = 4 * ROWS * HIDDEN
    tensors = [c for c in sent if c.bytes == size and c.results[0].dtype == "f32"]
    codes = [c for c in sent if c not in tensors]
    assert len(tensors) == 1
    # dispatch both ways, and the combine's backward
    in_bf16 = 2 * ROWS * WIDTH * 2 + 2 * ROWS * HIDDEN
    assert 0.5 * in_bf16 <= sum(c.bytes for c in codes) <= 0.52 * in_bf16
    # The amaxes of delayed scaling are one all-reduce.
    assert sum(c.is_amax for c in found) == 1 or name != "delayed"
