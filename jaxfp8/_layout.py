"""Any dot_general as a batch of matrix products: which dimensions an operand groups, keeps and contracts."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Layout:
    """How an operand becomes `[g, rows, cols]`: a reshape where its dimensions allow, else a transpose and a reshape.

    Attributes:
        shape: of the operand.
        batch, free, contract: its dimensions by their part in the product. `contract` has the order of the partner's.
    """

    shape: tuple[int, ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]
    contract: tuple[int, ...]

    @property
    def contract_first(self) -> bool:
        """Whether the contracting dimension is `rows` (else `cols`)."""
        return self.batch + self.contract + self.free == tuple(range(len(self.shape))) and bool(self.contract)

    def sizes(self, dims) -> tuple[int, ...]:
        return tuple(self.shape[d] for d in dims)

    @property
    def _groups(self) -> tuple[tuple[int, ...], ...]:
        """The dimensions that become g, rows and cols."""
        return (self.batch, self.contract, self.free) if self.contract_first else (self.batch, self.free, self.contract)

    def to_matrices(self, x):
        """`x` as `[g, rows, cols]`."""
        x = jnp.transpose(x, sum(self._groups, ()))
        return x.reshape([math.prod(self.sizes(dims)) for dims in self._groups])

    def from_matrices(self, x):
        """What `to_matrices` was given."""
        order = sum(self._groups, ())
        return jnp.transpose(x.reshape(self.sizes(order)), np.argsort(order))


def layouts(x_shape, kernel_shape, dimension_numbers) -> tuple[Layout, Layout, tuple[int, ...]]:
    """The layouts of both operands of `jax.lax.dot_general`, and the shape of the result.

    Raises:
        ValueError: the dimension numbers do not fit the shapes.
    """
    (x_contract, kernel_contract), (x_batch, kernel_batch) = dimension_numbers
    for name, x_dims, kernel_dims in (
        ("contracting", x_contract, kernel_contract),
        ("batch", x_batch, kernel_batch),
    ):
        in_range = all(0 <= d < len(x_shape) for d in x_dims) and all(0 <= d < len(kernel_shape) for d in kernel_dims)
        if not in_range or [x_shape[d] for d in x_dims] != [kernel_shape[d] for d in kernel_dims]:
            raise ValueError(
                f"dot_general: dimension_numbers: {name} dimensions {tuple(x_dims)} of x{tuple(x_shape)} and "
                f"{tuple(kernel_dims)} of kernel{tuple(kernel_shape)} must exist and agree in size"
            )
    # In the order in which x holds them: with the usual kernels no operand then needs a transpose.
    pairs = sorted(zip(x_contract, kernel_contract, strict=True))
    x = _layout("x", x_shape, x_batch, [p[0] for p in pairs])
    kernel = _layout("kernel", kernel_shape, kernel_batch, [p[1] for p in pairs])
    return x, kernel, (*x.sizes(x.batch), *x.sizes(x.free), *kernel.sizes(kernel.free))


def _layout(name, shape, batch, contract) -> Layout:
    used = (*batch, *contract)
    if len(set(used)) != len(used):
        raise ValueError(f"dot_general: dimension_numbers: a dimension of {name}{tuple(shape)} is named twice: {used}")
    free = tuple(d for d in range(len(shape)) if d not in used)
    return Layout(tuple(shape), tuple(batch), free, tuple(contract))
