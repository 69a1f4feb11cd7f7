"""Models of which `benchmarks/memory.py` says what a training step holds on an H200 at
its peak; prints as JSON what `count` finds.

    python -m aot.memory [--quickly] MODEL...

Two models, forward and backward, all gradients and the next state: `llama`, a scan over
8 blocks of Llama's sizes (norms, the projections of attention without attention itself,
and the gated MLP), which computes norms again in the backward and nothing else; and
`experts`, a gated MLP of 16 experts over sorted rows.
"""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8

from . import programs
from .programs import DENSES, HIDDEN, LAYERS, STATE, TOKENS, WIDTH

EXPERTS, EXPERT_HIDDEN = 16, 2048
DELAYED = jaxfp8.DelayedScaling(amax_history_len=16)
KEPT = jaxfp8.DelayedScaling(amax_history_len=16, fp8_residuals=True)
BY_PRODUCT = jaxfp8.ByProduct(DELAYED, DELAYED)
RECIPES = {"fused": DELAYED, "fused, FP8 kept": KEPT, "own, wgrad in bf16": BY_PRODUCT}
_FUSED = "fused", "fused, FP8 kept"


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


programs.GROUPS |= {
    "llama": {
        "llama": programs.Case(
            Llama,
            candidates=("bf16", "flax", "own", "own, wgrad in bf16", *_FUSED),
        )
    },
    "experts": {"experts": programs.Case(Experts, candidates=("bf16", *_FUSED))},
}

if __name__ == "__main__":
    programs.main()
