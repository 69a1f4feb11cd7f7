"""block_scaled_matmul: the FP8 GEMM of operands that have a scale for each block."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import _tpu
from . import _blocks, _checks, _shapes
from ._primitive import ONE
from ._scaled_matmul import ALIGNMENT, E5M2, call_cublaslt
from ._shapes import Product, rescaled


def block_scaled_matmul(
    a: ArrayLike,
    b: ArrayLike,
    a_scale_inv: ArrayLike,
    b_scale_inv: ArrayLike,
    *,
    a_block: tuple[int | None, int | None] | None = None,
    b_block: tuple[int | None, int | None] | None = None,
    bias: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    precise: bool = False,
    power_2_scale: bool = False,
    batch: int | None = None,
    contracting: int = 1,
) -> jax.Array:
    """Multiply two FP8 matrices and scale each back block by block.

    Equivalent to, in f32 and rounded once at the end, where each element has the scale
    of its block:

        ((a * a_scales) @ (b * b_scales).mT + bias).astype(out_dtype)

    On NVIDIA GPUs cuBLASLt multiplies in FP8 where it reads the scales. On compute
    capability 9.0 these are float32 scales of `(1, None)` by `(1, None)`, `(1, 128)` by
    `(1, 128)`, and `(1, 128)` by `(128, 128)` in either order. From 10.0 on these are
    E8M0 scales of `(1, 32)` by `(1, 32)`, and with `power_2_scale` the float32 scales
    of 9.0, which are converted to E8M0 exactly. cuBLASLt does not multiply two
    float8_e5m2. For other operands the reference runs, after one warning on a GPU with
    FP8; `implementation("ffi")` raises there.

    The reference multiplies codes by scales before one product with f32 accumulation:
    in bfloat16, where that is exact (E8M0 scales), else in f32. Scales that are one
    number along the whole contraction, `(r, None)` or None, multiply the product.
    Against the exact product of dequantized numbers, with `S = sum(|a_k b_k|)`:
    `|error| <= (K + 5) * 2**-24 * S` before the last rounding; numbers below 2**-126
    may be lost. On a GPU the sum is that of its tensor cores, as for `scaled_matmul`;
    where scales differ along k, each block is a sum of its own.

    Args:
        a: float8_e4m3fn or float8_e5m2 `[..., m, k]`.
        b: float8_e4m3fn or float8_e5m2 `[..., n, k]`.
        a_scale_inv: with `a_block=(r, c)` float32 or float8_e8m0fnu
            `[..., ceil(m / r), ceil(k / c)]`, as `quantize_blocks` gives it; without
            `a_block` f32[] or f32[1].
        b_scale_inv: the same for b, with n in place of m.
        a_block, b_block: `(rows, columns)` of a block, where None in the pair stands
            for all rows or columns. The default None means one scale for the operand.
        bias: bfloat16, float16 or float32 `[..., n]`, added to every row.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off, as in `scaled_matmul`; products with
            scales along k never have it.
        power_2_scale: whether float32 scales of blocks are powers of two, as
            `quantize_blocks` makes them with the same option. A GPU that converts them
            to E8M0 takes any other scale as NaN.
        batch: the number of leading dimensions that a and b share. m and n are then any
            numbers of dimensions, and blocks cut the merged matrix; by default m and n
            are one dimension each.
        contracting: the number of dimensions that k stands for.

    Returns:
        `[..., m, n]` of `out_dtype`.

    Raises:
        NotImplementedError: the program is for TPUs, and scales change along the
            contraction.
        RuntimeError: `implementation("ffi")` asks for a custom call that a GPU of the
            program does not have.
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape, or a block is not a pair of positive
            ints or Nones.
    """
    op = "block_scaled_matmul"
    a, b, (leading, m, n, k), biases, fields = _shapes.checked_product(
        op, a, b, bias, batch, contracting, out_dtype, precise
    )
    a_scale_inv, a_block = _blocks.checked_scale(
        op, "a_", a_scale_inv, a_block, leading, m, k
    )
    b_scale_inv, b_block = _blocks.checked_scale(
        op, "b_", b_scale_inv, b_block, leading, n, k
    )
    power_2_scale = _checks.flag(op, "power_2_scale", power_2_scale)
    product = _BlockScaledMatmul(
        **fields, power_2_scale=power_2_scale, a_block=a_block, b_block=b_block
    )
    return product(a, b, a_scale_inv, b_scale_inv, *biases)[0]


@dataclasses.dataclass(frozen=True)
class _Side:
    """One operand of a product in jnp: codes `[*leading, *rows, *k]`, their scales and
    the block of a scale.
    """

    codes: object
    scales: object
    block: tuple | None
    leading: int
    contracting: int

    @property
    def rows(self):
        return self.codes.shape[self.leading : self.codes.ndim - self.contracting]

    @property
    def matrix(self):
        """Return the size of the merged matrix."""
        return _shapes.merged(self.codes.shape[self.leading :], len(self.rows))

    @property
    def scales_rows(self):
        """Return whether a scale is one number along the whole contraction."""
        if self.block is None:
            return True
        _, count = _blocks.count(self.block, *self.matrix)
        return count in (0, 1) and not self.is_exact

    @property
    def is_exact(self):
        """Return whether the product of a code and its scale is exact in bfloat16."""
        return self.scales.dtype == _blocks.E8M0

    def widened(self, dtype):
        """Widen the codes, and multiply them by their scales unless the scales multiply
        the product.
        """
        values = self.codes.astype(dtype)
        if self.scales_rows:
            return values
        return _blocks.scaled(values, self.scales, self.block, *self.matrix)

    def row_scales(self):
        """Return the scale of each row, f32 `[*leading, *rows]` or
        `[*leading, 1, ...]`, where a scale is one number along the contraction.
        """
        scales = self.scales
        if self.block is None:
            # f32 [*vmapped, 1]
            ones = self.leading + len(self.rows) - scales.ndim + 1
            return scales.reshape(*scales.shape[:-1], *[1] * ones)
        # Without any column the contraction is empty, and its sum is zero whatever the
        # scale.
        if not scales.shape[-1]:
            scales = jnp.ones((*scales.shape[:-1], 1), jnp.float32)
        spread = _blocks.spread(scales, (self.block[0], 1), self.matrix[0], 1)
        return spread.reshape(*self.codes.shape[: self.leading], *self.rows)


class _BlockScaledMatmul(Product):
    """The operands are a, b, a_scale_inv, b_scale_inv, and bias if `has_bias`.

    Attributes:
        power_2_scale: whether float32 scales of blocks are powers of two.
        a_block, b_block: `(rows, columns)` of a block; None for an operand with one
            scale.
        as_mx: whether the GPUs multiply float32 scales as E8M0; this is known when a
            program is lowered.
    """

    name = "block_scaled_matmul"
    power_2_scale: bool = False
    a_block: tuple | None = None
    b_block: tuple | None = None
    as_mx: bool = False

    def modes(self, a_scale_inv, b_scale_inv):
        """Return cuBLASLt's modes for the scales of both operands; None where it has no
        mode.
        """
        a_mode = _blocks.mode(self.a_block, a_scale_inv.dtype)
        return a_mode, _blocks.mode(self.b_block, b_scale_inv.dtype)

    def names(self, a, b, *_):
        leading, m, n, k = self.dimensions(b)
        a_scales = ONE if self.a_block is None else (*leading, "a_rows", "a_cols")
        b_scales = ONE if self.b_block is None else (*leading, "b_rows", "b_cols")
        operands = [leading + m + k, leading + n + k, a_scales, b_scales]
        return operands + [leading + n] * self.has_bias, [leading + m + n]

    def reference(self, *operands):
        """Multiply whole tensors, so that XLA can partition the product."""
        a, b, a_scale_inv, b_scale_inv, bias, _ = self.split(operands)
        leading = self.leading
        # 1. Widen the codes, with the scales that change along the contraction.
        dimensions = leading, self.contracting
        sides = [
            _Side(a, a_scale_inv, self.a_block, *dimensions),
            _Side(b, b_scale_inv, self.b_block, *dimensions),
        ]
        of_rows = [side.scales_rows for side in sides]
        exact = all(side.is_exact or side.scales_rows for side in sides)
        if not _tpu.is_target():
            wide = jnp.bfloat16 if exact else jnp.float32
            a, b = (side.widened(wide) for side in sides)
        elif not all(of_rows):
            raise NotImplementedError(
                "block_scaled_matmul: expected one scale for each row or for the "
                f"tensor, got blocks {self.a_block} by {self.b_block}: TPUs have no "
                "such FP8 product, and XLA compiles a slow one for minutes. Take "
                "DelayedScaling, Float8CurrentScaling, StaticScaling or "
                'Float8RowwiseScaling; jaxfp8.ops.implementation("reference") runs '
                "blocks without FP8 products"
            )
        # Scaled f32 operands have all their bits: GPUs must not cut them to TF32.
        precision = None if exact else lax.Precision.HIGHEST

        def product(*operands, dtype=jnp.float32):
            return self.dot(*operands, dtype, precision)

        def on_cpu(*operands):
            # XLA:CPU has no product of transposed bfloat16 with an f32 result; the
            # barrier keeps transposes out of it.
            return product(*lax.optimization_barrier(operands))

        def in_f32(*operands):
            return lax.platform_dependent(*operands, cpu=on_cpu, default=product)

        if exact and not (self.has_bias or any(of_rows)):
            # cuBLASLt rounds its f32 sums itself; XLA would write them in f32 and read
            # them again.
            rounded = functools.partial(product, dtype=self.out_dtype)

            def in_two_steps(*operands):
                return in_f32(*operands).astype(self.out_dtype)

            return (lax.platform_dependent(a, b, cuda=rounded, default=in_two_steps),)
        # 2. Multiply, and apply the scales that are one number along the contraction.
        out, columns, factors = in_f32(a, b), leading + self.rows, []
        axes = range(columns, out.ndim), range(leading, columns)
        for side, axis in zip(sides, axes, strict=True):
            if side.scales_rows:
                factors.append(jnp.expand_dims(side.row_scales(), tuple(axis)))
        if len(factors) == 2:
            out = rescaled(out, *factors, jnp.broadcast_to)
        elif factors:
            out = out * jnp.broadcast_to(*factors, out.shape)
        return self.finish(out, bias)

    # XLA may rewrite the product in jnp to calls of cuBLASLt.
    cpu = by_xla = reference

    def cuda(self, *operands):
        """Make one custom call on groups: a `[g, m, k]`, b `[g, n, k]`. XLA adds the
        bias.
        """
        # 1. Merge the dimensions to groups of matrices.
        a, b, *scales, bias, _ = self.split(operands)
        modes = ("1x32", "1x32") if self.as_mx else self.modes(*scales)
        a, b, shape = self.groups(a, b)
        (*groups, m, k), n = a.shape, b.shape[-2]
        if 0 in (*groups, m, n, k):
            return self.reference(*operands)
        # 2. Order the scales as cuBLASLt reads them.
        call_operands, blocks = [a, b], (self.a_block, self.b_block)
        for scale, block, mode, rows in zip(scales, blocks, modes, (m, n), strict=True):
            scale = _shapes.merge(scale, self.leading, 1)
            if self.as_mx:
                scale = _blocks.as_mx(scale, block, rows, k)
            scale = _blocks.to_stored(scale, mode, rows + -rows % ALIGNMENT)
            call_operands.append(scale)
        # 3. Multiply whole blocks and aligned rows, and add the bias.
        out = call_cublaslt(
            "block_scaled_matmul",
            *call_operands,
            depth=max(map(_blocks.depth, modes)),
            shape=shape,
            dtype=jnp.float32 if self.has_bias else self.out_dtype,
            # Fast accumulation would span blocks, whose scales differ.
            precise=self.precise or modes[0] != "rows",
            a_scales=modes[0],
            b_scales=modes[1],
        )
        return self.finish(out, bias)

    def not_on(self, capabilities, a, b, a_scale_inv, b_scale_inv, *_):
        """Return why cuBLASLt cannot multiply these operands on GPUs of these compute
        capabilities; or None.
        """
        if a.dtype == b.dtype == E5M2:
            return "block_scaled_matmul: no tensor core multiplies two float8_e5m2"
        modes = self.modes(a_scale_inv, b_scale_inv)
        reason = _blocks.missing(modes, capabilities, self.power_2_scale)
        if reason is None:
            return None
        return (
            f"block_scaled_matmul: {reason} (scales are {a_scale_inv.dtype} of "
            f"{self.a_block} by {b_scale_inv.dtype} of {self.b_block})"
        )

    def for_gpus(self, capabilities, a, b, a_scale_inv, b_scale_inv, *_):
        """Return the op for GPUs of these compute capabilities."""
        modes = self.modes(a_scale_inv, b_scale_inv)
        as_mx = _blocks.runs_as_mx(modes, capabilities, self.power_2_scale)
        return dataclasses.replace(self, as_mx=as_mx)

    def align(self, axes, sizes, mesh_shape):
        (a_rows, a_cols) = self.a_block or (None, None)
        (b_rows, b_cols) = self.b_block or (None, None)
        followers = {
            "m": {"a_rows": a_rows},
            "n": {"b_rows": b_rows},
            "k": {"a_cols": a_cols, "b_cols": b_cols},
        }
        return _blocks.aligned(axes, sizes, mesh_shape, followers)
