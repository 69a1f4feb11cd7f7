"""Delayed scaling in Flax's own layers and TrainState."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from programs.known_amax import OPERANDS

import jaxfp8


def test_variables_are_those_of_flax():
    """Names, shapes, dtypes, first values and collection of nn.Fp8DotGeneral: checkpoints and trainers interchange."""
    x = np.ones((2, 3), np.float32)

    def state_of(cls):
        return nn.Dense(4, dot_general_cls=cls).init(jax.random.key(0), x)

    ours, theirs = state_of(jaxfp8.Fp8DotGeneral), state_of(nn.Fp8DotGeneral)
    assert set(ours) == set(theirs) == {"params", "_overwrite_with_gradient"}
    assert jaxfp8.OVERWRITE_WITH_GRADIENT == "_overwrite_with_gradient"
    ((our_module, ours),) = ours[jaxfp8.OVERWRITE_WITH_GRADIENT].items()
    ((_, theirs),) = theirs[jaxfp8.OVERWRITE_WITH_GRADIENT].items()
    assert our_module == "Fp8DotGeneral_0"
    assert set(ours) == {f"{name}_{leaf}" for name in OPERANDS for leaf in ("amax_history", "scale")}
    assert set(ours) == set(theirs)
    for name, leaf in ours.items():
        oracle.assert_bitwise(leaf, theirs[name], name)


def test_flax_fields():
    """A plain swap for nn.Fp8DotGeneral: its fields set history length and formats."""
    x = np.ones((2, 3), np.float32)

    def make(**kwargs):
        return jaxfp8.Fp8DotGeneral(
            amax_history_length=7, e4m3_dtype=jnp.float8_e5m2, e5m2_dtype=jnp.float8_e5m2, **kwargs
        )

    layer = nn.Dense(4, dot_general_cls=make, use_bias=False)
    variables = layer.init(jax.random.key(0), x)
    state = variables[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
    assert state["input_amax_history"].shape == (7,)
    y = layer.apply(variables, 300 * x)  # 300 is no e5m2 number
    x_codes, _ = oracle.quantize(300 * x, 1, oracle.E5M2)
    kernel_codes, _ = oracle.quantize(np.asarray(variables["params"]["kernel"]), 1, oracle.E5M2)
    oracle.scaled_matmul(x_codes, kernel_codes.T, 1, 1).check(y)
