"""Meshes of CPU devices."""

import jax
from jax.sharding import AxisType


def mesh_of(kind="Auto", **axes):
    """A mesh with axes of these sizes, "Auto" or "Explicit"."""
    types = (AxisType[kind],) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types)
