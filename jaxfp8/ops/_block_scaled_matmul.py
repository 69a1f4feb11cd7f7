"""block_scaled_matmul: the FP8 GEMM of operands that have a scale for each block."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import _tpu
from . import _blocks, _checks, _shapes
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
    a, b, (leading, m, n, k), biases, product = _shapes.checked_product(
        _BlockScaledMatmul, a, b, bias, batch, contracting, out_dtype, precise
    )
    a_scale_inv, a_block = _blocks.checked_scale(
        op, "a_", a_scale_inv, a_block, leading, m, k
    )
    b_scale_inv, b_block = _blocks.checked_scale(
        op, "b_", b_scale_inv, b_block, leading, n, k
    )
    product = dataclasses.replace(
        product,
        power_2_scale=_checks.flag(op, "power_2_scale", power_2_scale),
        a_block=a_block,
        b_block=b_block,
    )
    return product(a, b, a_scale_inv, b_scale_inv, *biases)[0]


def _is_factor(scales):
    """Return whether scales are one number along the whole contraction, and multiply
    the product. E8M0 scales multiply the codes: that is exact in bfloat16.
    """
    return scales.dtype != _blocks.E8M0 and scales.shape[-1] == 1


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

    @property
    def blocks(self):
        return self.a_block, self.b_block

    def modes(self, scales):
        """Return cuBLASLt's modes for the scales of both operands; None where it has no
        mode.
        """
        dtypes = [scale.dtype for scale in scales]
        return tuple(map(_blocks.mode, self.blocks, dtypes))

    def scale_names(self, batch, m, n, k):
        a_names = _blocks.scale_names(batch, m, k, self.a_block)
        return a_names, _blocks.scale_names(batch, n, k, self.b_block)

    def widened(self, dtype, x, scales, block):
        """Widen codes, and multiply them by scales that are no factor of the
        product.
        """
        values, rows = x.astype(dtype), x.ndim - self.leading - self.contracting
        if _is_factor(scales):
            return values
        matrix = _shapes.merged(x.shape[self.leading :], rows)
        return _blocks.scaled(values, scales, block, *matrix)

    def factors(self, scales, out):
        """Return the factors of a product out: `[*leading, *m, 1, ...]` of the scales
        of a, and `[*leading, 1, ..., *n]` of those of b.
        """
        columns, factors = self.leading + self.rows, []
        reduced = range(columns, out.ndim), range(self.leading, columns)
        for scale, block, axes in zip(scales, self.blocks, reduced, strict=True):
            shape = [1 if i in axes else size for i, size in enumerate(out.shape)]
            if block is None:
                factors.append(_shapes.stretch(scale, out))
            elif _is_factor(scale):
                size = math.prod(shape[self.leading :])
                scale = _blocks.spread(scale, (block[0], 1), size, 1)
                factors.append(scale.reshape(shape))
        return factors

    def reference(self, *operands):
        """Multiply whole tensors, so that XLA can partition the product."""
        a, b, *scales, bias = self.split(operands)
        # 1. Widen the codes, with the scales that change along the contraction.
        inside = [scale for scale in scales if not _is_factor(scale)]
        exact = all(scale.dtype == _blocks.E8M0 for scale in inside)
        if not _tpu.is_target():
            wide = jnp.bfloat16 if exact else jnp.float32
            a = self.widened(wide, a, scales[0], self.a_block)
            b = self.widened(wide, b, scales[1], self.b_block)
        elif inside:
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

        dtype = jnp.float32
        if exact and len(inside) == 2 and not self.has_bias:
            dtype = self.out_dtype

        def product(*operands, sums=jnp.float32):
            return self.dot(*operands, sums, precision).astype(dtype)

        def on_cpu(*operands):
            # XLA:CPU has no product of transposed bfloat16 with an f32 result; the
            # barrier keeps transposes out of it.
            return product(*lax.optimization_barrier(operands))

        # 2. Multiply, and apply the scales that are one number along the contraction.
        #    cuBLASLt rounds its f32 sums itself; XLA would write them in f32 and read
        #    them again.
        on_cuda = functools.partial(product, sums=dtype)
        out = lax.platform_dependent(a, b, cpu=on_cpu, cuda=on_cuda, default=product)
        factors = self.factors(scales, out)
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
        a, b, *scales, bias = self.split(operands)
        modes = ("1x32", "1x32") if self.as_mx else self.modes(scales)
        a, b, shape = self.groups(a, b)
        (*groups, m, k), n = a.shape, b.shape[-2]
        if 0 in (*groups, m, n, k):
            return self.reference(*operands)
        # 2. Order the scales as cuBLASLt reads them.
        call_operands = [a, b]
        sides = zip(scales, self.blocks, modes, (m, n), strict=True)
        for scale, block, mode, rows in sides:
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
        modes = self.modes((a_scale_inv, b_scale_inv))
        reason = _blocks.missing(modes, capabilities, self.power_2_scale)
        if reason is None:
            return None
        return (
            f"block_scaled_matmul: {reason} (scales are {a_scale_inv.dtype} of "
            f"{self.a_block} by {b_scale_inv.dtype} of {self.b_block})"
        )

    def for_gpus(self, ctx, capabilities):
        modes = self.modes(ctx.avals_in[2:4])
        as_mx = _blocks.runs_as_mx(modes, capabilities, self.power_2_scale)
        return dataclasses.replace(self, as_mx=as_mx)
