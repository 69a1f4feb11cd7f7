"""Measures the cost of a model of FP8 layers: operations, tracing, lowering,
compilation, a step.

    python benchmarks/programs.py [--json FILE]

The forward and backward of 1 Dense layer, of 8 and of a scan over 8, in bfloat16:
jaxfp8's drop-in product, its own layer, Flax's FP8 class and bfloat16. Candidates take
turns. Tracing, lowering and compilation are CPU time of this process, so that
neighbours do not count; every turn has a new function, so that no cache answers. Before
steps are timed their gradients are compared.
"""

import functools
import math
import re
import statistics
import time
from collections.abc import Callable

import _timing
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from _environment import result_parser, shown_environment, write

import jaxfp8
import jaxfp8.linen

DENSE = functools.partial(nn.Dense, use_bias=False, dtype=jnp.bfloat16)
CANDIDATES = {
    "jaxfp8": functools.partial(DENSE, dot_general_cls=jaxfp8.Fp8DotGeneral),
    "own": functools.partial(jaxfp8.linen.Dense, use_bias=False, dtype=jnp.bfloat16),
    "flax": functools.partial(DENSE, dot_general_cls=nn.Fp8DotGeneral),
    "bf16": DENSE,
}


class Layers(nn.Module):
    """Dense layers of one width."""

    count: int
    width: int
    layer: Callable[..., nn.Module]

    @nn.compact
    def __call__(self, x):
        for _ in range(self.count):
            x = self.layer(self.width)(x)
        return x


class Scan(Layers):
    """The same layers in a scan, each with a residual."""

    @nn.compact
    def __call__(self, x):
        scan = nn.scan if self.layer is CANDIDATES["flax"] else jaxfp8.linen.scan
        scanned = scan(
            lambda layer, x, _: (x + layer(x), None),
            variable_axes={"params": 0, "_overwrite_with_gradient": 0},
            split_rngs={"params": True},
            length=self.count,
        )
        return scanned(self.layer(self.width, name="layer"), x, None)[0]


def step_of(model):
    """Return forward and backward of the model as a new function, of which JAX has
    cached nothing.
    """

    def step(variables, x, grad):
        y, vjp = jax.vjp(model.apply, variables, x)
        return y, vjp(grad)

    return step


def arguments(model, width):
    keys = jax.random.split(jax.random.key(0), 3)
    x, grad = (jax.random.normal(key, (width, width), jnp.bfloat16) for key in keys[:2])
    return model.init(keys[2], x), x, grad


def seconds_of(call):
    start = time.process_time()
    result = call()
    return result, time.process_time() - start


def cost_of_a_program(model, operands, compile_too) -> dict:
    traced, tracing = seconds_of(lambda: jax.jit(step_of(model)).trace(*operands))
    lowered, lowering = seconds_of(traced.lower)
    seconds = {"trace": tracing, "lower": lowering}
    if compile_too:
        _, seconds["compile"] = seconds_of(lowered.compile)
    operations = len(re.findall(r"^\s+%\S+ = ", lowered.as_text(), re.MULTILINE))
    return {"operations": operations, "seconds": seconds}


def programs(kind: type[Layers], layers: int, width: int, turns: int) -> dict:
    models = {name: kind(layers, width, layer) for name, layer in CANDIDATES.items()}
    operands = {name: arguments(model, width) for name, model in models.items()}
    costs = {name: [] for name in models}
    for turn in range(turns + 1):
        for name, model in models.items():
            costs[name].append(
                cost_of_a_program(model, operands[name], compile_too=turn < 4)
            )
    return {
        name: {
            "operations": runs[0]["operations"],
            **{
                f"{part}_ms": 1e3
                * statistics.median(
                    r["seconds"][part] for r in runs[1:] if part in r["seconds"]
                )
                for part in ("trace", "lower", "compile")
            },
        }
        for name, runs in costs.items()
    }


def steps(kind: type[Layers], layers: int, width: int, turns: int) -> dict:
    models = {name: kind(layers, width, layer) for name, layer in CANDIDATES.items()}
    calls = {}
    for name, model in models.items():
        operands, step = arguments(model, width), jax.jit(step_of(model))
        calls[name] = lambda operands=operands, step=step: step(*operands)
    kernels = {
        name: np.asarray(jax.tree.leaves(call()[1][0]["params"])[0])
        for name, call in calls.items()
    }
    for name, kernel in kernels.items():
        # e5m2 keeps two bits of the gradient, e4m3 three of the input: errors of up to
        # 2**-3 and 2**-4 of an element, a third of these in the root mean square; those
        # of layers are independent.
        error = np.linalg.norm(kernel - kernels["bf16"]) / np.linalg.norm(
            kernels["bf16"]
        )
        assert error < 0.1 * math.sqrt(layers), (
            f"{name}: the kernel's gradient is off by {error:.3f}"
        )
    timings = _timing.interleaved(calls, turns=turns)
    return {
        name: {"step_ms": 1e3 * timing.median, "spread": timing.spread}
        for name, timing in timings.items()
    }


def main():
    args = result_parser(__doc__, turns=15).parse_args()
    described = shown_environment()
    rows = []
    for title, results in (
        ("program of 1 layer", programs(Layers, 1, 256, args.turns)),
        ("program of 8 layers", programs(Layers, 8, 256, args.turns)),
        ("program of a scan", programs(Scan, 8, 256, args.turns)),
        ("step, 512^3", steps(Layers, 1, 512, args.turns)),
        ("step, 1024^3", steps(Layers, 1, 1024, args.turns)),
        ("step of a scan, 512^3", steps(Scan, 8, 512, args.turns)),
    ):
        for name, values in results.items():
            print(
                f"{title:20} {name:7} "
                + "  ".join(f"{key} {value:8.2f}" for key, value in values.items()),
                flush=True,
            )
            rows.append({"case": title, "candidate": name, **values})
    write(args.json, environment=described, rows=rows)


if __name__ == "__main__":
    main()
