"""Count the frames of jaxfp8 on the stack between `Fp8DotGeneral.__call__` and the
entry of each op of a Dense step.

    python tools/frames.py

JAX's and Flax's own frames do not count. The depth is what a reader of a traceback has
to go through.
"""

import functools
import sys
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxfp8

PACKAGE = Path(jaxfp8.__file__).parent
OPS = PACKAGE / "ops"
LAYER = "linen/_dot_general.py: Fp8DotGeneral.__call__"
CHECKS = ("_checks.py", "_support.py")  # of arguments and contexts, no ops


def frames(recipe) -> dict[str, list[str]]:
    """Return, for each op that the forward of a Dense layer enters, the frames of ours
    above it, outermost first.
    """
    product = functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)
    layer = nn.Dense(64, use_bias=False, dtype=jnp.bfloat16, dot_general_cls=product)
    x = jnp.ones((32, 32), jnp.bfloat16)
    variables = layer.init(jax.random.key(0), x)
    stacks = {}

    def trace(frame, event, argument):
        file = Path(frame.f_code.co_filename)
        if event != "call" or file.parent != OPS or file.name in CHECKS:
            return
        names, caller = [], frame
        while caller is not None:
            path = Path(caller.f_code.co_filename)
            if path.is_relative_to(PACKAGE):
                names.append(
                    f"{path.relative_to(PACKAGE)}: {caller.f_code.co_qualname}"
                )
            caller = caller.f_back
        names = names[::-1]
        inside = [name for name in names if name.startswith("ops/")]
        if len(inside) == 1 and LAYER in names:
            stacks.setdefault(inside[0], names[names.index(LAYER) :])

    sys.setprofile(trace)
    try:
        jax.grad(lambda variables: jnp.sum(layer.apply(variables, x)))(variables)
    finally:
        sys.setprofile(None)
    return stacks


if __name__ == "__main__":
    for op, names in frames(jaxfp8.DelayedScaling()).items():
        print(f"{op}: {len(names)} frames")
        print("".join(f"  {name}\n" for name in names), end="")
