"""The libraries side by side: jaxfp8's layers and Flax, as their users write them; the
rows know nothing else.
"""

import dataclasses
import functools
from collections.abc import Callable

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import oracle
from flax import nnx
from flax.linen import fp8_ops
from flax.training import train_state
from programs.known_amax import OPERANDS as OPERANDS, leaves

import jaxfp8

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
HISTORY = 4


@dataclasses.dataclass(frozen=True)
class Library:
    """What a user calls.

    Attributes:
        name: as printed.
        dot_general_cls: `amax_history_length -> ` what `nn.Dense(dot_general_cls=)`
            takes.
        einsum: the module for equations.
        module: the name of the layer's FP8 module in the variables.
        grad: `loss of variables -> gradient` in the way that the documentation gives
            for shared state.
        update: `(variables, gradient) -> variables`, the FP8 state alone overwritten.
        train_state: Flax's class or its counterpart.
        quantize: `(x, scale, oracle.Format) -> codes`, `scale` multiplies.
        layer: another layer than `nn.Dense`: `(features, dtype, dot_general_cls) ->`
            what has Linen's `apply`.
    """

    name: str
    dot_general_cls: Callable
    einsum: Callable
    module: str
    grad: Callable
    update: Callable
    train_state: type
    quantize: Callable
    layer: Callable | None = None
    is_ours: bool = False

    def dense(self, features, history=HISTORY, dtype=None, cls=None, **options):
        cls = cls or self.dot_general_cls(history)
        if self.layer:
            return self.layer(features, dtype, cls)
        return nn.Dense(
            features, dot_general_cls=cls, dtype=dtype, **{"use_bias": False} | options
        )

    def variables(
        self, kernel, state: oracle.LayerState | None = None, history=HISTORY
    ) -> dict:
        """Of one layer of `dense`; both libraries store amax / FP8_MAX as scale."""
        state = leaves(state or oracle.LayerState.init(history))
        return {"params": {"kernel": kernel}, OWG: {self.module: state}}

    def state(self, variables) -> oracle.LayerState:
        """What `variables` took."""
        state = jax.tree.map(np.asarray, variables[OWG][self.module])
        parts = [
            oracle.State(state[f"{name}_amax_history"], state[f"{name}_scale"][0])
            for name in OPERANDS
        ]
        return oracle.LayerState(*parts)

    def history(self, variables, operand) -> np.ndarray:
        """Slot 0 is the newest."""
        return np.asarray(variables[OWG][self.module][f"{operand}_amax_history"])


def _ours(history=HISTORY, **fields):
    recipe = jaxfp8.DelayedScaling(**{"amax_history_len": history} | fields)
    return functools.partial(jaxfp8.Fp8DotGeneral, recipe=recipe)


class _Nnx:
    """`nnx.Linear` with the variables of a Linen layer."""

    def __init__(self, features, dtype, cls):
        self.features = features
        self.dtype = dtype
        self.recipe = cls.keywords["recipe"]

    def apply(self, variables, x):
        kernel = variables["params"]["kernel"]
        product = jaxfp8.nnx.Fp8DotGeneral(self.recipe)
        zeros = nnx.initializers.zeros_init()
        layer = nnx.Linear(
            *kernel.shape,
            use_bias=False,
            dtype=self.dtype,
            dot_general=product,
            kernel_init=zeros,
            rngs=nnx.Rngs(0),
        )
        layer.kernel.set_value(jnp.asarray(kernel))
        for name, leaf in variables[OWG]["Fp8DotGeneral_0"].items():
            getattr(layer.dot_general, name).set_value(jnp.asarray(leaf))
        return layer(jnp.asarray(x))


def _flax(history=HISTORY):
    return functools.partial(nn.Fp8DirectDotGeneralOp, amax_history_length=history)


def _flax_grad(loss):
    """State as Flax's `fp32_max_grad`, whose cotangents combine by max; back to f32 for
    the optimizer.
    """

    def cast(variables, dtype):
        return {
            **variables,
            OWG: jax.tree.map(
                lambda leaf: jnp.asarray(leaf).astype(dtype), variables[OWG]
            ),
        }

    def gradient(variables):
        return cast(
            jax.grad(lambda v: loss(cast(v, fp8_ops.fp32_max_grad)))(variables),
            jnp.float32,
        )

    return gradient


def _flax_update(variables, gradient):
    """What Flax's TrainState does with this collection."""
    return {**variables, OWG: gradient[OWG]}


def _flax_quantize(x, scale, fmt):
    return fp8_ops.quantize(
        jnp.asarray(x),
        fmt.dtype,
        jnp.float32(1) / jnp.float32(scale),
        jnp.asarray(x).dtype,
    )


FLAX = Library(
    name="Flax Fp8DirectDotGeneralOp",
    dot_general_cls=_flax,
    einsum=lambda: nn.Fp8Einsum(amax_history_length=HISTORY),
    module="Fp8DirectDotGeneralOp_0",
    grad=_flax_grad,
    update=_flax_update,
    train_state=train_state.TrainState,
    quantize=_flax_quantize,
)
OURS = Library(
    name="jaxfp8",
    dot_general_cls=_ours,
    einsum=lambda: jaxfp8.linen.Fp8Einsum(
        recipe=jaxfp8.DelayedScaling(amax_history_len=HISTORY)
    ),
    module="Fp8DotGeneral_0",
    grad=jaxfp8.grad,
    update=jaxfp8.update_state,
    train_state=jaxfp8.linen.TrainState,
    quantize=lambda x, scale, fmt: jaxfp8.ops.quantize(
        jnp.asarray(x), jnp.float32(scale), fmt.dtype
    )[0],
    is_ours=True,
)
# The same rows through our other layer; programs/functional.py has jaxfp8.dot_general,
# which both call.
LAYERS = {
    "Linen": OURS,
    "NNX": dataclasses.replace(OURS, name="jaxfp8 in NNX", layer=_Nnx),
}


def calibrated_first_step(library: Library) -> Library:
    """jaxfp8 with `first_step="current"`; Flax has no such option, its first step is
    what it is.
    """
    if not library.is_ours:
        return library
    return dataclasses.replace(
        library, dot_general_cls=functools.partial(_ours, first_step="current")
    )
