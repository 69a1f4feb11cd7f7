"""Delayed scaling in Flax's own layers and TrainState."""

import dataclasses
import functools
import inspect

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from draws import KEY
from equality import assert_same_bits

import jaxfp8
from jaxfp8.linen import Fp8Einsum


def test_variables_are_those_of_flax():
    """Names, shapes, dtypes, first values and collection of nn.Fp8DotGeneral:
    checkpoints and trainers interchange.
    """
    classes, x = (jaxfp8.Fp8DotGeneral, nn.Fp8DotGeneral), np.ones((2, 3), np.float32)
    ours, theirs = (nn.Dense(4, dot_general_cls=cls).init(KEY, x) for cls in classes)
    assert (
        set(ours) == {"params", "_overwrite_with_gradient"}
        and jaxfp8.OVERWRITE_WITH_GRADIENT in ours
    )
    (theirs_of_product,) = theirs[jaxfp8.OVERWRITE_WITH_GRADIENT].values()
    assert_same_bits(
        ours,
        theirs
        | {jaxfp8.OVERWRITE_WITH_GRADIENT: {"Fp8DotGeneral_0": theirs_of_product}},
    )


def test_fp8_einsum_is_that_of_flax():
    """A plain swap: variables, arguments and fields; its products are in
    `programs/`.
    """
    classes = (Fp8Einsum, nn.Fp8Einsum)
    operands = (np.ones((3, 5, 6), np.float32), np.ones((2, 3, 4, 5), np.float32))
    assert_same_bits(*(cls().init(KEY, "emh,gecm->gech", *operands) for cls in classes))
    ours, theirs = (list(inspect.signature(cls.__call__).parameters) for cls in classes)
    assert ours == [*theirs, "out_sharding"]
    ours, theirs = (
        {field.name for field in dataclasses.fields(cls)} for cls in classes
    )
    assert ours - theirs == {"recipe"} and theirs <= ours


def test_flax_fields():
    """A plain swap for nn.Fp8DotGeneral: its fields set history length and formats."""
    x = np.ones((2, 3), np.float32)
    make = functools.partial(
        jaxfp8.Fp8DotGeneral,
        amax_history_length=7,
        e4m3_dtype=jnp.float8_e5m2,
        e5m2_dtype=jnp.float8_e5m2,
    )
    layer = nn.Dense(4, dot_general_cls=make, use_bias=False)
    variables = layer.init(KEY, x)
    state = variables[jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
    assert state["input_amax_history"].shape == (7,)
    # 300 is no e5m2 number. Without a backward the empty histories would give way to
    # the amaxes of x and the kernel.
    y, _ = jax.vjp(lambda variables: layer.apply(variables, 300 * x), variables)
    x_codes, _ = oracle.quantize(300 * x, 1, oracle.E5M2)
    kernel_codes, _ = oracle.quantize(
        np.asarray(variables["params"]["kernel"]), 1, oracle.E5M2
    )
    oracle.scaled_matmul(x_codes, kernel_codes.T, 1, 1).check(y)
