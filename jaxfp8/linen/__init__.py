"""Flax Linen: adapters that hold quantizer state in the `_overwrite_with_gradient` collection, and nothing else."""

from ._dot_general import OVERWRITE_WITH_GRADIENT as OVERWRITE_WITH_GRADIENT, Fp8DotGeneral as Fp8DotGeneral
