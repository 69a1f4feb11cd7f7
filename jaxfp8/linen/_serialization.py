"""The rules by which `flax.serialization` (msgpack checkpoints) reads our pytrees that are no Flax classes."""

import dataclasses

from flax import serialization

from ..mixed_precision import DynamicLossScale


def _to_state_dict(scale):
    return {"value": scale.value, "good_steps": scale.good_steps}


def _from_state_dict(scale, state):
    return dataclasses.replace(scale, **{name: state[name] for name in ("value", "good_steps")})


serialization.register_serialization_state(DynamicLossScale, _to_state_dict, _from_state_dict)
