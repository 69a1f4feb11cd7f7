"""Policy: the dtypes of parameters, computation and results, and which operations stay
in float32.
"""

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax._trees import Tree
from ..dot import promoted
from ._floats import is_float, map_outside_state

_COMPUTE, _FLOAT32, _WIDEST = "compute", "float32", "widest"

# Operations by their names in jax, flax and optax, and in PyTorch where these differ
# (cat, mul, linear, ...).
OPERATIONS = {
    _COMPUTE: (
        "matmul dot tensordot einsum dot_general ragged_dot bmm addmm baddbmm linear "
        "dense linear_general dense_general conv conv1d conv2d conv3d "
        "conv_general_dilated conv_transpose"
    ).split(),
    _FLOAT32: (
        "softmax log_softmax logsumexp layer_norm batch_norm group_norm instance_norm "
        "rms_norm standardize sum prod mean var std cumsum cumprod norm loss "
        "cross_entropy softmax_cross_entropy "
        "softmax_cross_entropy_with_integer_labels sigmoid_binary_cross_entropy "
        "squared_error l2_loss mse_loss l1_loss huber_loss kl_divergence ctc_loss"
    ).split(),
    _WIDEST: (
        "add subtract sub multiply mul divide div where concatenate cat stack"
    ).split(),
}
_KINDS = {name: kind for kind, names in OPERATIONS.items() for name in names}

_DTYPES = ("float16", "bfloat16", "float32", "float64")


