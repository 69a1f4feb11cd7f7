"""examples/moe_language_model.py: its table, and what travels between the devices of the experts."""

import re

import jax
import pytest

from . import running

pytestmark = pytest.mark.slow


def test_prints_collectives_and_a_table(tmp_path):
    done = running.run(tmp_path, "moe_language_model", "--tiny")
    assert "Warning" not in done.stderr
    *lines, picture = done.stdout.splitlines()
    assert (tmp_path / picture.removeprefix("picture: ")).stat().st_size > 10_000
    running.assert_table(lines[-3:])
    if jax.default_backend() == "cpu":
        moved = {line.split()[0]: line for line in lines if "one step moves" in line}
        sent = {arm: dict(re.findall(r"all-to-all (\w+) (\S+) MiB", line)) for arm, line in moved.items()}
        # Of two ways there and two back only the results of the experts are not codes. A CPU sends bf16 as f32.
        assert set(sent["bf16"]) == {"f32"} and set(sent["jaxfp8"]) == {"f32", "u8"}
        assert float(sent["jaxfp8"]["f32"]) == float(sent["bf16"]["f32"]) / 4
        assert float(sent["jaxfp8"]["u8"]) == pytest.approx(float(sent["bf16"]["f32"]) * 3 / 16, abs=0.001)
