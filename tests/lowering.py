"""Programs as text: StableHLO for CUDA, which needs no GPU."""

import jax


def cuda_text(function, *arguments) -> str:
    return (
        jax.jit(function)
        .trace(*arguments)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
