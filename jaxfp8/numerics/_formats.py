"""FP8 formats: the dtypes of the forward and of the backward, and the largest value of a dtype."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@dataclasses.dataclass(frozen=True)
class Format:
    """An FP8 format, or a pair of them.

    Attributes:
        name: the name of the format in TransformerEngine.
        dtype: the FP8 dtype of the operands `x` and `kernel`.
        backward_dtype: the FP8 dtype of `grad`, the gradient of the output.

    `Format.E4M3`, `Format.E5M2` and `Format.HYBRID` are the formats of those names. Source: Micikevicius et al., "FP8
    Formats for Deep Learning", arXiv:2209.05433.
    """

    name: str
    dtype: np.dtype
    backward_dtype: np.dtype

    E4M3: ClassVar["Format"]
    E5M2: ClassVar["Format"]
    HYBRID: ClassVar["Format"]

    @property
    def max(self) -> float:
        """Return the largest finite value of `dtype`: 448 for float8_e4m3fn, 57344 for float8_e5m2."""
        return fp8_max(self.dtype)

    def __repr__(self) -> str:
        return self.name


_E4M3_DTYPE = np.dtype(jnp.float8_e4m3fn)
_E5M2_DTYPE = np.dtype(jnp.float8_e5m2)
FP8_DTYPES = (_E4M3_DTYPE, _E5M2_DTYPE)

# float8_e4m3fn forward and backward: 3 bits of fraction, largest value 448.
E4M3 = Format("E4M3", _E4M3_DTYPE, _E4M3_DTYPE)
# float8_e5m2 forward and backward: 2 bits of fraction, largest value 57344.
E5M2 = Format("E5M2", _E5M2_DTYPE, _E5M2_DTYPE)
# float8_e4m3fn for `x` and `kernel`, float8_e5m2 for `grad`, because gradients span a wider range.
HYBRID = Format("HYBRID", _E4M3_DTYPE, _E5M2_DTYPE)
Format.E4M3, Format.E5M2, Format.HYBRID = E4M3, E5M2, HYBRID


def fp8_max(dtype: DTypeLike) -> float:
    """Return the largest finite value of an FP8 dtype."""
    return float(jnp.finfo(dtype).max)
