"""Counts what the devices of a mesh send each other in a training step: the collectives
of the compiled program.

    python benchmarks/meshes.py [--kinds fsdp tp] [--json FILE]

Four transformer blocks (2048 tokens, width 256) on eight CPU devices, forward, backward
and update, on meshes of each kind: in bf16, with Flax's `nn.Fp8DirectDotGeneralOp` and
with jaxfp8. Programs are compiled and read, not run.

Bytes are those of a collective's results on one device, for a reduce-scatter those of
its operands. Dtypes are those of the compiled program. XLA's CPU compiler widens before
a collective, bf16 to f32 and FP8 to f16, and has no reduce-scatter: of widened arrays a
GPU moves half the bytes.
"""

import collections
import dataclasses
import functools
import math
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from _environment import result_parser, shown_environment, write
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import jaxfp8

BATCH, LENGTH, WIDTH, HEADS, LAYERS = 8, 256, 256, 8, 4
KINDS = (
    "all-gather",
    "all-reduce",
    "reduce-scatter",
    "all-to-all",
    "collective-permute",
)
CANDIDATES = {
    "bf16": None,
    "flax": nn.Fp8DirectDotGeneralOp,
    "jaxfp8": jaxfp8.Fp8DotGeneral,
}


@dataclasses.dataclass(frozen=True)
class Layout:
    """How arrays are cut: tokens x `[b, s, d]` and hidden values `[b, s, f]`, kernels
    `[d, f]` up and `[f, d]` down.
    """

    mesh: tuple
    x: P
    hidden: P
    up: P
    down: P


LAYOUTS = {
    "dp": Layout((8, 1), x=P("data"), hidden=P("data"), up=P(), down=P()),
    "fsdp": Layout(
        (8, 1), x=P("data"), hidden=P("data"), up=P("data"), down=P(None, "data")
    ),
    "tp": Layout(
        (1, 8), x=P(), hidden=P(None, None, "tp"), up=P(None, "tp"), down=P("tp")
    ),
    "sp": Layout(
        (1, 8),
        x=P(None, "tp"),
        hidden=P(None, None, "tp"),
        up=P(None, "tp"),
        down=P("tp"),
    ),
    "fsdp+tp": Layout(
        (4, 2),
        x=P("data"),
        hidden=P("data", None, "tp"),
        up=P("data", "tp"),
        down=P("tp", "data"),
    ),
}


class Block(nn.Module):
    """Attention and MLP, placed as the layout says."""

    dot_general_cls: type | None
    layout: Layout

    @nn.compact
    def __call__(self, x):
        dense = functools.partial(
            nn.Dense,
            use_bias=False,
            dtype=jnp.bfloat16,
            dot_general_cls=self.dot_general_cls,
        )
        norm = functools.partial(nn.RMSNorm, dtype=jnp.bfloat16)
        place = jax.lax.with_sharding_constraint
        batch, length, width = x.shape

        qkv = place(dense(3 * width, name="qkv")(norm()(x)), self.layout.hidden)
        query, key, value = jnp.unstack(
            qkv.reshape(batch, length, HEADS, 3, width // HEADS), axis=3
        )
        attended = jax.nn.dot_product_attention(
            query, key, value, is_causal=True
        ).reshape(x.shape)
        x = place(
            x + dense(width, name="out")(place(attended, self.layout.hidden)),
            self.layout.x,
        )
        hidden = nn.gelu(
            place(dense(4 * width, name="up")(norm()(x)), self.layout.hidden)
        )
        return place(x + dense(width, name="down")(hidden), self.layout.x)


class Blocks(nn.Module):
    dot_general_cls: type | None
    layout: Layout

    @nn.compact
    def __call__(self, x):
        for i in range(LAYERS):
            x = Block(self.dot_general_cls, self.layout, name=f"block{i}")(x)
        return x


def compiled_step(dot_general_cls, layout) -> str:
    """Return the compiled program of a training step, which every device runs."""
    mesh = jax.make_mesh(layout.mesh, ("data", "tp"), axis_types=(AxisType.Auto,) * 2)
    model = Blocks(dot_general_cls, layout)
    tokens = jax.ShapeDtypeStruct(
        (BATCH, LENGTH, WIDTH), jnp.bfloat16, sharding=NamedSharding(mesh, layout.x)
    )

    def init(x):
        return TrainState.create(
            apply_fn=model.apply,
            params=model.init(jax.random.key(0), x),
            tx=optax.sgd(0.1),
        )

    def step(train, x):
        def loss(variables):
            return jnp.mean(
                jnp.square(train.apply_fn(variables, x).astype(jnp.float32))
            )

        value, grads = jax.value_and_grad(loss)(train.params)
        return train.apply_gradients(grads=grads), value

    def placed(path, leaf):
        names = [key.key for key in path if hasattr(key, "key")]
        specs = {
            "qkv": layout.up,
            "up": layout.up,
            "out": layout.down,
            "down": layout.down,
        }
        spec = specs.get(names[-2], P()) if leaf.ndim == 2 else P()
        return jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec)
        )

    with jax.set_mesh(mesh):
        train = jax.eval_shape(init, tokens).replace(
            step=jax.ShapeDtypeStruct((), jnp.int32)
        )
        train = jax.tree.map_with_path(placed, train)
        shardings = jax.tree.map(lambda x: x.sharding, train), NamedSharding(mesh, P())
        return (
            jax.jit(step, out_shardings=shardings, donate_argnums=0)
            .lower(train, tokens)
            .compile()
            .as_text()
        )


