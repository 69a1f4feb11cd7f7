"""What compiled programs for 8 devices send: FP8 codes where bf16 would send tensors,
and one all-reduce of amaxes.

Bytes of bf16 programs are counted as 2 a number: XLA's CPU compiler widens bf16, and
FP8 that it sees, before it sends them.
"""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from mesh import cases, hlo


def compiled(kind, name, **options) -> list[hlo.Collective]:
    mesh = cases.mesh(kind)
    layout = cases.LAYOUTS[name]
    with jax.set_mesh(mesh):
        weights, state, batches = cases.arguments(mesh, layout, **options)
        step = cases.jitted(mesh, layout).lower(weights, state, batches[0])
        return hlo.collectives(step.compile(hlo.QUICKLY).as_text())


def compiled_in_bf16(kind, name, monkeypatch):
    def dot(x, kernel, state, recipe, out_sharding):
        del state, recipe
        return lax.dot_general(
            x,
            kernel.astype(x.dtype),
            cases.ROWS_BY_COLUMNS,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )

    with monkeypatch.context() as patch:
        patch.setattr(cases, "dot", dot)
        return compiled(kind, name, with_state=False)


STEPS = [("auto", name) for name in cases.LAYOUTS] + [("explicit", "all")]


@pytest.mark.parametrize("kind, name", STEPS)
def test_a_step_of_the_model(kind, name, monkeypatch):
    found = compiled(kind, name)
    (amaxes,) = (c for c in found if c.is_amax)
    # input, kernel and output_grad of two products; of kernels that are cut
    assert amaxes.results == (("f32", (1,)),) * (4 if name == "dp" else 6)

    ours = [c for c in found if not c.is_amax]
    theirs = compiled_in_bf16(kind, name, monkeypatch)
    assert {c.kind for c in ours} <= {c.kind for c in theirs}
    gathers = [c for c in ours if c.kind == "all-gather"]
    assert {dtype for c in gathers for dtype, _ in c.results} <= {"u8"}
    in_bf16 = [c for c in theirs if c.kind == "all-gather"]
    assert len(ours) - len(gathers) <= len(theirs) - len(in_bf16)
    # A tensor that two products read may be gathered twice, 1 byte a number, where bf16
    # gathers once.
    assert sum(c.bytes for c in gathers) <= sum(c.bytes // 2 for c in in_bf16)
