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
# Rows that start processes, need 12 GiB or train are nightly.
HEAVY = {"large", "processes", "reload", "reload_without", "cache", "proof"}
# Rows that tests of other folders show to the bit are of the scoreboard, and nightly.
SHOWN_BY_OTHER_TESTS = {
    "bad_value_in_x",
    "bad_value_in_kernel",
    "bad_value_in_grad",
    "tiny_amax",
    "subnormals",
    "float16",
    "bfloat16_gain",
    "every_half_code",
    "empty_contraction",
    "empty_expert",
    "not_floats",
    "called_twice",
    "scan_of_microbatches",
    "scan_that_broadcasts",
    "vmap_over_examples",
    "branch_not_taken",
    "unused_expert",
    "frozen_layer",
    "same_from_every_way",
    "two_threads",
    "accumulation_in_a_loop",
    "accumulation_in_a_scan",
    "flax_dynamic_scale",
    "clipped_by_hand",
    "apply_if_finite",
    "cast_gradients",
    "slipped",
    "documented_gradient",
    "plain_gradient",
    "parameters_alone",
    "plain_optax",
    "stale_gradient",
    "pmapped",
    "restored",
    "from_high_precision",
    "changed_length",
    "missing_state",
    "bad_numbers",
    "with_shard_map",
    "tiny_gradients",
    "huge_operands",
}
# Where neither optax nor Flax's own classes promote dtypes, the session's strict rules
# hold.
STRICT = ("values", "shapes", "meshes", "ffi")


def _cases():
    for row in rows.BY_NAME.values():
        for name, layer in LAYERS.items() if row.any_layer else [("Linen", OURS)]:
            is_shown = row.name in SHOWN and name == "Linen"
            is_slow = row.name in HEAVY | SHOWN_BY_OTHER_TESTS
            marks = (
                [] if is_shown else [pytest.mark.slow] if is_slow else [pytest.mark.ci]
            )
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
    assert SHOWN | HEAVY | SHOWN_BY_OTHER_TESTS <= set(rows.BY_NAME)
    page = (pathlib.Path(__file__).parent / "README.md").read_text()
    for row in rows.BY_NAME.values():
        assert f"| {row.title} |" in page, row.title


@pytest.mark.usefixtures("as_users_have_jax", "nothing_stays_traced")
def test_a_row_sees_what_is_silently_wrong():
    assert judged(rows.BY_NAME["unused_expert"], FLAX).outcome is Outcome.WRONG
