"""Every row for jaxfp8, through each kind of layer that it can be asked of."""

import pathlib

import jax
import pytest

from bad_days import rows
from bad_days.libraries import FLAX, LAYERS, OURS
from bad_days.verdict import Outcome, judged

# One of each kind is what `make test` shows.
SHOWN = {
    "bad_value_in_x",
    "empty_batch",
    "unused_expert",
    "flax_dynamic_scale",
    "bad_numbers",
}
# Rows that no other test shows. The others are nightly: other tests show them to the
# bit, or they start processes, need 12 GiB or train.
ALONE = {
    "first_step_current",
    "first_step_unit",
    "zero_tensors",
    "zero_blocks",
    "nan_on_one_device",
    "empty_batch",
    "empty_shard",
    "stacked_rows",
    "mean_over_devices",
    "more_than_gradients",
    "schedule_free",
    "checkpointed_loop",
    "norm_of_all",
    "changed_recipe",
    "no_state",
    "left_out_state",
    "foreign_state",
    "dropped_state",
    "two_gradients",
    "two_optimizers",
    "named_initializers",
    "out_sharding",
    "logged_scale",
    "through_dequantize",
    "symbolic_batch",
    "vmap_of_cond",
}
# Where neither optax nor Flax's own classes promote dtypes, the session's strict rules
# hold.
STRICT = ("values", "shapes", "meshes", "ffi")


def _cases():
    for row in rows.BY_NAME.values():
        for name, layer in LAYERS.items() if row.any_layer else [("Linen", OURS)]:
            marks = [pytest.mark.ci if row.name in ALONE else pytest.mark.slow]
            if row.name in SHOWN and name == "Linen":
                marks = []
            yield pytest.param(
                row, layer, marks=marks, id=f"{row.subject}-{row.name}-{name}"
            )


@pytest.mark.parametrize("row, layer", list(_cases()))
def test_row(row, layer):
    rules = ("strict", "raise") if row.subject in STRICT else ("standard", "allow")
    with jax.numpy_dtype_promotion(rules[0]), jax.numpy_rank_promotion(rules[1]):
        verdict = judged(row, layer)
    assert verdict.outcome is Outcome.RIGHT, verdict


def test_the_lists_and_the_page_name_rows():
    assert SHOWN | ALONE <= set(rows.BY_NAME)
    page = (pathlib.Path(__file__).parent / "README.md").read_text()
    for row in rows.BY_NAME.values():
        assert f"| {row.title} |" in page, row.title


@pytest.mark.usefixtures("as_users_have_jax", "nothing_stays_traced")
def test_a_row_sees_what_is_silently_wrong():
    assert judged(rows.BY_NAME["unused_expert"], FLAX).outcome is Outcome.WRONG
