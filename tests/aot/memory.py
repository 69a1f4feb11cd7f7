"""What a training step holds on an H200 at its peak, by kind; prints as JSON what
`held` finds for each program.

    python -m aot.memory [--quickly] [MODEL...]

Two models, forward and backward, all gradients and the next state: `llama`, a scan over
8 blocks of Llama's sizes (norms, the projections of attention without attention itself,
and the gated MLP), which computes norms again in the backward and nothing else; and
`experts`, a gated MLP of 16 experts over sorted rows. XLA's own buffer assignment says
what is alive when.
"""

import argparse
import functools
import json
import math
import pathlib
import re
import tempfile
from collections import Counter, defaultdict

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

import jaxfp8

from .programs import (
    DENSES,
    HIDDEN,
    LAYERS,
    LIBRARY_GEMMS,
    QUICKLY,
    STATE,
    TOKENS,
    WIDTH,
    gpus,
    on_one,
    training_step,
)

EXPERTS, EXPERT_HIDDEN = 16, 2048
DELAYED = jaxfp8.DelayedScaling(amax_history_len=16)
KEPT = jaxfp8.DelayedScaling(amax_history_len=16, fp8_residuals=True)
BY_PRODUCT = jaxfp8.ByProduct(DELAYED, DELAYED)
RECIPES = {"fused": DELAYED, "fused, FP8 kept": KEPT, "own, wgrad in bf16": BY_PRODUCT}


