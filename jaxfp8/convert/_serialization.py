"""Register jaxfp8's dataclasses with Flax's msgpack checkpoints, which store them as dicts."""

import dataclasses

from flax import serialization

from ..mixed_precision import DynamicLossScale
from ..recipes import DotGeneralState, QuantizerState

_COUNTERS = "counters"


def _to_state_dict(state) -> dict:
    return {name: serialization.to_state_dict(getattr(state, name)) for name in _names(state)}


def _names(state) -> list[str]:
    """Return the names of the fields, `counters` only where the state has them: older checkpoints lack that field."""
    names = [field.name for field in dataclasses.fields(state) if not field.metadata.get("static")]
    return [name for name in names if name != _COUNTERS or getattr(state, name) is not None]


def _from_state_dict(target, saved: dict):
    names = _names(target)
    if isinstance(target, QuantizerState):  # the running program decides whether there are counters
        saved = {name: value for name, value in saved.items() if name != _COUNTERS or name in names}
        names = [name for name in names if name != _COUNTERS or name in saved]
    if set(saved) != set(names):
        raise ValueError(
            f"flax.serialization: {type(target).__name__}: expected the fields {names}, got {sorted(saved)}; this "
            "checkpoint holds something else"
        )
    values = {name: serialization.from_state_dict(getattr(target, name), saved[name], name=name) for name in names}
    return dataclasses.replace(target, **values)


for _cls in (DotGeneralState, QuantizerState, DynamicLossScale):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict, override=True)
