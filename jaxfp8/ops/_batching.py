"""The batching rule of ops that compute several independent units, and the order of their operands."""

import functools
from collections.abc import Callable, Sequence

import jax


def apart(units: Callable) -> Callable:
    """Make a batching rule: one call for the batched units of an op and one for the rest, whose state stays one state.

    Args:
        units: `(operand_count, **static) -> [(operands, results)]`: the positions of the operands and results of each
            unit, in order. A static argument that is a tuple has a value for each unit.

    Returns:
        A `batch_first` of an `Op`.
    """

    def rule(run, operands, batch_dims, vmap_dims, **static):
        # 1. Find the units that are batched.
        parts = units(len(operands), **static)
        is_batched = [any(batch_dims[i] is not None for i in positions) for positions, _ in parts]
        if all(is_batched):
            return None  # the rule of all ops applies
        # 2. Make one call for the units that are not batched, and one under `vmap` for those that are.
        results = {}
        for batched in (False, True):
            chosen = [i for i, is_one in enumerate(is_batched) if is_one == batched]
            # Operands and results are ordered as in the whole call.
            ins, outs = (sorted(position for i in chosen for position in parts[i][side]) for side in (0, 1))
            chosen_static = {k: tuple(v[i] for i in chosen) if isinstance(v, tuple) else v for k, v in static.items()}
            call = functools.partial(run, vmap_dims=vmap_dims, **chosen_static)
            if batched:
                call = jax.vmap(call, in_axes=tuple(batch_dims[i] for i in ins))
            for position, output in zip(outs, call(*(operands[i] for i in ins)), strict=True):
                results[position] = output, 0 if batched else None
        # 3. Put the results, and their batch dimensions, in the order of the whole call.
        return tuple(zip(*(results[i] for i in range(len(results))), strict=True))

    return rule


def halves(arrays: Sequence) -> tuple[Sequence, Sequence]:
    """Return the first half of the arrays, such as the histories of all units, and the second, such as their scales."""
    count = len(arrays) // 2
    return arrays[:count], arrays[count:]