class Block(nn.Module):
    """A block of Llama without attention itself: its projections, and the gated MLP."""

    candidate: str

    @nn.compact
    def __call__(self, x, _):
        if self.candidate in DENSES:
            dense = functools.partial(
                DENSES[self.candidate], use_bias=False, dtype=jnp.bfloat16
            )
        else:
            recipe = RECIPES[self.candidate]
            dense = functools.partial(
                jaxfp8.linen.Dense, recipe=recipe, use_bias=False, dtype=jnp.bfloat16
            )
        norm = functools.partial(nn.remat(nn.RMSNorm), dtype=jnp.bfloat16)
        h = norm(name="norm_attention")(x)
        q = dense(WIDTH, name="q")(h)
        k = dense(WIDTH // 4, name="k")(h)
        v = dense(WIDTH // 4, name="v")(h)
        x = x + dense(WIDTH, name="o")(q + jnp.concatenate([k, v, v, k], axis=-1))
        h = norm(name="norm_mlp")(x)
        if self.candidate.startswith("fused"):
            mlp = jaxfp8.linen.GatedMLP(
                HIDDEN, recipe=recipe, use_bias=False, dtype=jnp.bfloat16, name="mlp"
            )
            return x + mlp(h), None
        hidden = nn.silu(dense(HIDDEN, name="gate")(h)) * dense(HIDDEN, name="up")(h)
        return x + dense(WIDTH, name="down")(hidden), None


class Llama(nn.Module):
    candidate: str

    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, STATE: 0}
        scanned = nn.scan(
            Block, variable_axes=axes, split_rngs={"params": True}, length=LAYERS
        )
        return scanned(self.candidate, name="layers")(x, None)[0]


class Experts(nn.Module):
    """A gated MLP of experts; rows are sorted by expert."""

    candidate: str

    @nn.compact
    def __call__(self, x):
        sizes = jnp.full((EXPERTS,), TOKENS // EXPERTS, jnp.int32)

        def product(name, x, shape):
            kernel = self.param(
                name, nn.initializers.normal(), (EXPERTS, *shape), jnp.float32
            )
            if self.candidate == "bf16":
                kernel = kernel.astype(jnp.bfloat16)
                return jax.lax.ragged_dot(
                    x, kernel, sizes, preferred_element_type=jnp.bfloat16
                )
            state = self.variable(
                STATE, name, jaxfp8.init_state, RECIPES[self.candidate]
            ).value
            options = {
                "recipe": RECIPES[self.candidate],
                "state": state,
                "preferred_element_type": jnp.bfloat16,
            }
            return jaxfp8.ragged_dot(x, kernel, sizes, **options)

        both = product("wi", x, (WIDTH, 2 * EXPERT_HIDDEN)).reshape(
            -1, 2, EXPERT_HIDDEN
        )
        if self.candidate == "bf16":
            h = nn.silu(both[:, 0]) * both[:, 1]
        else:
            h = jaxfp8.activated(both, "silu_gated")
        return product("wo", h, (EXPERT_HIDDEN, WIDTH))


MODELS = {
    "llama": (
        Llama,
        ("bf16", "flax", "own", "own, wgrad in bf16", "fused", "fused, FP8 kept"),
    ),
    "experts": (Experts, ("bf16", "fused", "fused, FP8 kept")),
}


def compiled(model, quickly, folder):
    """The program of forward and backward, whose buffer assignment XLA writes to
    `folder`.
    """
    where = NamedSharding(gpus("h200", (1, 1)), P())
    x = on_one(jax.ShapeDtypeStruct((TOKENS, WIDTH), jnp.bfloat16))
    variables = on_one(jax.eval_shape(model.init, jax.random.key(0), x))

    def forward(variables, x):
        is_flax = model.candidate == "flax"  # its state has a dtype of its own
        return model.apply(variables if is_flax else jaxfp8.max_grad(variables), x)

    step = training_step(forward)
    options = (
        LIBRARY_GEMMS
        | {"xla_dump_to": folder, "xla_dump_hlo_as_text": True}
        | (QUICKLY if quickly else {})
    )
    program = jax.jit(step, out_shardings=where).lower(variables, x, x).compile(options)
    state = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(variables.get(STATE, {}))
    )
    return program, state


def kind(shape: str) -> str:
    """The kind of an array, given as XLA prints its shape; an array with the tokens
    last is transposed.
    """
    dtype, dimensions = re.match(r"(\w+)\[([\d,]*)\]", shape).groups()
    sizes = [int(size) for size in dimensions.split(",") if size]
    if not dtype.startswith("f8"):
        return dtype if dtype in ("bf16", "f32") else "other"
    if (
        TOKENS not in sizes
        and math.prod(sizes) % TOKENS == 0
        and sizes[-1] != TOKENS // EXPERTS
    ):
        return "codes of kernels"
    return "transposed codes" if sizes[-1] == TOKENS else "codes"


def held(assignment: str, live_range: str, program: str) -> dict[str, int]:
    """The bytes of temporaries that are alive at their peak, by kind, from two dumps of
    XLA and the program's text.
    """
    ranges = {
        name: (int(a), int(b))
        for name, a, b in re.findall(
            r"^    (\S+\{[\d,]*\}):(\d+)-(\d+)", live_range, re.M
        )
    }
    # What a loop returns is the buffer that its last iteration wrote, and has a range
    # of its own from there on.
    ends = defaultdict(list)
    for name, results in re.findall(r"%(while[\w.]*) = \((.*?)\) while\(", program):
        for i, shape in enumerate(re.findall(r"\w+\[[\d,]*\]", results)):
            begin, end = ranges.get(f"{name}{{{i}}}", (0, 0))
            ends[begin, shape].append(end)
    temporaries = []
    for allocation in re.split(r"^allocation ", assignment, flags=re.M):
        if "preallocated-temp" in allocation.partition("\n")[0]:
            values = re.findall(
                r"value: <\d+ (\S+?)(\{[\d,]*\})? @\d+> \(size=(\d+),offset=\d+\): "
                r"(\w+\[[\d,]*\])",
                allocation,
            )
            temporaries += [
                (ranges[name + (index or "{}")], int(size), shape)
                for name, index, size, shape in values
            ]
    alive = []
    for (begin, end), size, shape in temporaries:
        later = ends[end, shape]
        alive.append((begin, later.pop() if later else end, size, shape))
    sums = {
        t: sum(size for begin, end, size, _ in alive if begin <= t <= end)
        for t in {row[0] for row in alive}
    }
    peak = max(sums, key=sums.get)
    kinds = Counter()
    for begin, end, size, shape in alive:
        if begin <= peak <= end:
            kinds[kind(shape)] += size
    return dict(kinds)


def report(name: str, candidate: str, quickly=False) -> dict:
    with tempfile.TemporaryDirectory() as folder:
        program, state = compiled(MODELS[name][0](candidate), quickly, folder)
        texts = {}
        for part in ("buffer-assignment", "live-range"):
            (path,) = pathlib.Path(folder).glob(f"*jit_step*{part}.txt")
            texts[part] = path.read_text()
    return {
        "temporary_bytes": program.memory_analysis().temp_size_in_bytes,
        "state_bytes": state,
        "held": held(
            texts["buffer-assignment"], texts["live-range"], program.as_text()
        ),
    }


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--quickly", action="store_true")
    args = parser.parse_args()
    print(
        json.dumps(
            {
                m: {c: report(m, c, args.quickly) for c in MODELS[m][1]}
                for m in args.models
            }
        )
    )


if __name__ == "__main__":
    main()