@dataclasses.dataclass(frozen=True)
class Policy:
    """The dtypes of a model.

        policy = Policy.parse("params=float32,compute=bfloat16,output=float32")
        nn.Dense(
            features, dtype=policy.dtype_of("dense"), param_dtype=policy.param_dtype
        )
        nn.LayerNorm(
            dtype=policy.dtype_of("layer_norm"), param_dtype=policy.param_dtype
        )
        # in float32, whatever the dtype of scores is
        weights = policy.op(jax.nn.softmax)(scores)

    A policy is data and changes nothing by itself: code in other dtypes uses another
    policy. `Policy()` is float32 everywhere. Casts change arrays of float16, bfloat16,
    float32 and float64. They leave alone FP8 state, FP8 codes and their scales (of a
    QTensor they cast the `source`), integers, booleans, complex numbers, PRNG keys and
    Python numbers.

    Attributes:
        param_dtype: the dtype in which parameters are stored, and updated by the
            optimizer.
        compute_dtype: the dtype in which matrix products and convolutions read their
            operands.
        output_dtype: the dtype of the model's results.

    Raises:
        ValueError: a dtype is not float16, bfloat16, float32 or float64.
    """

    param_dtype: Any = jnp.float32
    compute_dtype: Any = jnp.float32
    output_dtype: Any = jnp.float32

    def __post_init__(self) -> None:
        for name, dtype in list(vars(self).items()):
            dtype = _float_dtype(f"Policy: {name}", dtype)
            object.__setattr__(self, name, dtype)

    @classmethod
    def parse(cls, text: str) -> "Policy":
        """Parse a policy such as `"params=float32,compute=bfloat16,output=float32"`.

        Args:
            text: the dtypes of params, compute and output, in any order.

        Raises:
            ValueError: `text` has not each of the three names once, or an unknown
                dtype.
        """
        where = f"Policy.parse: {text!r}"
        given = {}
        for part in text.split(","):
            name, _, dtype = part.partition("=")
            given[name.strip()] = dtype.strip()
        names = "params", "compute", "output"
        if text.count("=") != 3 or given.keys() != set(names):
            raise ValueError(
                f"{where}: expected params, compute and output, each once, as in "
                f"params=float32,compute=bfloat16,output=float32, got {list(given)}"
            )
        return cls(*(_float_dtype(where, given[name]) for name in names))

    def __str__(self) -> str:
        return (
            f"params={self.param_dtype},compute={self.compute_dtype},"
            f"output={self.output_dtype}"
        )

    def cast_to_param(self, tree: Tree) -> Tree:
        """Cast the floats of `tree` to `param_dtype`."""
        return _cast(tree, self.param_dtype)

    def cast_to_compute(self, tree: Tree) -> Tree:
        """Cast the floats of `tree` to `compute_dtype`."""
        return _cast(tree, self.compute_dtype)

    def cast_to_output(self, tree: Tree) -> Tree:
        """Cast the floats of `tree` to `output_dtype`."""
        return _cast(tree, self.output_dtype)

    def dtype_of(self, operation: str) -> np.dtype | None:
        """Return the dtype in which an operation runs.

        | operations | dtype |
        |---|---|
        | matrix products, convolutions, the layers made of them | `compute_dtype` |
        | softmax, norms, reductions, losses | float32; float64 if `compute_dtype` is |
        | add, multiply, concatenate and the like | None: the widest of the inputs |

        None means the same as `dtype=None` in Flax's layers.

        Args:
            operation: the name of an operation, such as `"softmax"` or `"matmul"`;
                `LayerNorm` is the same as `layer_norm`, `RMSNorm` as `rms_norm`.

        Raises:
            ValueError: the table has no such operation.
        """
        kind = _kind_of(operation)
        if kind == _WIDEST:
            return None
        if kind == _COMPUTE or self.compute_dtype.itemsize >= 4:
            return self.compute_dtype
        return np.dtype(np.float32)

    def op(
        self, function: Callable[..., Any], like: str | None = None
    ) -> Callable[..., Any]:
        """Return `function` in the dtype of its operation in the table of `dtype_of`.

            policy.op(jnp.matmul)(a, b)                      # in compute_dtype
            policy.op(jax.nn.softmax)(scores)                # in float32
            policy.op(jnp.add)(half, full)                   # in float32, the widest
                                                             # dtype of the arguments
            policy.op(my_loss, like="loss")(logits, labels)  # in float32

        Floats among the arguments are cast. Operations other than products and
        convolutions leave arguments of a wider dtype as they are. Results have the
        dtypes that `function` gives them.

        Args:
            function: any function of arrays.
            like: the operation of `dtype_of` that `function` counts as; None is the
                name of `function`.

        Raises:
            ValueError: the table has no such operation.
        """
        name = like or getattr(function, "__name__", repr(function))
        dtype = self.dtype_of(name)
        # Only products and convolutions narrow their inputs: elsewhere wider floats
        # stay.
        narrows = _kind_of(name) == _COMPUTE

        @functools.wraps(function)
        def cast_and_call(*args, **kwargs):
            if dtype is None:  # by JAX's promotion, also where it is strict
                with jax.numpy_dtype_promotion("standard"):
                    return function(*args, **kwargs)
            args, kwargs = _cast((args, kwargs), dtype, narrows)
            return function(*args, **kwargs)

        return cast_and_call


def _kind_of(operation):
    name = re.sub(
        r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", operation
    ).lower()
    if name not in _KINDS:
        raise ValueError(
            f"Policy: operation: expected one of {sorted(_KINDS)}, got {operation!r}; "
            "pass like= with one of these, or use compute_dtype or float32 by name"
        )
    return _KINDS[name]


def _cast(tree, dtype, narrows=True):
    def cast(leaf):
        return leaf.astype(dtype if narrows else promoted(leaf.dtype, dtype))

    return map_outside_state(cast, tree, is_float)


def _float_dtype(where, dtype) -> np.dtype:
    name = dtype
    # `jnp.dtype(None)` is float64, but None, which Flax's layers take as a dtype, is no
    # choice here; nor is "f8" float64.
    if dtype is not None and not isinstance(dtype, str):
        with contextlib.suppress(TypeError):
            name = jnp.dtype(dtype).name
    if name not in _DTYPES:
        raise ValueError(
            f"{where}: expected float16, bfloat16, float32 or float64, got {dtype!r}"
        )
    return jnp.dtype(name)
