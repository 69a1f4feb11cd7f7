"""implementation("xla"): values, the state, and the products in its programs.

What XLA makes of the programs on an H200 is in `aot/test_xla.py`.
"""

import itertools
import re

import jax
import lowering
import numpy as np
import oracle
from recipes.delayed_cases import DTYPES, compare_run, scripted_run, training_step

import jaxfp8
from jaxfp8 import ops
from ops import cases

RECIPE = jaxfp8.DelayedScaling(amax_history_len=4)


@DTYPES
def test_steps(dtype):
    """Ordinary numbers, a NaN, an Inf, and a spike."""
    with ops.implementation("xla"):
        compare_run(RECIPE, itertools.islice(scripted_run(dtype), 5))


def test_without_an_fp8_product():
    """cuBLASLt does not multiply E5M2 by E5M2: the codes, which f32 and TF32 hold, are
    multiplied, then scaled.
    """
    recipe = jaxfp8.DelayedScaling(amax_history_len=4, fp8_format=jaxfp8.Format.E5M2)
    arguments = *next(scripted_run(oracle.BF16)), jaxfp8.init_state(recipe)
    with ops.implementation("xla"):
        text = lowering.cuda_text(training_step(recipe), *arguments)
    types = re.findall(r"stablehlo.dot_general .* : (.*)", text)
    assert len(types) == 3 and "bf16" not in " ".join(types)


def test_values():
    """Of two e5m2 operands, and of others with a bias."""
    scale, bias = np.float32(1e-6), np.arange(7, dtype=oracle.BF16)
    for fmt, term in ((oracle.E5M2, None), (oracle.E4M3, bias)):
        a = cases.random_codes((6, 33), fmt, 1)
        b = cases.random_codes((7, 33), oracle.E5M2, 2)
        with ops.implementation("xla"):
            got = jax.jit(ops.scaled_matmul)(a, b, scale, scale, bias=term)
        options = {"bias": term, "out_dtype": oracle.BF16}
        oracle.scaled_matmul(a, b, scale, scale, **options).check(got)
