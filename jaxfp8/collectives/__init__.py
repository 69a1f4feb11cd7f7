"""Collectives of `jax.lax` with FP8 codes on the wire, for use inside `shard_map`."""

from ._collectives import all_gather, all_to_all
from ._experts import dropped_rows as dropped_rows, experts_over as experts_over

__all__ = ["all_gather", "all_to_all"]
