"""Register jaxfp8's dataclasses with Flax's msgpack checkpoints, which store them as dicts."""

import dataclasses

from flax import serialization

from ..mixed_precision import DynamicLossScale
from ..recipes import DotGeneralState, QuantizerState

_COUNTERS = "counters"


def _names(state) -> list[str]:
    return [field.name for field in dataclasses.fields(state) if not field.metadata.get("static")]


def _to_state_dict(state) -> dict:
    # Older checkpoints lack the counters, and so does state without them.
    values = {name: getattr(state, name) for name in _names(state)}
    return {k: serialization.to_state_dict(v) for k, v in values.items() if k != _COUNTERS or v is not None}


def _from_state_dict(target, saved: dict):
    # The running program decides whether there are counters, and keeps its own where the checkpoint has none.
    has_counters = _COUNTERS in saved and getattr(target, _COUNTERS, None) is not None
    ignored = set() if has_counters else {_COUNTERS}
    names = [name for name in _names(target) if name not in ignored]
    if set(saved) - ignored != set(names):
        raise ValueError(
            f"flax.serialization: {type(target).__name__}: expected the fields {names}, got {sorted(saved)}; this "
            "checkpoint holds something else"
        )
    values = {name: serialization.from_state_dict(getattr(target, name), saved[name], name=name) for name in names}
    return dataclasses.replace(target, **values)


for _cls in (DotGeneralState, QuantizerState, DynamicLossScale):
    serialization.register_serialization_state(_cls, _to_state_dict, _from_state_dict, override=True)
