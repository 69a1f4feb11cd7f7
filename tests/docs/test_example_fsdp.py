"""examples/fsdp_language_model.py: its table and collectives, and its checkpoints."""

import re

import jax
import pytest

from . import running

NAME = "fsdp_language_model"


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
    return run(folder)


def test_prints_collectives_and_a_table(straight):
    assert "Warning" not in straight.stderr
    assert "rematerialization" not in straight.stderr
    lines = straight.stdout.splitlines()
    moved = {line.split()[0]: line for line in lines if "one step moves" in line}
    assert set(moved) == {"bf16", "jaxfp8"}
    if jax.default_backend() == "cpu":
        assert "8 devices" in lines[0] and "u8" not in moved["bf16"]
        # All that is gathered is codes: of the kernels' 0.375 Mi elements, at most for
        # both layouts.
        (codes,) = re.findall(r"all-gather (\S+) (\S+) MiB", moved["jaxfp8"])
        assert codes[0] == "u8" and 0.37 < float(codes[1]) <= 0.75
    running.assert_table(lines[-3:])


@pytest.mark.parametrize("mesh", ["1x8", "4x2"])
def test_resumes_bitwise(straight, folder, mesh):
    """From the checkpoint on, a run ends in the bits of one that was never interrupted;
    elsewhere it starts in them.
    """
    resumed = run(folder, "--resume", "--arms", "jaxfp8", "--mesh", mesh)
    saved, trained = (
        digests(straight, what)["jaxfp8"] for what in ("saved", "trained")
    )
    assert digests(resumed, "restored")["jaxfp8"] == saved != trained
    assert mesh == "4x2" or digests(resumed, "trained")["jaxfp8"] == trained