def collectives(program) -> list:
    """List `(kind, dtype, bytes)` for each collective and dtype of a program; an
    all-reduce by maximum is "amax".
    """
    program = re.sub(r"/\*.*?\*/", "", program)
    maxima = set(
        re.findall(
            r"^%?([\w.\-]+) \([^\n]*\{\n(?:  [^\n]*\n)*?  ROOT \S+ = \S+ maximum\(",
            program,
            re.MULTILINE,
        )
    )
    found = []
    for types, kind, rest in re.findall(
        rf" = (\S+|\([^\n]*?\)) ({'|'.join(KINDS)})\((.*)", program
    ):
        applied = re.search(r"to_apply=%?([\w.\-]+)", rest)
        kind = "amax" if applied and applied[1] in maxima else kind
        sizes = collections.Counter()
        for dtype, bits, shape in re.findall(r"([a-z]+(\d+)\w*)\[([\d,]*)\]", types):
            sizes[dtype] += (
                int(bits) // 8 * math.prod(int(n) for n in shape.split(",") if n)
            )
        if kind == "reduce-scatter":
            group = re.search(r"replica_groups=(?:\{\{([\d,]+)\}|\[\d+,(\d+)\])", rest)
            sizes = {
                dtype: size * (len(group[1].split(",")) if group[1] else int(group[2]))
                for dtype, size in sizes.items()
            }
        found += [(kind, dtype, size) for dtype, size in sizes.items()]
    return found


def summarize(found) -> dict:
    """Sum collectives up as `{kind: {dtype: {"count": ..., "bytes": ...}}}`."""
    summary = {}
    for kind, dtype, size in found:
        row = summary.setdefault(kind, {}).setdefault(dtype, {"count": 0, "bytes": 0})
        row["count"] += 1
        row["bytes"] += size
    return summary


def cell(by_dtype) -> str:
    """Return a text such as `"16 u8, 3.00 MiB"` for each dtype."""
    return "; ".join(
        f"{row['count']} {dtype}, {row['bytes'] / 2**20:.2f} MiB"
        for dtype, row in by_dtype.items()
    )


def main():
    parser = result_parser(__doc__)
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=LAYOUTS,
        default=list(LAYOUTS),
        help="(default: all)",
    )
    args = parser.parse_args()
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 8)
    described = shown_environment()
    print(
        "\n| mesh | layers | all-gather | all-reduce | amax all-reduce | other "
        "|\n|---|---|---|---|---|---|"
    )
    rows = []
    for kind in args.kinds:
        for name, dot_general_cls in CANDIDATES.items():
            summary = summarize(
                collectives(compiled_step(dot_general_cls, LAYOUTS[kind]))
            )
            amaxes = sum(row["count"] for row in summary.get("amax", {}).values())
            other = "; ".join(
                f"{k}: {cell(summary[k])}"
                for k in summary
                if k not in ("all-gather", "all-reduce", "amax")
            )
            gathers, sums = (
                cell(summary.get(k, {})) for k in ("all-gather", "all-reduce")
            )
            print(
                f"| {kind} | {name} | {gathers} | {sums} | {amaxes or ''} | {other} |",
                flush=True,
            )
            rows.append({"mesh": kind, "layers": name, "collectives": summary})
    write(args.json, environment=described, rows=rows)


if __name__ == "__main__":
    main()
