"""inspect.plot: what is drawn, where."""

import sys

import jax.numpy as jnp
import matplotlib.image
import numpy as np
import pytest

import jaxfp8
from jaxfp8 import inspect


def lines_of(figure) -> dict:
    """`{title: {(label, style): values}}`."""
    return {
        axis.get_title(): {
            (line.get_label() if not line.get_label().startswith("_") else None, line.get_linestyle()): line.get_ydata()
            for line in axis.get_lines()
        }
        for axis in figure.axes
    }


def test_a_dict_of_arrays(tmp_path):
    history = np.array([[0, 0, 0], [1, 0, 0], [4, 0, 1], [2, 1, 4]], np.float32)
    figure = inspect.plot(
        {"dense/amax": history, "flat": np.arange(4), "dense/scale": jnp.array([1.0, 8.0, 8.0, 2.0])},
        tmp_path / "fp8.png",
    )
    found = lines_of(figure)
    assert list(found) == ["amax", "scale"]
    np.testing.assert_array_equal(found["amax"]["dense/amax", "-"], [np.nan, 1, 4, 2])
    np.testing.assert_array_equal(found["amax"][None, "--"], [np.nan, 1, 4, 4])
    np.testing.assert_array_equal(found["amax"]["flat", "-"], [np.nan, 1, 2, 3])
    np.testing.assert_array_equal(found["scale"]["dense/scale", "-"], [1, 8, 8, 2])
    picture = matplotlib.image.imread(tmp_path / "fp8.png")
    assert picture.ndim == 3 and picture.std() > 0.01


def test_errors(monkeypatch):
    one = {"up": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2))}
    for histories, error, match in (
        (one["up"], TypeError, "expected a dict of arrays or a list of variable trees, got DotGeneralState"),
        (
            {"a": np.ones((2, 2, 2))},
            ValueError,
            r"histories\['a'\]: expected \(steps,\) or \(steps, H\), got \(2, 2, 2\)",
        ),
        ([], ValueError, "at least one tree"),
        ({}, ValueError, "at least one array"),
        ([one, {"down": one["up"]}], ValueError, "trees with the same quantizers"),
        ([{"a": np.ones(2)}], ValueError, r"plot: histories\[0\]: expected a tree that holds FP8 state"),
    ):
        with pytest.raises(error, match=match):
            inspect.plot(histories)

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match="inspect.plot: needs matplotlib; install it: pip install matplotlib"):
        inspect.plot({"a": np.ones(2)})
