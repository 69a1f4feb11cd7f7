"""Recipe: the options and checks that all recipes share; HighPrecision, whose tensors
stay as they are.
"""

import dataclasses
import functools
import numbers
from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.typing import DTypeLike

from ..numerics import Format
from ..ops import _checks
from ._quantizer import DEFAULT, OperandOptions, Quantized, Quantizer
from ._tensor import QTensor

# The operands of each product.
OPERANDS = {
    "fprop": ("input", "kernel"),
    "dgrad": ("output_grad", "kernel"),
    "wgrad": ("input", "output_grad"),
}
PRODUCTS = tuple(OPERANDS)


class ByQuantizer(NamedTuple):
    """One value for each quantizer of a product: its quantizers, states or scales. The
    fields are those of `DotGeneralState`.

    Two products read each operand, x, kernel and grad. The last three fields belong to
    the second one; where both have equal quantizers they share their codes, and the
    second one's quantizer is `SharedCodes`.
    """

    input: Any
    kernel: Any
    output_grad: Any
    output: Any = None
    input_grad: Any = None
    wgrad_input: Any = None
    dgrad_kernel: Any = None
    wgrad_output_grad: Any = None

    def of_operand(self, operand: int) -> tuple[Any, Any]:
        """Return the values of both products that read an operand: 0 for x, 1 for the
        kernel, 2 for grad.
        """
        return self[operand], self[5 + operand]

    def for_product(self, product: str) -> list[Any]:
        """Return the quantizers of both operands of a product: those whose codes it
        reads.
        """
        quantizers = []
        for operand in OPERANDS[product]:
            first = getattr(self, operand)
            second = getattr(self, f"{product}_{operand}", SharedCodes())
            quantizers.append(first if second == SharedCodes() else second)
        return quantizers


