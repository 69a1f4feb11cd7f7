"""Training programs compiled for H200s under `implementation("xla")`; prints as JSON
what is in them.

A step is forward and backward: all gradients and the next state.
"""

import functools
import json
import re
from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8
import jaxfp8.nnx
from jaxfp8 import ops

from . import count, hlo
from .programs import LIBRARY_GEMMS, QUICKLY, gpus, training_step

M, K, N, GROUPS = 1024, 512, 2048, 4
RECIPE = jaxfp8.DelayedScaling(amax_history_len=16)
DROP_IN = functools.partial(jaxfp8.Fp8DotGeneral, recipe=RECIPE)
BF16 = jnp.bfloat16
ROWS_BY_COLUMNS = (((1,), (0,)), ((), ()))


def zeros(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def of_module(model, m=M):
    """`(function, variables, x)`."""
    x = zeros(m, K)
    return model.apply, jax.eval_shape(model.init, jax.random.key(0), x), x


def of_nnx():
    layer = nnx.Linear(
        K, N, dtype=BF16, dot_general=jaxfp8.nnx.Fp8DotGeneral(RECIPE), rngs=nnx.Rngs(0)
    )
    layer(jnp.zeros((M, K), BF16))
    graph, state = nnx.split(layer)
    shapes = jax.tree.map(lambda leaf: zeros(*leaf.shape, dtype=leaf.dtype), state)
    return lambda state, x: nnx.merge(graph, state)(x), shapes, zeros(M, K)


def of_product(product, x, kernel):
    def function(variables, x):
        kernel, state = variables
        return product(x, kernel, recipe=RECIPE, state=state)

    return function, (kernel, jaxfp8.init_state(RECIPE)), x


def members(x, kernel, recipe, state):
    """Every kernel has a state of its own."""
    states = jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (GROUPS, *leaf.shape)), state
    )
    return jax.vmap(
        lambda x, kernel, state: plain(x, kernel, recipe=recipe, state=state)
    )(x, kernel, states)


plain = functools.partial(jaxfp8.dot_general, dimension_numbers=ROWS_BY_COLUMNS)
CASES = {
    "nn.Dense": lambda: of_module(
        nn.Dense(N, use_bias=False, dtype=BF16, dot_general_cls=DROP_IN)
    ),
    "Dense": lambda: of_module(
        jaxfp8.linen.Dense(N, recipe=RECIPE, use_bias=False, dtype=BF16)
    ),
    "Dense with bias": lambda: of_module(
        jaxfp8.linen.Dense(N, recipe=RECIPE, dtype=BF16)
    ),
    "Dense, odd sizes": lambda: of_module(
        jaxfp8.linen.Dense(N, recipe=RECIPE, use_bias=False, dtype=BF16), M - 7
    ),
    "nnx.Linear": of_nnx,
    "dot_general in f32": lambda: of_product(
        plain, zeros(M, K, dtype=jnp.float32), zeros(K, N, dtype=jnp.float32)
    ),
    "einsum": lambda: of_product(
        functools.partial(jaxfp8.einsum, "gmk,gkn->gmn"),
        zeros(GROUPS, M, K),
        zeros(GROUPS, K, N),
    ),
    "members": lambda: of_product(members, zeros(GROUPS, M, K), zeros(GROUPS, K, N)),
}
# Of eight devices: rows of x and of the kernel are cut.
SHARDED = {"FSDP nn.Dense": "nn.Dense", "FSDP Dense with bias": "Dense with bias"}
# Beside them, for its rounded scales.
FLAX = {
    "flax": lambda: of_module(
        nn.Dense(
            N, use_bias=False, dtype=BF16, dot_general_cls=nn.Fp8DirectDotGeneralOp
        )
    )
}


def compiled(function, variables, x, devices=1) -> str:
    mesh = gpus("h200", (devices, 1))

    def placed(leaf):
        spec = P("fsdp") if devices > 1 and leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    variables, x = jax.tree.map(placed, (variables, x))
    grad = placed(jax.eval_shape(function, variables, x))
    where = jax.tree.map(lambda leaf: leaf.sharding, (grad, (variables, x)))
    step = jax.jit(training_step(function), out_shardings=where)
    options = LIBRARY_GEMMS | QUICKLY
    return step.lower(variables, x, grad).compile(options).as_text()


def report(text) -> dict:
    """What `count` finds; and of every FP8 product of XLA's the result's dtype, the
    epilogue and the precision.
    """
    module = hlo.parse(text)
    products = []
    for launch in count.launches(module):
        instruction = launch.instruction
        if instruction.attribute("custom_call_target") == "__cublas$lt$matmul$f8":
            products.append(
                {
                    "out": instruction.arrays[0].dtype,
                    "epilogue": re.search(r'"epilogue":"(\w+)"', instruction.rest)[1],
                    "precision": re.search(
                        r'"operand_precision":\["(\w+)"', instruction.rest
                    )[1],
                    "rounded_scales": [
                        _is_rounded(module, launch.computation, s)
                        for s in instruction.operands[2:4]
                    ],
                }
            )
    targets = Counter(re.findall(r'custom_call_target="([^"]*)"', text))
    return count.summary(text) | {"targets": targets, "products": products}


def _is_rounded(module, computation, name) -> bool:
    """Whether a scale was a number of 16 bits on its way to the product."""
    instruction = computation.instructions[name]
    while instruction.opcode in ("bitcast", "get-tuple-element", "copy"):
        instruction = computation.instructions[instruction.operands[0]]
    body = (
        module.computations[instruction.attribute("calls")]
        if instruction.opcode == "fusion"
        else computation
    )
    inside = (
        body.instructions.values() if instruction.opcode == "fusion" else [instruction]
    )
    return any(
        a.elements == 1 and a.dtype in ("bf16", "f16") for i in inside for a in i.arrays
    )


def main():
    found = {}
    for name, case in (CASES | FLAX).items():
        with ops.implementation("xla"):
            found[name] = report(compiled(*case()))
    for name, case in SHARDED.items():
        with ops.implementation("xla"):
            found[name] = report(compiled(*CASES[case](), devices=8))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
