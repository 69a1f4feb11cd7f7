"""examples/fsdp_language_model.py: its table and collectives, and its checkpoints on other meshes."""

import re

import jax
import numpy as np
import oracle
import orbax.checkpoint as ocp
import pytest

import jaxfp8

from . import running

pytestmark = pytest.mark.slow

NAME, VOCABULARY, STEPS = "fsdp_language_model", 50, 4


def run(folder, *options):
    return running.run(folder, NAME, "--tiny", *options)


def digests(done, what):
    """`{arm: digest}` of a line of the output."""
    (line,) = [line for line in done.stdout.splitlines() if line.startswith(what)]
    words = line.split(":", 1)[1].split()
    return dict(zip(words[::2], words[1::2], strict=True))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def straight(folder):
    """A run from the start, which leaves a checkpoint in `folder`."""
    done = run(folder)
    return done


def test_prints_collectives_and_a_table(straight):
    assert "Warning" not in straight.stderr and "rematerialization" not in straight.stderr
    lines = straight.stdout.splitlines()
    moved = {line.split()[0]: line for line in lines if "one step moves" in line}
    assert set(moved) == {"bf16", "jaxfp8"}
    if jax.default_backend() == "cpu":
        assert "8 devices" in lines[0] and "u8" not in moved["bf16"]
        # All that is gathered is codes: of the kernels' 0.375 Mi elements, at most for both layouts.
        (codes,) = re.findall(r"all-gather (\S+) (\S+) MiB", moved["jaxfp8"])
        assert codes[0] == "u8" and 0.37 < float(codes[1]) <= 0.75
    running.assert_table(lines[-3:])


def test_resumes_bitwise(straight, folder):
    """A run that goes on from the checkpoint ends in the bits of the one that was never interrupted."""
    resumed = run(folder, "--resume", "--arms", "jaxfp8")
    assert digests(resumed, "restored")["jaxfp8"] == digests(straight, "saved")["jaxfp8"]
    assert digests(resumed, "trained")["jaxfp8"] == digests(straight, "trained")["jaxfp8"]
    assert digests(straight, "trained")["jaxfp8"] != digests(straight, "saved")["jaxfp8"]


@pytest.fixture
def example(monkeypatch):
    with running.imported(monkeypatch, NAME) as module:
        monkeypatch.setattr(module, "LAYERS", 1)
        yield module


def create(example, shape):
    mesh = example.make_mesh(shape)
    return example.create("jaxfp8", VOCABULARY, seed=3, steps=STEPS, mesh=mesh), mesh


def put_batches(example, mesh):
    batches = np.random.default_rng(0).integers(0, VOCABULARY, (3, 8, 17), np.int32)
    return [jax.device_put(batch, example.batch_sharding(mesh)) for batch in batches]


def test_restores_on_other_meshes(example, tmp_path):
    """All bits of parameters, moments and FP8 state, cut as the new mesh wants it; the next step is the same step."""
    train, mesh = create(example, (1, 8))
    step = example.make_step(train, mesh)
    *batches, last = put_batches(example, mesh)
    for batch in batches:
        train, _ = step(train, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        example.save(checkpointer, tmp_path, {"jaxfp8": train})
        saved = jax.device_get(train)
        _, loss = step(train, last)
        for shape in ((4, 2), (2, 4)):
            fresh, mesh = create(example, shape)
            restored = example.restore(checkpointer, tmp_path, {"jaxfp8": fresh})["jaxfp8"]
            assert example.digest(restored) == example.digest(saved) != example.digest(fresh)
            leaves = zip(jax.tree.leaves_with_path(restored), *map(jax.tree.leaves, (saved, fresh)), strict=True)
            for (path, leaf), wanted, placed in leaves:
                name = f"{shape}: {jax.tree_util.keystr(path)}"
                oracle.assert_bitwise(leaf, wanted, name)
                assert leaf.sharding == placed.sharding, name
    train, again = example.make_step(restored, mesh)(restored, put_batches(example, mesh)[-1])
    # Sums have another order, so some of the bf16 activations round to a neighbour, 2**-8 away, here and there.
    np.testing.assert_allclose(again, loss, rtol=2**-8)
    assert int(train.step) == 3
    assert all(leaf[0] > 0 for leaf in jax.tree.leaves(jax.device_get(train.params[jaxfp8.OVERWRITE_WITH_GRADIENT])))
