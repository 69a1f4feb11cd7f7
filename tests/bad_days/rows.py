"""All rows, by subject."""

from . import (
    below_zero as below_zero,
    checkpoints as checkpoints,
    ffi as ffi,
    layers as layers,
    meshes as meshes,
    numbers as numbers,
    optimizers as optimizers,
    proof as proof,
    shapes as shapes,
    state as state,
    trainers as trainers,
    values as values,
)
from .verdict import ROWS

SUBJECTS = {
    "values": "Values",
    "shapes": "Shapes and types",
    "state": "State",
    "trainers": "Trainers",
    "below_zero": "State that no step makes",
    "optimizers": "Optimizers and trainers from outside",
    "checkpoints": "Checkpoints",
    "meshes": "Meshes",
    "ffi": "FFI",
    "layers": "Layers from outside",
    "numbers": "Numbers from outside",
    "proof": "Proof of training",
}
IN_ORDER = sorted(ROWS, key=lambda row: list(SUBJECTS).index(row.subject))
BY_NAME = {row.name: row for row in IN_ORDER}
assert len(BY_NAME) == len(IN_ORDER), "two rows have one name"
