"""How much of fprop's rounding error the worst columns of each layer's input carry.

    python benchmarks/error_columns.py [--steps N]

The model of loss_gap.py is trained in bf16. The error of a column j is
`sum_i (x_ij - q(x)_ij)**2 * sum_n kernel_jn**2` over validation batches, with q the
codes of current scaling in e4m3. Residual codes of a column, `x = q1 + q2`, take its
error away and cost its part of fprop once more: of all products, a third of its part.
"""

import argparse

import flax.linen as nn
import jax.numpy as jnp
import loss_gap
import numpy as np
from _runs import TEXTS

import jaxfp8

PARTS = (0.05, 0.10, 0.21, 0.50)  # of the columns; 0.21 is 7 % of a step's products


def inputs_of_layers(state, batches) -> dict:
    """The inputs of each FP8 layer, `[rows, columns]`, by the path of the layer."""
    seen = {}

    def keep(next_method, args, kwargs, context):
        if context.module.name in ("qkv", "out", "up", "down"):
            seen.setdefault(context.module.path, []).append(args[0])
        return next_method(*args, **kwargs)

    with nn.intercept_methods(keep):
        for batch in batches:
            state.apply_fn(state.params, batch[:, :-1])
    return {
        path: jnp.concatenate([x.reshape(-1, x.shape[-1]) for x in parts])
        for path, parts in seen.items()
    }


def parts_of_error(x, kernel) -> list[float]:
    """The part of the error in the worst columns, for each of PARTS."""
    quantizer = jaxfp8.recipes.Float8CurrentScalingQuantizer(jnp.float8_e4m3fn)
    q, _ = quantizer.quantize(x, None)
    difference = x.astype(jnp.float32) - q.data.astype(jnp.float32) * q.scale_inv
    error = jnp.sum(difference**2, axis=0) * jnp.sum(kernel**2, axis=1)
    worst_first = np.sort(np.asarray(error))[::-1]
    counts = [round(part * len(worst_first)) for part in PARTS]
    return [float(worst_first[:n].sum() / worst_first.sum()) for n in counts]


def main(argv=None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=loss_gap.STEPS)
    steps = parser.parse_args(argv).steps
    training = loss_gap.Training(steps)
    print(f"| layer | columns | {' | '.join(f'{part:.0%}' for part in PARTS)} |")
    print("|---" * (len(PARTS) + 2) + "|")
    for text in TEXTS:
        training.run(text, "bf16", 0)
        state = training.last
        with loss_gap.ARMS["bf16"].precision.region():
            inputs = inputs_of_layers(state, training.validation(text)[:4])
        for (block, layer), x in inputs.items():
            kernel = state.params["params"][block][layer]["kernel"]
            cells = [f"{part:.0%}" for part in parts_of_error(x, kernel)]
            row = [f"{text} {block} {layer}", str(x.shape[-1]), *cells]
            print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