# The tensor and the product of each quantizer.
_TENSORS = (
    ("input", "fprop"),
    ("kernel", "fprop"),
    ("output_grad", "dgrad"),
    ("output", "fprop"),
    ("input_grad", "dgrad"),
    ("input", "wgrad"),
    ("kernel", "dgrad"),
    ("output_grad", "wgrad"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Base class: says how the operands of a product become FP8. Recipes are frozen
    dataclasses that hash and compare.

    In a pytree a recipe is a static node without leaves: another recipe is another
    structure.

    These options belong to every recipe and are given by keyword.

    Attributes:
        precise: the products, of `"fprop"`, `"dgrad"`, `"wgrad"`, that accumulate
            precisely. On Ada and Hopper the others stay in accumulators of 13 bits
            along their whole contraction: ten times as far off with 4096 terms of mixed
            signs, a hundred times where all signs are alike (docs/numerics.md).
            Elsewhere `precise` changes nothing.
        min_size: products `[m, k] @ [k, n]` with `m * n * k < min_size**3` stay in high
            precision: below some size the launches of quantization cost more than FP8
            saves (docs/performance.md). With 0 no product is too small. Small products
            leave their state as it is. Sizes are those of one call: of one example
            under `vmap`, of one device in `shard_map`.
        pipeline_axes: mesh axes along which the stages of a pipeline lie; amaxes are
            not reduced over these axes. Only `shard_map(check_vma=False)` and `pmap`
            need this option: elsewhere types tell over which axes a state varies. Where
            it is needed and None, amaxes are reduced over all axes, with a warning;
            `()` says that there are no such axes.
        fp8_residuals: whether the input of an activation or norm that a product is
            fused with (`GatedMLP`, `NormDense`, `jaxfp8.activated`, `normalized`) is
            kept for the backward in FP8, a byte an element, with a power of two for the
            whole tensor as its scale. The forward gives the same values; gradients are
            a few percent off.
        wgrad_dtype: the dtype, bfloat16, float16 or float32, in which the product of
            wgrad is written and the devices of a mesh add their parts of it; the sum is
            then converted to the kernel's dtype. None is the kernel's dtype. The layers
            of `jaxfp8.linen` and `jaxfp8.nnx` keep float32 kernels: with bfloat16 half
            of the bytes cross devices, and each part and each addition is rounded.
    """

    precise: tuple[str, ...] = ("dgrad", "wgrad")
    min_size: int = 0
    pipeline_axes: tuple[str, ...] | None = None
    fp8_residuals: bool = False
    wgrad_dtype: DTypeLike | None = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Make recipes static nodes of pytrees, so that `jax.jit` takes one as an
        argument.
        """
        super().__init_subclass__(**kwargs)
        jax.tree_util.register_static(cls)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse to be the product of a layer: a layer calls the object in its field
        `dot_general`.

        Raises:
            TypeError: always.
        """
        name = type(self).__name__
        raise TypeError(
            f"{name}: a layer was given the recipe as its dot_general_cls or "
            "dot_general, expected a product, or a factory of products: in Linen "
            f"dot_general_cls=jaxfp8.make_dot_general_cls({name}(...)), in NNX "
            f"dot_general=jaxfp8.nnx.Fp8DotGeneral({name}(...))"
        )

    # Names of the quantizers' variables, in the order of `quantizers()`.
    operands = ByQuantizer._fields

    def quantizer(self, tensor: str, product: str) -> Quantizer:
        """Return the quantizer of a tensor for one product.

        Operands are in the dtypes of `fp8_format`; results stay in high precision.

        Args:
            tensor: an operand of the product, `"input"`, `"kernel"` or `"output_grad"`;
                or its result: `"output"` of fprop, `"input_grad"` of dgrad.
            product: `"fprop"`, `"dgrad"` or `"wgrad"`.
        """
        if tensor in ("output", "input_grad"):
            return HighPrecisionQuantizer()
        if tensor == "output_grad":
            return self.quantizer_in(self.fp8_format.backward_dtype, tensor)
        return self.quantizer_in(self.fp8_format.dtype, tensor)

    def quantizer_in(self, dtype: np.dtype, operand: str) -> Quantizer:
        """Return the quantizer of an operand in an FP8 dtype: all that a recipe with an
        `fp8_format` defines.

        Raises:
            NotImplementedError: the subclass does not define it.
        """
        raise NotImplementedError(f"{type(self).__name__}: quantizer_in")

    @functools.lru_cache(maxsize=256)  # noqa: B019  recipes are few, and without arrays
    def quantizers(self) -> ByQuantizer:
        """Return the quantizers of a product, `quantizer` of each tensor: of x, kernel,
        grad, y and the gradient of x; then those of second products.

        Equal recipes give the same quantizers: each is made once.
        """
        quantizers = [self.quantizer(*tensor) for tensor in _TENSORS]
        for i in range(3):
            if quantizers[5 + i] == quantizers[i]:
                quantizers[5 + i] = SharedCodes()
        return ByQuantizer(*quantizers)

    def expect(
        self,
        condition: bool,
        name: str,
        needed: str,
        error: type[Exception] = ValueError,
    ) -> None:
        """Raise `error` unless the condition on the option `name` holds; `needed` says
        what the option has to be.
        """
        if not condition:
            raise error(
                f"{type(self).__name__}: {name}: expected {needed}, got "
                f"{getattr(self, name)!r}"
            )

    def expect_number(
        self, name: str, kind: type, least: float, most: float = np.inf
    ) -> None:
        """Raise a TypeError unless the option `name` is a number of a kind, and not a
        bool; a ValueError unless it is from `least` to `most`.
        """
        noun = "an int" if kind is numbers.Integral else "a number"
        value, needed = getattr(self, name), f"{noun} from {least} to {most}"
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        self.expect(is_number, name, needed, TypeError)
        self.expect(least <= value <= most, name, needed)

    def __post_init__(self) -> None:
        """Check the options that all recipes share, and turn iterables of names into
        tuples.

        Raises:
            ValueError, TypeError: an option has a value it cannot have.
        """
        if hasattr(self, "fp8_format"):
            needed = "jaxfp8.Format.HYBRID, E4M3 or E5M2"
            is_format = isinstance(self.fp8_format, Format)
            self.expect(is_format, "fp8_format", needed, TypeError)
        for name in ("power_2_scale", "fp8_residuals"):
            _checks.flag(type(self).__name__, name, getattr(self, name, False))
        for name in ("precise", "pipeline_axes"):
            value = getattr(self, name)
            if value is not None or name == "precise":
                is_names = isinstance(value, Iterable) and not isinstance(value, str)
                self.expect(is_names, name, "a tuple of names", TypeError)
                object.__setattr__(self, name, tuple(value))
        needed = f"names out of {PRODUCTS}"
        self.expect(set(self.precise) <= set(PRODUCTS), "precise", needed)
        self.expect_number("min_size", numbers.Integral, 0)
        if self.wgrad_dtype is not None:
            # Equal dtypes have several names, and equal recipes one program.
            where = type(self).__name__, "wgrad_dtype"
            dtype = _checks.dtype(*where, self.wgrad_dtype, _checks.HIGH_PRECISION)
            object.__setattr__(self, "wgrad_dtype", dtype)
        try:
            hash(self)
        except TypeError as error:
            raise TypeError(
                f"{type(self).__name__}: expected options that hash, as programs are "
                f"cached by the recipe: {error}; make their classes frozen"
            ) from None


def checked(where: str, recipe: Any) -> Recipe:
    """Return `recipe` if it is a Recipe; `where` names the argument in the message.

    Raises:
        TypeError: `recipe` is not a Recipe.
    """
    if isinstance(recipe, Recipe):
        return recipe
    is_class = isinstance(recipe, type) and issubclass(recipe, Recipe)
    hint = "; call the class: a recipe is an instance" if is_class else ""
    raise TypeError(
        f"{where}: expected a recipe, for example jaxfp8.DelayedScaling(), got "
        f"{recipe!r}{hint}"
    )


@dataclasses.dataclass(frozen=True)
class HighPrecisionQuantizer(Quantizer):
    """Keep a tensor as it is: `data` is the tensor, and there is no scale."""

    def quantize_operand(
        self, x: jax.Array, scale: Any, options: OperandOptions = DEFAULT
    ) -> Quantized:
        """Return x as an operand of a product; see `Quantizer.quantize_operand`."""
        return QTensor(x, None, cols=options.cols), options.sum_rows(x)


@dataclasses.dataclass(frozen=True)
class SharedCodes(HighPrecisionQuantizer):
    """Stands for the second of two equal quantizers: its product reads the codes of the
    first.
    """


@dataclasses.dataclass(frozen=True)
class HighPrecision(Recipe):
    """Compute without FP8: a layer with this recipe computes as without jaxfp8, also in
    `autocast`; it has no state.

    None in a rule (`jaxfp8.linen.quantize`) means this recipe; a layer whose own recipe
    is None has the default one.
    """

    def quantizer(self, tensor: str, product: str) -> Quantizer:
        """Return a `HighPrecisionQuantizer`."""
        return HighPrecisionQuantizer()
