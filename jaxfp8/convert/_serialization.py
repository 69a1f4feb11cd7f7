"""Flax's msgpack checkpoints know the state of plain products, as they know dicts."""

import dataclasses

from flax import serialization

from ..recipes import DotGeneralState, QuantizerState


def _to_state_dict(state) -> dict:
    return {field.name: serialization.to_state_dict(getattr(state, field.name)) for field in dataclasses.fields(state)}


def _from_state_dict(target, saved: dict):
    names = [field.name for field in dataclasses.fields(target)]
    if set(saved) != set(names):
        raise ValueError(
            f"flax.serialization: {type(target).__name__}: expected the fields {names}, got {sorted(saved)}; this "
            "checkpoint holds something else"
        )
    return type(target)(
        **{name: serialization.from_state_dict(getattr(target, name), saved[name], name=name) for name in names}
    )


for _cls in (DotGeneralState, QuantizerState):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict, override=True)
