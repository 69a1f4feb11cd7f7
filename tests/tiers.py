"""The three tiers of tests: `make test` (minutes), CI, and `make test-all`, from marks
and the table below.

`slow` is what only `make test-all` runs, `ci` what CI runs besides `make test`. Few
tests carry either by hand. Of a product of parameters both run a diagonal, so that each
value occurs, and `make test-all` runs every case.
"""

import collections
import pathlib

# Folders and modules that `make test` leaves to CI: GPUs without one, tools, pages,
# other libraries, what is built on training, and what a step on a mesh is beside right.
CI = {
    "aot",
    "bad_days/fuzz",
    "benchmarks",
    "convert",
    "cuda",
    "docs",
    "dot/test_dot_general.py",
    "dot/test_fp8_residuals.py",
    "dot/test_fused_gradients.py",
    "dot/test_fused_programs.py",
    "dot/test_fused_values.py",
    "dot/test_ragged_blocks.py",
    "dot/test_ragged_dot.py",
    "dot/test_ragged_operands.py",
    "dot/test_shared_kernels.py",
    "inference",
    "inspect",
    "integrations",
    "linen/test_dense_rules.py",
    "linen/test_experts.py",
    "linen/test_gated_rules.py",
    "linen/test_quantize_transforms.py",
    "linen/test_scan.py",
    "mesh/test_collectives.py",
    "mesh/test_collectives_of_codes.py",
    "mesh/test_experts.py",
    "mesh/test_odd_shards.py",
    "mesh/test_pipeline.py",
    "mesh/test_ragged.py",
    "mixed_precision",
    "native",
    "nnx/test_dense_rules.py",
    "nnx/test_experts.py",
    "nnx/test_fused_layers.py",
    "nnx/test_gated_rules.py",
    "nnx/test_quantize.py",
    "ops/test_moments.py",
    "ops/test_native_xla.py",
    "ops/test_ragged_matmul.py",
    "ops/test_raw_targets.py",
    "ops/test_support.py",
    "optim/test_meshes.py",
    "optim/test_moments.py",
    "optim/test_quantized.py",
    "oracle/test_accumulation.py",
    "oracle/test_vectors.py",
    "programs/test_compiled_step.py",
    "programs/test_custom_vjp.py",
    "programs/test_nestings.py",
    "programs/test_readings.py",
    "recipes/test_custom.py",
    "recipes/test_custom_state.py",
    "recipes/test_min_size.py",
    "selftest",
    "test_messages.py",
    "tpu",
    "train/test_change_of_recipe.py",
    "train/test_stacked_state.py",
    "train/test_train_state.py",
    "train/test_x64.py",
}
# What takes long and only `make test-all` runs. CI runs shorter tests of the same; it
# has `make sanitize` for native, and `make train`.
MINUTES = {
    "aot/test_model.py",
    "benchmarks/test_compare.py::test_arms_train",
    "benchmarks/test_compare_fairness.py",
    "benchmarks/test_dry_run.py",
    "benchmarks/test_gpu_session.py::test_what_is_cut_off_takes_nothing_else",
    "benchmarks/test_loss_gap.py::test_each_arm_quantizes_what_it_says",
    "benchmarks/test_loss_gap.py::test_runs_are_paired_and_kept",
    "benchmarks/test_sqnr.py::test_measured_again",
    "docs/test_example_custom_recipes.py::test_prints_a_table",
    "docs/test_example_fsdp.py",
    "docs/test_example_language_model.py::test_language_model_prints_a_table_and_writes_picture_and_json",
    "docs/test_example_tables.py::test_experts",
    "docs/test_example_tables.py::test_one_device[equinox",
    "docs/test_example_tables.py::test_one_device[nnx_language_model",
    "docs/test_example_tables.py::test_pipeline",
    "native/test_native.py",
    "ops/test_adam.py::test_leaves_share_a_call[reference",
    "ops/test_adam.py::test_leaves_share_a_call[tpu",
    "tpu/test_moments.py::test_cycles",
    "tpu/test_pairs.py::test_gated_layers_take_no_more_cycles_than_flax",
    "tpu/test_programs.py::test_drop_ins_in_a_scan_take_no_more_cycles_than_flax",
}
# Where `make test` runs one case of each test; elsewhere it runs every value of every
# parameter once.
ONE_CASE = {
    "dot/test_einsum.py",
    "linen/test_fused_layers.py",
    "mesh",
    "ops/test_block_scaled_matmul.py",
    "ops/test_produced.py",
    "ops/test_quantize_blocks_transpose.py",
    "recipes/test_meshes.py",
}
# Whole files go to workers, in this order and then by name: the longest first, so that
# none is left for one core.
LONGEST = (
    "docs/test_docs.py",
    "cuda/test_emulated_kernels.py",
    "benchmarks/test_dry_run.py",
    "programs/test_programs.py",
    "ops/test_transforms.py",
    "bad_days/test_rows.py",
    "benchmarks/test_loss_gap.py",
    "mesh/test_shard_map.py",
    "ops/test_raw_targets.py",
    "mesh/test_odd_shards.py",
    "dot/test_fused_gradients.py",
    "optim/test_quantized.py",
    "recipes/test_meshes.py",
    "ops/test_produced.py",
    "benchmarks/test_compare.py",
    "programs/test_readings.py",
)


