"""Frozen products: a kernel that is codes already and, with delayed scaling, an input whose scale is fixed.

`freeze_operands` makes of a kernel and a state what inference needs of them, a dict of arrays; `dot_general` multiplies
with it, with the same codes and scales as `jaxfp8.dot_general` does with that kernel and that state.
"""

import contextlib
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..ops import _checks
from ..recipes import (
    AmaxReduction,
    DelayedScalingQuantizer,
    DotGeneralState,
    FixedScale,
    FixedScaleQuantizer,
    QTensor,
    QuantizerState,
    Recipe,
    alone,
    start,
)
from . import _dot_general
from ._layout import layouts
from ._operand import operands

KERNEL = "kernel"
KERNEL_SCALE_INV = "kernel_scale_inv"
# While products are being frozen: whether one was called with another kernel than that whose codes are kept.
HAS_ANOTHER = "has_another_kernel"
INPUT_SCALE = "input_scale"

ANOTHER_KERNEL = "freeze: expected one kernel for each FP8 product, got one that is called with several"

# Whether products are being frozen: layers then keep what `freeze_operands` gives. A context of jit's cache key.
_freezing = jax.make_user_context(default_value=False)


@contextlib.contextmanager
def freezing():
    """While it lasts, layers store what inference needs of their products."""
    with _freezing(True):
        yield


def is_freezing() -> bool:
    return _freezing.value


@dataclasses.dataclass(frozen=True)
class _FrozenRecipe(Recipe):
    """A recipe whose kernels are codes; `has_fixed_input` says whether its input has a fixed scale."""

    recipe: Any
    has_fixed_input: bool
    precise: tuple[str, ...]
    pipeline_axes: tuple[str, ...]

    def quantizers(self) -> tuple:
        """Those of the recipe, but for a fixed scale."""
        of_x, *others = self.recipe.quantizers()
        return (FixedScaleQuantizer(of_x.fp8_dtype) if self.has_fixed_input else of_x, *others)


def freeze_operands(x_shape, kernel, dimension_numbers, recipe, state) -> dict[str, jax.Array] | None:
    """What inference needs of a product's kernel and state.

    Args:
        x_shape: the shape of x, for the recipe's `min_size`: a frozen product is FP8 for x of any size.
        kernel: bfloat16, float16 or float32, as the product gets it.
        dimension_numbers, recipe, state: as of `jaxfp8.dot_general`.

    Returns:
        `kernel`, codes with the contracting dimensions last, as GEMMs read them: `[*batch, *free, *contract]`;
        `kernel_scale_inv`, f32 `(1,)` or one a block; with delayed scaling that has state `input_scale` and
        `input_scale_inv`, f32 `(1,)`. None where the product, or its kernel, is in high precision.

    Raises:
        ValueError: x, the output or the kernel has a quantizer with state, other than delayed scaling of x and kernel.
    """
    kernel = _checks.high_precision("freeze", "kernel", kernel)
    quantizers, state = _dot_general.checked_quantizers("freeze", recipe, state)
    both = layouts(x_shape, kernel.shape, dimension_numbers)
    if quantizers[1] is None or 0 in kernel.shape or _dot_general.is_small(recipe, *both):
        return None
    for name, quantizer, of in zip(("input", "kernel"), quantizers, (state.input, state.kernel), strict=False):
        if jax.tree.leaves(of) and not isinstance(quantizer, DelayedScalingQuantizer):
            raise ValueError(
                f"freeze: recipe: expected delayed scaling, or quantizers without state, for the {name}: what fixes "
                f"the state of {quantizer!r} only its author knows"
            )
    if quantizers[3] is not None and jax.tree.leaves(state.output):
        raise ValueError(f"freeze: recipe: expected an output without state, got {quantizers[3]!r}")
    of_x, of_kernel = start(quantizers[:2], [state.input, state.kernel])
    last = _codes(kernel, quantizers[1], both[1], of_kernel, AmaxReduction.of(recipe))
    frozen = {KERNEL: last.codes, KERNEL_SCALE_INV: last.scale_inv}
    if isinstance(state.input, QuantizerState):
        frozen |= {INPUT_SCALE: of_x.scale, "input_scale_inv": of_x.scale_inv}
    return frozen


def is_another(kept, x_shape, kernel, dimension_numbers, recipe, state) -> jax.Array:
    """bool[]: whether `freeze_operands` gives other codes or scales for this kernel than those in `kept`.

    Raises:
        ValueError: they have another shape.
    """
    found = freeze_operands(x_shape, kernel, dimension_numbers, dataclasses.replace(recipe, min_size=0), state)
    pairs = [] if found is None else [(kept[name], found[name]) for name in (KERNEL, KERNEL_SCALE_INV)]
    if not pairs or any((a.shape, a.dtype) != (b.shape, b.dtype) for a, b in pairs):
        raise ValueError(f"{ANOTHER_KERNEL}: of shape {kernel.shape}, and of another one before")
    same = [jnp.all((a == b) | ((a != a) & (b != b))) for a, b in pairs]
    return jnp.logical_not(jnp.logical_and(*same))


