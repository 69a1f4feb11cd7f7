"""inspect.summary and scalars: every number against numpy, from state that is written
by hand.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax.training.train_state import TrainState

import jaxfp8
from jaxfp8 import inspect

A = jaxfp8.DelayedScaling(amax_history_len=6)
OWG = jaxfp8.OVERWRITE_WITH_GRADIENT


def state(history, scale_inv, operand="input"):
    """Variables of one product with one quantizer: slot 0 newest, slot 1 oldest."""
    leaves = {
        f"{operand}_amax_history": history,
        f"{operand}_scale": np.reshape(scale_inv, (*np.shape(scale_inv), 1)),
    }
    leaves = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in leaves.items()}
    return {"params": {"layer": {"scale": jnp.ones(3)}}, OWG: {"layer": leaves}}


def row_of(*args, **kwargs):
    (row,) = inspect.summary(state(*args, **kwargs)).rows
    return row


def test_a_window_by_hand():
    # The step before wrote 3 (the last slot), the ones before it 7 and 5; the step just
    # run wrote 14, with 7's scale.
    scale_inv = np.float32(7) / np.float32(448)
    row = row_of([14, 0, 0, 5, 7, 3], scale_inv)
    assert row == {
        "name": "layer/input",
        "scale": 1 / float(scale_inv),
        "scale_inv": float(scale_inv),
        "newest": 14.0,
        "max": 14.0,
        "min": 3.0,
        "filled": 4,
        "length": 6,
        "peak": 14.0 / float(scale_inv),
        "growth": 2.0,
        "follows": "max",
        "least": 0.0,
    }
    assert row["peak"] == 2 * 448


@pytest.mark.parametrize(
    "history, scale_inv, follows",
    [
        ([4, 0, 0, 2, 9, 3], 9 / 57344, "max"),  # e5m2
        ([4, 0, 0, 2, 9, 3], 9 / 448 * 8, "max"),  # margin 3
        ([4, 0, 0, 2, 9, 3], 3 / 448, "most_recent"),
        ([4, 1, 2, 2, 2, 3], 9 / 448, "dropped"),  # a 9 that has just left
        # the window is not full: nothing has left it
        ([4, 0, 0, 2, 9, 3], 10 / 448, None),
        ([4, 1, 2, 2, 9, 3], 5 / 57344, None),  # smaller than what is there
        ([4, 0, 0, 0, 0, 0], 1, "unit"),
        ([0, 0, 0, 0, 0, 0], 1, "unit"),
        ([4, 0, 0, 0, 0, 0], 2, None),
        ([4], 5 / 448, "dropped"),
        ([np.inf, -0.0, np.nan, 2, 9, 3], 9 / 448, "max"),
        ([4, 0, 0, 2, 9, -3], 9 / 448, "below zero"),
        ([4, 0, 0, 2, 9, 3], -9 / 448, "below zero"),
    ],
)
def test_what_the_scale_follows(history, scale_inv, follows):
    assert row_of(history, scale_inv)["follows"] == follows


def test_nothing_recorded_and_a_scale_that_is_none():
    row = row_of([0, 0, 0], 1)
    assert [
        row[name] for name in ("newest", "max", "min", "filled", "peak", "scale")
    ] == [None] * 3 + [0, None, 1.0]
    row = row_of([1, 0, 2], np.nan)
    assert row["scale"] is None
    assert row["peak"] is None
    assert row["follows"] is None
    assert row["max"] == 2


def test_a_line_of_the_table():
    text = str(inspect.summary(state([14, 0, 0, 5, 7, 3], 7 / 448)))
    assert text.split("\n")[1].split() == "layer/input 64 14 14 3 4/6 896 max".split()


def test_a_row_for_each_layer_of_a_stack():
    histories = np.arange(1, 25).reshape(2, 3, 4)
    scales = np.arange(1, 7).reshape(2, 3) / 448
    rows = inspect.summary(state(histories, scales)).rows
    assert [row["name"] for row in rows] == [
        f"layer/input[{i},{j}]" for i in range(2) for j in range(3)
    ]
    assert [row["newest"] for row in rows] == [1, 5, 9, 13, 17, 21]
    np.testing.assert_array_equal(
        [row["scale_inv"] for row in rows], scales.ravel().astype(np.float32)
    )


def test_a_large_model_takes_a_screen():
    """Its worst 40 quantizers; `worst` keeps the worst rows."""
    layers = {
        f"block_{i}": state([2 + (i == 7), 2, 1], 2 / 448)[OWG] for i in range(39)
    }
    layers |= {
        "head": state([1, 1], -1)[OWG],
        "block_40": {"odd": state([9, 3], 3 / 448)[OWG]},
    }
    found = inspect.summary({OWG: layers})
    table, _, told = str(found).partition("\n\n")
    assert told.startswith(
        "head/layer/input: expected a state that is not negative, got -1: an "
        "optimizer has stepped"
    )
    lines = [line.split()[0] for line in table.split("\n")]
    assert len(found.rows) == 41 and repr(found) == str(found)
    names = ["head/layer/input", "block_40/odd/layer/input", "block_7/layer/input"]
    assert lines[1:4] == names
    assert len(lines) == 1 + 40 + 1
    assert table.endswith("\nand 1 more, which are better")
    del layers["block_0"]
    assert "more" not in str(inspect.summary({OWG: layers})).partition("\n\n")[0]
    worst = inspect.summary({OWG: layers}, worst=3)
    assert [row["name"] for row in worst.rows] == names
    assert [row["growth"] for row in worst.rows] == [1, 3, 1.5]


def test_every_kind_of_tree():
    variables = state([4, 2], 1)
    train = TrainState.create(apply_fn=None, params=variables, tx=optax.sgd(0.1))
    rows = inspect.summary(variables).rows
    for tree in (train, variables[OWG]):
        assert inspect.summary(tree).rows == rows
    # An optimizer that was given the state keeps moments of it, which are no state.
    careless = {
        "params": variables,
        "opt_state": optax.adam(1e-3).init(variables),
        "step": 1,
    }
    assert inspect.summary(careless).rows == rows


def test_measure_is_one_small_array_and_waits_for_nothing():
    tree = state(np.ones((3, 1024)), np.ones(3))
    jaxpr = jax.make_jaxpr(inspect.measure)(tree)
    (out,) = jaxpr.out_avals
    assert out.shape == (18,)
    assert not any("callback" in eqn.primitive.name for eqn in jaxpr.eqns)


def test_figures_by_hand():
    """Each figure of a stack of three quantizers, and of a gradient in e5m2, against
    numpy in double precision.
    """
    histories = np.array([[12, 0, 3, 6], [2, 0, 0, 0], [0, 5, 1, 2]], np.float32)
    scale_inv = np.array([6 / 448, 1, 5 / 448], np.float32)
    tree = state(histories, scale_inv)
    tree[OWG]["layer"] |= state([3, 9, 4], 9 / 57344, operand="output_grad")[OWG][
        "layer"
    ]
    measured = jax.jit(inspect.measure)(tree)
    found = inspect.scalars(measured, prefix="")
    lags = [np.log2(12 / np.float64(scale_inv[0]) / 448), np.log2(2 / 448), np.nan]
    for i, (growth, lag) in enumerate(zip([2, np.nan, np.nan], lags, strict=True)):
        row = {
            name.rpartition("/")[2]: value
            for name, value in found.items()
            if name.startswith(f"layer/input[{i}]/")
        }
        assert list(row)[:4] == ["scale", "amax", "amax_max", "peak"] and len(row) == 6
        np.testing.assert_array_equal(row["growth"], growth)
        # The quotients are rounded three times, the logarithm once.
        np.testing.assert_allclose(
            row["scale_lag"], lag, rtol=4 * 2**-24, atol=4 * 2**-24
        )
    growth = np.float32(3) / np.float32(9)
    assert found["layer/output_grad/growth"] == growth
    np.testing.assert_allclose(
        found["layer/output_grad/scale_lag"], np.log2(growth), rtol=4 * 2**-24
    )
    # State does not record its format: in e4m3 the same peak is 2**7 too large, as
    # 57344 is 2**7 * 448.
    forward = inspect.scalars(inspect.measure(tree, jaxfp8.Format.E4M3), prefix="")
    difference = (
        forward["layer/output_grad/scale_lag"] - found["layer/output_grad/scale_lag"]
    )
    assert abs(difference - 7) < 1e-6
    assert forward["layer/input[0]/scale_lag"] == found["layer/input[0]/scale_lag"]
    assert np.isnan(inspect.scalars(state([4], 1))["fp8/layer/input/growth"])


def test_errors():
    with pytest.raises(
        ValueError,
        match=(
            r"summary: variables: .*/input: expected a history .* \(4, 2\) and \(3, "
            r"1\)"
        ),
    ):
        inspect.summary(state(np.ones((4, 2)), np.ones(3)))
    with pytest.raises(
        ValueError,
        match=(
            "summary: variables: expected a tree that holds FP8 state .* got 1 leaves"
        ),
    ):
        inspect.summary({"scale": jnp.ones(3)})
    with pytest.raises(
        ValueError, match="measure: variables: expected a tree that holds FP8 state"
    ):
        inspect.scalars({})
    tree = state([1, 2], 1)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda tree: len(inspect.summary(tree).rows))(tree)
    with pytest.raises(jax.errors.TracerArrayConversionError):
        jax.jit(lambda tree: inspect.scalars(tree))(tree)
