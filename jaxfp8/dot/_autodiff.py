"""State in autodiff: under `vmap` its cotangents meet in a max, and a gradient that
leaves it out warns.

`vmapped_state` is for transfers, which are a `custom_vjp`: under `vmap` JAX sums the
cotangents of an argument that the examples share, which is right for a kernel and wrong
for a state.
"""

from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import _warnings
from .._jax._batching import batch_of, in_front, repeat_state
from .._jax._primitives import compiled
from ..recipes import FP8StateWarning

_NOT_UPDATED = (
    "this gradient never updates FP8 state: it is not taken with respect to the "
    "state, so all scales stay as they are. Differentiate with respect to "
    "`_overwrite_with_gradient` (or the DotGeneralState) too, and store that gradient "
    "as the next state; in NNX take jaxfp8.nnx.value_and_grad and "
    "jaxfp8.nnx.Optimizer"
)
_NO_STATE = (
    "the recipe of this layer keeps state, but the variables have none: the layer "
    "trains with scales of the tensors at hand. Pass all variables that `init` "
    "returned, `_overwrite_with_gradient` too (in a TrainState: "
    "jaxfp8.linen.TrainState.create(params=variables, ...)); or take "
    "Float8CurrentScaling"
)


def vmapped_state(state, *operands):
    """Return `state`; under a `vmap` that batches any operand, each of its leaves gets
    a batch dimension too.
    """
    leaves, tree = jax.tree.flatten(state)
    if not leaves:
        return state
    leaves = _vmapped_state_p.bind(*leaves, *operands, count=len(leaves))
    return tree.unflatten(leaves)


def _batch(args, dims, *, count):
    batch = batch_of(args, dims)
    leaves = [in_front(batch, args[i], dims[i], repeat_state) for i in range(count)]
    # The operands go along so that an outer `vmap` sees them; the place of their batch
    # dimension no longer matters.
    return _vmapped_state_p.bind(*leaves, *args[count:], count=count), [0] * count


def _jvp(primals, tangents, *, count):
    # Each result is a leaf of the state and has the tangent of that leaf. The results
    # do not depend on the operands.
    return _vmapped_state_p.bind(*primals, count=count), list(tangents[:count])


_vmapped_state_p = Primitive("fp8_vmapped_state")
_vmapped_state_p.multiple_results = True
_vmapped_state_p.def_abstract_eval(lambda *avals, count: list(avals[:count]))
_vmapped_state_p.def_impl(compiled(_vmapped_state_p))
ad.primitive_jvps[_vmapped_state_p] = _jvp
batching.primitive_batchers[_vmapped_state_p] = _batch
mlir.register_lowering(_vmapped_state_p, lambda ctx, *operands, count: operands[:count])


def warn_of_state(
    quantizers, is_updated, layer: str | None = None, where: Any = None
) -> None:
    """Warn where a gradient leaves out the state of a product, or a layer lacks the
    state that its recipe keeps.

    Args:
        quantizers: the quantizers of the product.
        is_updated: for each leaf of the state, whether the gradient is taken with
            respect to that leaf.
        layer: the path of the layer; None for a function, whose state is an argument.
        where: the trace of the gradient, in which the first layer alone is named.
    """
    message = None
    if is_updated and not any(is_updated):
        message = _NOT_UPDATED
    elif (
        layer is not None
        and not is_updated
        and any(jax.tree.leaves(quantizer.init()) for quantizer in quantizers)
    ):
        message = _NO_STATE
    if message:
        _warnings.warn_once(where, layer, message, FP8StateWarning)
