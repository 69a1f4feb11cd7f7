"""Register jaxfp8's dataclasses with Flax's msgpack checkpoints, which store them as dicts."""

import dataclasses

from flax import serialization

from ..mixed_precision import DynamicLossScale
from ..recipes import DotGeneralState, QuantizerState

_COUNTERS = "counters"  # of releases until 0.2


def _names(state) -> list[str]:
    return [field.name for field in dataclasses.fields(state) if not field.metadata.get("static")]


def _to_state_dict(state) -> dict:
    return {name: serialization.to_state_dict(getattr(state, name)) for name in _names(state)}


def _from_state_dict(target, saved: dict):
    names = _names(target)
    if set(saved) - {_COUNTERS} != set(names):
        raise ValueError(
            f"flax.serialization: {type(target).__name__}: expected the fields {names}, got {sorted(saved)}; this "
            "checkpoint holds something else"
        )
    values = {name: serialization.from_state_dict(getattr(target, name), saved[name], name=name) for name in names}
    return dataclasses.replace(target, **values)


for _cls in (DotGeneralState, QuantizerState, DynamicLossScale):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict, override=True)
