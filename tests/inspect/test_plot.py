"""inspect.plot: what is drawn, where."""

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import inspect


def lines_of(figure) -> dict:
    """`{title: {label: values}}`."""
    return {
        axis.get_title(): {
            line.get_label(): line.get_ydata() for line in axis.get_lines()
        }
        for axis in figure.axes
    }


def test_a_run(tmp_path):
    """A row of axes for each operand; 0 is not recorded, and a logarithm has none."""
    states = []
    for newest, scale_inv in ((0, 1), (4, 1), (2, 0.25)):
        quantizer = jaxfp8.recipes.QuantizerState(
            jnp.float32([newest, 0]), jnp.float32([scale_inv])
        )
        states.append({"up": jaxfp8.DotGeneralState(quantizer, quantizer, None)})
    found = lines_of(inspect.plot(states, tmp_path / "fp8.png"))
    assert list(found) == [
        f"{title} of {operand}"
        for operand in ("input", "kernel")
        for title in ("scale", "amax")
    ]
    for operand in ("input", "kernel"):
        np.testing.assert_array_equal(found[f"amax of {operand}"]["up"], [np.nan, 4, 2])
        np.testing.assert_array_equal(found[f"scale of {operand}"]["up"], [1, 1, 4])
    picture = matplotlib.image.imread(tmp_path / "fp8.png")
    assert picture.ndim == 3 and picture.std() > 0.01


def test_errors():
    one = {"up": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2))}
    for histories, error, match in (
        (one["up"], TypeError, "not iterable"),
        ([], ValueError, "the same quantizers, got 0 trees with 0"),
        (one, ValueError, r"plot: histories\[0\]: expected a tree"),
        ([one, {"down": one["up"]}], ValueError, "got 2 trees with 2 different sets"),
        (
            [{"a": np.ones(2)}],
            ValueError,
            r"plot: histories\[0\]: expected a tree that holds FP8 state",
        ),
    ):
        with pytest.raises(error, match=match):
            inspect.plot(histories)
