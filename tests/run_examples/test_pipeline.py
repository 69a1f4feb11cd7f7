"""examples/pipeline_language_model.py: its table, and its pipeline against blocks in order."""

import jax
import numpy as np
import oracle
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P
from mesh import hlo

from . import running

pytestmark = pytest.mark.slow

NAME, VOCABULARY = "pipeline_language_model", 50


def test_prints_a_table(tmp_path):
    done = running.run(tmp_path, NAME, "--tiny")
    assert "Warning" not in done.stderr
    *_, head, bf16, fp8, last = done.stdout.splitlines()
    table = running.assert_table((head, bf16, fp8))
    in_order = dict(part.split() for part in last.split(": ")[1].split(", "))
    for arm in ("bf16", "jaxfp8"):
        # Sums have another order, so some of the bf16 activations round to a neighbour, 2**-8 away, here and there.
        np.testing.assert_allclose(float(in_order[arm]), float(table[arm][0]), rtol=2**-8)


def test_state_is_that_of_blocks_in_order(example):
    """Each stage has the scales and amaxes that it has without the pipeline; and amaxes stay in their stage."""
    mesh = example.make_mesh()
    assert mesh.devices.shape == (4, 2)
    train = example.create("jaxfp8", VOCABULARY, seed=3, steps=4, mesh=mesh)
    for leaf in jax.tree.leaves(train.params["params"]["stages"]) + jax.tree.leaves(train.params[example.STATE]):
        assert leaf.shape[0] == 4 and leaf.sharding.spec == P("stage")
    rng = np.random.default_rng(0)
    used = jax.tree.map(
        lambda leaf: jax.device_put(rng.uniform(1, 2, leaf.shape).astype(np.float32), leaf.sharding),
        train.params[example.STATE],
    )
    variables = {**train.params, example.STATE: used}
    batch = rng.integers(0, VOCABULARY, (8, 17), np.int32)

    def next_state(apply_fn, variables, batch):
        gradient = jax.jit(jax.grad(lambda variables, batch: example.loss_fn(variables, apply_fn, batch)))
        program = gradient.lower(variables, batch).compile()
        return jax.device_get(program(variables, batch)[example.STATE]), program.as_text()

    got, text = next_state(train.apply_fn, variables, jax.device_put(batch, NamedSharding(mesh, P("data"))))
    whole = example.LanguageModel(VOCABULARY, example.ARMS["jaxfp8"])
    wanted, _ = next_state(whole.apply, jax.device_get(variables), batch)
    for (path, leaf), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        name = jax.tree_util.keystr(path)
        if "scale" in name:
            oracle.assert_bitwise(leaf, other, name)
            continue
        oracle.assert_bitwise(leaf[:, 1:], other[:, 1:], name)
        # They agree to the bit where products round alike whatever their size. Where not, a bf16 value becomes its
        # neighbour, 2**-8 away; there are two products and an attention between the tensors of two layers.
        np.testing.assert_allclose(leaf[:, 0], other[:, 0], rtol=2**-6, err_msg=name)

    reductions = [collective for collective in hlo.collectives(text) if collective.is_amax]
    assert len(reductions) == 2, "one of the forward and one of the backward, for all layers of a stage"
    for reduction in reductions:
        assert list(map(set, reduction.groups)) == [{0, 1}, {2, 3}, {4, 5}, {6, 7}]
