"""The tables of examples/: arms after a tiny run, and what travels between the devices
of a mesh.
"""

import re

import jax
import numpy as np
import pytest

from . import running


@pytest.mark.parametrize("name", ["nnx_language_model", "equinox_language_model"])
def test_one_device(name, tmp_path):
    done = running.run(tmp_path, name, "--tiny")
    assert "Warning" not in done.stderr
    running.assert_table(done.stdout.splitlines())


def test_pipeline(tmp_path):
    """Its losses are those of the blocks in order."""
    done = running.run(tmp_path, "pipeline_language_model", "--tiny")
    assert "Warning" not in done.stderr
    *_, head, bf16, fp8, last = done.stdout.splitlines()
    table = running.assert_table((head, bf16, fp8))
    in_order = dict(part.split() for part in last.split(": ")[1].split(", "))
    for arm in ("bf16", "jaxfp8"):
        # Sums have another order, so some of the bf16 activations round to a neighbour,
        # 2**-8 away, here and there.
        np.testing.assert_allclose(
            float(in_order[arm]), float(table[arm][0]), rtol=2**-8
        )


def test_experts(tmp_path):
    done = running.run(tmp_path, "moe_language_model", "--tiny")
    assert "Warning" not in done.stderr
    *lines, picture = done.stdout.splitlines()
    assert (tmp_path / picture.removeprefix("picture: ")).stat().st_size > 10_000
    running.assert_table(lines[-3:])
    if jax.default_backend() == "cpu":
        moved = {line.split()[0]: line for line in lines if "one step moves" in line}
        sent = {
            arm: dict(re.findall(r"all-to-all (\w+) (\S+) MiB", line))
            for arm, line in moved.items()
        }
        # Of two ways there and two back only the results of the experts are not codes.
        # A CPU sends bf16 as f32.
        assert set(sent["bf16"]) == {"f32"} and set(sent["jaxfp8"]) == {"f32", "u8"}
        assert float(sent["jaxfp8"]["f32"]) == float(sent["bf16"]["f32"]) / 4
        assert float(sent["jaxfp8"]["u8"]) == pytest.approx(
            float(sent["bf16"]["f32"]) * 3 / 16, abs=0.001
        )