def _codes(kernel, quantizer, layout, run=None, reduce=alone):
    """The kernel as the first product reads it: an `Operand`."""
    first = layout.contract_first
    options = layout.counts | {"rowwise": not first, "columnwise": first, "contract_first": first}
    q, _, _ = quantizer.quantize_operand(layout.ordered(kernel), run, reduce=reduce, **options)
    return operands(q, len(layout.batch), first, want_first=False)[0]


def dot_general(
    x, kernel, dimension_numbers, *, frozen, recipe, bias=None, precision=None, preferred_element_type=None, **options
):
    """`jaxfp8.dot_general` with a frozen kernel.

    Args:
        x, dimension_numbers, bias, precision, preferred_element_type, options: as of `jaxfp8.dot_general`.
        kernel: whatever has the shape and the dtype that the kernel had; it is not read.
        frozen: what `freeze_operands` returned for it.
        recipe: of the product; None dequantizes the codes.

    Raises:
        ValueError: `frozen` is of another recipe, or of a kernel of another shape.
    """
    if preferred_element_type is None:
        with jax.numpy_dtype_promotion("standard"):
            preferred_element_type = jnp.result_type(x.dtype, kernel.dtype)
    of_x, of_kernel = layouts(x.shape, kernel.shape, dimension_numbers)
    scaling, state = {}, DotGeneralState(None, None, None)
    if recipe is not None:
        scaling = _checked_scaling(frozen, kernel, of_kernel, recipe)
        has_fixed_input = INPUT_SCALE in frozen
        if has_fixed_input:
            state = dataclasses.replace(state, input=FixedScale(frozen[INPUT_SCALE], frozen["input_scale_inv"]))
        kept = {"precise": recipe.precise, "pipeline_axes": recipe.pipeline_axes}
        recipe = _FrozenRecipe(recipe=recipe, has_fixed_input=has_fixed_input, **kept)
    batch, contract = len(of_kernel.batch), len(of_kernel.contract)
    codes = QTensor(frozen[KERNEL], frozen[KERNEL_SCALE_INV], cols=contract, **scaling)
    last = tuple(range(codes.ndim - contract, codes.ndim))
    return _dot_general.dot_general(
        x,
        codes,
        ((of_x.contract, last), (of_x.batch, tuple(range(batch)))),
        recipe=recipe,
        state=state,
        bias=bias,
        precision=precision,
        preferred_element_type=preferred_element_type,
        **options,
    )


def _checked_scaling(frozen, kernel, layout, recipe):
    """How the codes are scaled, as keywords of a QTensor, if the arrays are those of this recipe and kernel."""
    quantizer = recipe.quantizers()[1]
    found = {name: (leaf.shape, leaf.dtype) for name, leaf in frozen.items() if name.startswith(KERNEL)}
    if quantizer is not None:
        of = functools.partial(_codes, quantizer=quantizer, layout=layout)
        expected = jax.eval_shape(of, jax.ShapeDtypeStruct(kernel.shape, kernel.dtype))
        wanted = {KERNEL: expected.codes, KERNEL_SCALE_INV: expected.scale_inv}
        if found == {name: (leaf.shape, leaf.dtype) for name, leaf in wanted.items()}:
            return {"block": expected.block, "power_2_scale": expected.power_2_scale}
    raise ValueError(
        f"frozen product: the recipe here is {recipe!r}, but what is frozen, {found}, is of another one; run the model "
        "with the recipes (jaxfp8.autocast, rules) that it was frozen with"
    )


def stand_in(shape, dtype):
    """What a layer reads where its kernel was: NaN, which its product does not read, and nobody else unseen."""
    return jnp.full(shape, jnp.nan, dtype)


def nothing_to_freeze() -> ValueError:
    return ValueError(
        "freeze: model: expected FP8 products that are not frozen yet, found none for these arguments; "
        "jaxfp8.report says what runs where"
    )


def refuse_untouched(name: str, history, scale) -> None:
    """Raises for the state of a quantizer, called `name`, that has seen nothing and was given no scale."""
    if not np.any(np.asarray(history) > 0) and np.all(np.asarray(scale) == 1):
        raise ValueError(
            f"freeze: {name}: no amax was recorded, so its scale would be 1 for ever; run jaxfp8.calibrate on a few "
            "batches first, or train"
        )
