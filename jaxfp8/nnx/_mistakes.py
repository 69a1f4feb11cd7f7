"""Products of NNX in a wrong place: messages that say where they belong."""

import inspect
import traceback

from flax import linen as nn, nnx


def refuse_linen_layer(name: str) -> None:
    """Refuse the call of a product by a Linen layer, which does not keep its state."""
    if hasattr(_linen_module(), "dot_general"):
        raise TypeError(
            f"{name}: a Linen layer was given a product of NNX, whose state it does "
            f"not keep; pass dot_general_cls=jaxfp8.linen.{name}"
        )


def refuse_inside_a_call(name: str) -> None:
    """Refuse `dot_general_cls=Fp8DotGeneral` in layers of NNX or Linen, which would
    train with scale 1 for ever.

    Such a layer makes the object while it runs, and no argument says so. Linen records
    the module that runs. NNX does not, so the stack of Python is searched for
    `nnx.LinearGeneral.__call__`.
    """
    if (module := _linen_module()) is not None:
        raise TypeError(
            f"{name}: a Linen module, {type(module).__name__}, makes a product of NNX "
            f"and would lose its state; pass dot_general_cls=jaxfp8.linen.{name}"
        )
    callers = traceback.walk_stack(inspect.currentframe())
    if any(frame.f_code is nnx.LinearGeneral.__call__.__code__ for frame, _ in callers):
        raise TypeError(
            f"{name}: NNX makes a dot_general_cls anew in every forward pass, and its "
            f"state would be lost; pass an instance, dot_general={name}(recipe), or "
            "change the finished model with jaxfp8.nnx.quantize"
        )


def _linen_module() -> nn.Module | None:
    """Get the Linen module whose method runs; None in a bridge, which keeps the state
    of the modules that it makes.
    """
    # the bridge of Flax reads it too: no public name tells the module
    module = nn.module._context.module_stack[-1]
    # Flax's or MaxText's
    is_bridge = any(cls.__name__ == "ToLinen" for cls in type(module).__mro__)
    return None if is_bridge else module