def order(items, tests: pathlib.Path) -> None:
    """Put the tests of the longest files first; those of a file stay together."""
    places = {path: place for place, path in enumerate(LONGEST)}
    items.sort(
        key=lambda item: places.get(
            item.path.relative_to(tests).as_posix(), len(LONGEST)
        )
    )


def mark(items, tests: pathlib.Path) -> None:
    """Add `slow` and `ci` to what the rules and the table say."""
    functions = collections.defaultdict(list)
    for item in items:
        functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        path = cases[0].path.relative_to(tests)
        for case in cases:
            if _takes_minutes(case, path):
                case.add_marker("slow")
        # The diagonal is one of the cases that are not slow by themselves: else a value
        # would run nowhere that meets a slow one on it.
        cases = [case for case in cases if not case.get_closest_marker("slow")]
        in_ci = is_in_ci(path)
        one_case = bool(ONE_CASE & _where(path))
        values = collections.defaultdict(dict)
        positions = [_positions(case, values) for case in cases]
        sizes = {names: len(keys) for names, keys in values.items()}
        for case, position in zip(cases, positions, strict=True):
            on_diagonal = _is_diagonal(position, sizes)
            in_fast = not in_ci and (case is cases[0] if one_case else on_diagonal)
            if not in_fast:
                case.add_marker("ci" if on_diagonal else "slow")


def is_in_ci(path: pathlib.Path) -> bool:
    """Whether `make test` leaves a module, or a folder, below `tests` to CI."""
    return bool(CI & _where(path))


def _takes_minutes(case, path: pathlib.Path) -> bool:
    name = f"{path.as_posix()}::{case.name}"
    return any(name.startswith(prefix) for prefix in MINUTES)


def _where(path: pathlib.Path) -> set[str]:
    return {parent.as_posix() for parent in (path, *path.parents)}


def _positions(case, values) -> dict:
    """The position of what each `parametrize` mark, and each fixture with parameters,
    gives a case.

    Args:
        values: parameter names -> their values so far -> position; grows by those of
            `case`.
    """
    if not hasattr(case, "callspec"):
        return {}
    marks = [_names(mark.args[0]) for mark in case.iter_markers("parametrize")]
    # CI runs one diagonal of the other parameters for each kind of launchers
    known = [*marks, ("launchers",)]
    fixtures = [
        (name,)
        for name in case.callspec.params
        if not any(name in names for names in known)
    ]
    keys = {
        names: tuple(id(case.callspec.params[name]) for name in names)
        for names in marks + fixtures
    }
    return {
        names: values[names].setdefault(key, len(values[names]))
        for names, key in keys.items()
    }


def _names(argument) -> tuple:
    names = argument.split(",") if isinstance(argument, str) else argument
    return tuple(name.strip() for name in names)


def _is_diagonal(position, sizes) -> bool:
    """Whether a case lies on the diagonal of a product of parameters: so many cases
    that each value occurs.
    """
    steps = range(max(sizes.values(), default=1))
    return any(
        all(i == step % sizes[names] for names, i in position.items()) for step in steps
    )
