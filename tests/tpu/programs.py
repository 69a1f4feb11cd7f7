"""Training programs compiled for TPUs, in bf16, with Flax's FP8 and with ours; prints
as JSON what `count` finds.

    python -m tpu.programs [--size 2048] [--topology tpu7x:2x2x1] CASE...

A candidate is how a layer is made: `bf16` (`nn.Dense`), `flax` (`nn.Dense` with
`nn.Fp8DirectDotGeneralOp`), `drop-in` (`nn.Dense` with `jaxfp8.Fp8DotGeneral`), `own`
(`jaxfp8.linen.Dense`), or an own layer by the name of its recipe.
"""

import argparse
import functools
import json
import time

import flax.linen as nn
import jax
import jax.numpy as jnp
from aot.programs import DENSES as FOUR, STATE, training_step
from jax.experimental import topologies
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8

from . import count

WHOLE = P()
RECIPES = {
    "current": jaxfp8.Float8CurrentScaling(),
    "static": jaxfp8.StaticScaling(),
    "row-wise": jaxfp8.Float8RowwiseScaling(),
}
DENSES = FOUR | {
    name: functools.partial(jaxfp8.linen.Dense, recipe=recipe)
    for name, recipe in RECIPES.items()
}


def dense(candidate, features):
    return DENSES[candidate](features, use_bias=False, dtype=jnp.bfloat16)


class GatedMLP(nn.Module):
    """Separate layers; the candidate `fused` is `jaxfp8.linen.GatedMLP`."""

    candidate: str
    hidden: int

    @nn.compact
    def __call__(self, x):
        if self.candidate == "fused":
            return jaxfp8.linen.GatedMLP(
                self.hidden, use_bias=False, dtype=jnp.bfloat16
            )(x)
        hidden = nn.silu(dense(self.candidate, self.hidden)(x)) * dense(
            self.candidate, self.hidden
        )(x)
        return dense(self.candidate, x.shape[-1])(hidden)


class Scan(nn.Module):
    """A scan over four pairs of Dense layers."""

    candidate: str
    features: int

    @nn.compact
    def __call__(self, x):
        def pair(layer, x, _):
            return layer(x), None

        options = {
            "variable_axes": {"params": 0, STATE: 0},
            "split_rngs": {"params": True},
            "length": 4,
        }
        layer = Pair(self.candidate, self.features, name="layer")
        return nn.scan(pair, **options)(layer, x, None)[0]


class Pair(nn.Module):
    """Two Dense layers with a gelu between them."""

    candidate: str
    features: int

    @nn.compact
    def __call__(self, x):
        return dense(self.candidate, self.features)(
            nn.gelu(dense(self.candidate, self.features)(x))
        )


class Experts(nn.Module):
    """A ragged product of rows with the kernels of eight experts; `bf16` is
    `jax.lax.ragged_dot`.
    """

    candidate: str
    features: int

    @nn.compact
    def __call__(self, x):
        kernel = self.param(
            "kernel",
            nn.initializers.zeros,
            (8, x.shape[-1], self.features),
            jnp.float32,
        )
        sizes = jnp.full((8,), x.shape[0] // 8, jnp.int32)
        if self.candidate == "bf16":
            return jax.lax.ragged_dot(x, kernel.astype(x.dtype), sizes)
        recipe = RECIPES[self.candidate]
        return jaxfp8.ragged_dot(
            x, kernel, sizes, recipe=recipe, preferred_element_type=x.dtype
        )


# case -> (model of a candidate and a size, candidates, tokens and width of a size,
# PartitionSpec of kernels or None)
CASES = {
    "dense": (dense, (*FOUR, *RECIPES), lambda n: (n, n), None),
    "gated mlp": (
        lambda c, n: GatedMLP(c, 7 * n // 4),
        (*FOUR, "current", "fused"),
        lambda n: (n, n // 2),
        None,
    ),
    "scan": (Scan, (*FOUR, "current"), lambda n: (n, n), None),
    "ragged": (
        lambda c, n: Experts(c, n // 4),
        ("bf16", "current", "static"),
        lambda n: (n, n // 4),
        None,
    ),
    "dp-8": (dense, FOUR, lambda n: (8 * n, n), P()),
    "fsdp-8": (dense, FOUR, lambda n: (8 * n, n), P("data")),
}


def report(case: str, candidate: str, size: int, topology: str) -> dict:
    """What is in the program: forward and backward of the model, all gradients and the
    next state.
    """
    make, _, shape, spec = CASES[case]
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=topology
    ).devices
    mesh = jax.sharding.Mesh(devices[: 1 if spec is None else 8], ("data",))
    model = make(candidate, size)
    is_shared = case == "scan" and candidate not in ("bf16", "flax")

    def placed(leaf, spec=WHOLE):
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    def forward(variables, x):
        return model.apply(jaxfp8.max_grad(variables) if is_shared else variables, x)

    x = placed(jax.ShapeDtypeStruct(shape(size), jnp.bfloat16), P("data"))
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    variables = jax.tree.map_with_path(
        lambda path, leaf: placed(
            leaf, spec if spec is not None and path[-1].key == "kernel" else P()
        ),
        variables,
    )
    where = (
        x.sharding,
        (jax.tree.map(lambda leaf: leaf.sharding, variables), x.sharding),
    )
    with jaxfp8.ops.implementation("tpu"):
        lowered = jax.jit(training_step(forward), out_shardings=where).lower(
            variables, x, x
        )
    start = time.perf_counter()
    text = lowered.compile().as_text()
    seconds = time.perf_counter() - start
    return count.count(text) | {"compile_seconds": round(seconds, 1)}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="+", choices=CASES)
    parser.add_argument("--size", type=int, default=2048)
    parser.add_argument("--topology", default="tpu7x:2x2x1")
    parser.add_argument("--candidates", nargs="+", help="(default: all of the case)")
    args = parser.parse_args()
    # starts the compiler, so that no case pays for it
    report("dense", "bf16", 256, args.topology)
    found = {}
    for case in args.cases:
        candidates = args.candidates or CASES[case][1]
        found[case] = {
            candidate: report(case, candidate, args.size, args.topology)
            for candidate in candidates
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
