"""Compile the training step of an arm, and read its memory and how its FP8 products
run.
"""

import collections
import math
import re
from collections.abc import Callable
from typing import NamedTuple

import jax
from _compare_arms import Arm
from _compare_training import TrainState, loss_fn, train_step

from jaxfp8.inspect import _programs

_PRODUCTS = ("jaxfp8_scaled_matmul", "jaxfp8_block_scaled_matmul")


class Program(NamedTuple):
    """A compiled training step.

    Attributes:
        step: `(state, batch) -> (state, loss, made)`.
        memory: the bytes of arguments, outputs, outputs that reuse an argument
            (`aliased`), and temporaries, from XLA's memory analysis; None where a
            platform has no such analysis.
        kept_bytes: the bytes that `jax.vjp` of the loss holds until the backward,
            weights included, before XLA optimizes the program.
        fp8: the numbers of FP8 products and quantizations in the program, and of those
            that run as custom calls.
    """

    step: Callable
    memory: dict[str, int] | None
    kept_bytes: int
    fp8: dict[str, int]

    @property
    def peak_bytes(self) -> int | None:
        """The bytes that the step needs: arguments, outputs that reuse no argument,
        temporaries.
        """
        if self.memory is None:
            return None
        # The sum holds the aliased bytes twice, as themselves and in the outputs.
        # Neither needs memory of its own.
        return sum(self.memory.values()) - 2 * self.memory["aliased"]

    def how(self) -> str:
        """Describe how the FP8 products and quantizers of the program run on this
        backend.
        """
        fp8, platform = self.fp8, f"XLA:{jax.default_backend().upper()}"
        if not fp8["products"]:
            return "no FP8"
        kernels = fp8["products_by_kernel"], fp8["products_by_xla"]
        # XLA may copy a call, so the HLO may have more calls than the jaxpr: let no
        # count fall below zero.
        emulated = max(0, fp8["products"] - sum(kernels))
        products = (
            (kernels[0], "products by custom calls (cuBLASLt)"),
            (kernels[1], "products by XLA's own FP8 rewriting"),
            (emulated, f"products of widened codes by {platform}"),
        )
        in_jnp = max(0, fp8["quantizers"] - fp8["quantizers_by_kernel"])
        quantizers = (
            (fp8["quantizers_by_kernel"], "quantizers by custom calls"),
            (in_jnp, "in jnp"),
        )
        return f"{_parts(products)}; {_parts(quantizers)}"

    def record(self) -> dict:
        """Return memory and FP8 counts as a dict for JSON."""
        memory = {
            "memory_bytes": self.memory,
            "peak_bytes": self.peak_bytes,
            "kept_bytes": self.kept_bytes,
        }
        return memory | {"fp8": self.fp8, "how": self.how()}


def compile_step(arm: Arm, state: TrainState, batch) -> Program:
    """Compile the training step of an arm for the shapes of a state and a batch."""
    with arm.region():
        traced = train_step.trace(state, batch)
        compiled = traced.lower().compile()
        # The function that `jax.vjp` returns is a pytree of the arrays that it keeps,
        # so its shapes tell the bytes.
        _, vjp = jax.eval_shape(
            lambda v: jax.vjp(lambda v: loss_fn(v, state.apply_fn, batch), v),
            state.params,
        )
    kept = sum(
        math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(vjp)
    )
    return Program(
        compiled,
        _memory(compiled.memory_analysis()),
        kept,
        _fp8(traced.jaxpr.jaxpr, compiled.as_text()),
    )


def _parts(counts) -> str:
    return ", ".join(f"{count} {kind}" for count, kind in counts if count)


def _memory(analysis) -> dict[str, int] | None:
    parts = {
        "arguments": "argument",
        "outputs": "output",
        "aliased": "alias",
        "temporaries": "temp",
    }
    return analysis and {
        name: getattr(analysis, f"{part}_size_in_bytes") for name, part in parts.items()
    }


def _fp8(jaxpr, hlo: str) -> dict[str, int]:
    # The jaxpr has the ops that the program asks for, the compiled HLO the custom calls
    # that run.
    ops = collections.Counter(
        eqn.primitive.name for eqn, _ in _programs.equations(jaxpr)
    )
    calls = collections.Counter(re.findall(r'custom_call_target="([^"]+)"', hlo))

    def count(counts, *prefixes):
        return sum(
            number for name, number in counts.items() if name.startswith(prefixes)
        )

    return {
        "products": count(ops, *_PRODUCTS),
        "products_by_kernel": count(calls, *_PRODUCTS),
        "products_by_xla": count(calls, "__cublas$lt$matmul$f8"),
        "quantizers": count(ops, "jaxfp8_quantize"),
        "quantizers_by_kernel": count(calls, "jaxfp8_quantize"),
    }
