"""block_scaled_matmul: the FP8 GEMM of operands that have a scale for each block."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..numerics import _tpu
from . import _blocks, _checks, _ffi, _shapes
from ._primitive import ONE, Op
from ._scaled_matmul import ALIGNMENT, E5M2, WORKSPACE_BYTES
from ._shapes import ProductSpec, bias_operands, rescaled


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
    a, b, leading, m, n, k = _checks.product(op, a, b, batch, contracting)
    a_scale_inv, a_block = _blocks.checked_scale(
        op, "a_", a_scale_inv, a_block, leading, m, k
    )
    b_scale_inv, b_block = _blocks.checked_scale(
        op, "b_", b_scale_inv, b_block, leading, n, k
    )
    spec = _Spec(
        out_dtype=_checks.dtype(op, "out_dtype", out_dtype, _checks.HIGH_PRECISION),
        precise=_checks.flag(op, "precise", precise),
        has_bias=bias is not None,
        batch=len(leading),
        rows=len(m),
        contracting=contracting,
        power_2_scale=_checks.flag(op, "power_2_scale", power_2_scale),
        a_block=a_block,
        b_block=b_block,
    )
    biases = bias_operands(op, bias, (*leading, *n))
    return _block_scaled_matmul(a, b, a_scale_inv, b_scale_inv, *biases, spec=spec)[0]


@dataclasses.dataclass(frozen=True)
class _Spec(ProductSpec):
    """The static part of one product; the operands are a, b, a_scale_inv, b_scale_inv,
    and bias if `has_bias`.

    Attributes:
        power_2_scale: whether float32 scales of blocks are powers of two.
        a_block, b_block: `(rows, columns)` of a block; None for an operand with one
            scale.
        as_mx: whether the GPUs multiply float32 scales as E8M0; this is known when a
            program is lowered.
    """

    power_2_scale: bool
    a_block: tuple | None
    b_block: tuple | None
    as_mx: bool = False


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
    def matrix(self):
        """Return the size of the merged matrix."""
        rows = self.codes.shape[self.leading : self.codes.ndim - self.contracting]
        return math.prod(rows), math.prod(
            self.codes.shape[self.codes.ndim - self.contracting :]
        )

    @property
    def scales_rows(self):
        """Return whether a scale is one number along the whole contraction."""
        if self.block is None:
            return True
        count = _blocks.count(self.block, *self.matrix)[1]
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
        return (
            values
            if self.scales_rows
            else _blocks.scaled(values, self.scales, self.block, *self.matrix)
        )

    def row_scales(self):
        """Return the scale of each row, f32 `[*leading, *rows]` or
        `[*leading, 1, ...]`; None if `widened` uses it.
        """
        rows = self.codes.shape[self.leading : self.codes.ndim - self.contracting]
        if not self.scales_rows:
            return None
        if self.block is None:
            vmapped = self.scales.shape[:-1]
            return self.scales.reshape(
                *vmapped, *[1] * (self.leading - len(vmapped) + len(rows))
            )
        spread = _blocks.spread(
            self.scales, (self.block[0], 1), self.matrix[0], self.scales.shape[-1]
        )
        # Without any column the contraction is empty, and its sum is zero whatever the
        # scale.
        spread = (
            spread[..., 0]
            if spread.shape[-1]
            else jnp.ones(spread.shape[:-1], jnp.float32)
        )
        return spread.reshape(*self.codes.shape[: self.leading], *rows)


def _modes(a_scale_inv, b_scale_inv, spec):
    """Return cuBLASLt's modes for the scales of both operands; None where it has no
    mode.
    """
    pairs = (a_scale_inv, spec.a_block), (b_scale_inv, spec.b_block)
    return tuple(_blocks.mode(block, scale.dtype) for scale, block in pairs)


class _BlockScaledMatmul(Op):
    name = "block_scaled_matmul"

    def names(self, a, b, *_, spec):
        leading, m, n, k = spec.names(b)
        a_scales = ONE if spec.a_block is None else (*leading, "a_rows", "a_cols")
        b_scales = ONE if spec.b_block is None else (*leading, "b_rows", "b_cols")
        return [
            leading + m + k,
            leading + n + k,
            a_scales,
            b_scales,
            *[leading + n] * spec.has_bias,
        ], [leading + m + n]

    def dtypes(self, *operands, spec):
        return [spec.out_dtype]

    def added(self, spec):
        return range(4, 4 + spec.has_bias)

    def reference(self, a, b, a_scale_inv, b_scale_inv, *bias, vmap_dims, spec):
        """Multiply whole tensors, so that XLA can partition the product."""
        leading = vmap_dims + spec.batch
        # 1. Widen the codes, with the scales that change along the contraction.
        sides = [_Side(a, a_scale_inv, spec.a_block, leading, spec.contracting)]
        sides += [_Side(b, b_scale_inv, spec.b_block, leading, spec.contracting)]
        if _tpu.is_target() and not all(side.scales_rows for side in sides):
            raise NotImplementedError(
                "block_scaled_matmul: expected one scale for each row or for the "
                f"tensor, got blocks {spec.a_block} by {spec.b_block}: TPUs have no "
                "such FP8 product, and XLA compiles a slow one for minutes. Take "
                "DelayedScaling, Float8CurrentScaling, StaticScaling or "
                'Float8RowwiseScaling; jaxfp8.ops.implementation("reference") runs '
                "blocks without FP8 products"
            )
        exact = all(side.is_exact or side.scales_rows for side in sides)
        wide = jnp.bfloat16 if exact else jnp.float32
        operands = [
            side.codes if _tpu.is_target() else side.widened(wide) for side in sides
        ]
        # Scaled f32 operands have all their bits: GPUs must not cut them to TF32.
        precision = None if exact else lax.Precision.HIGHEST

        def product(*operands, dtype):
            return spec.dot(*operands, vmap_dims, dtype, precision)

        def in_f32(*operands):
            # XLA:CPU has no product of transposed bfloat16 with an f32 result; the
            # barrier keeps transposes out of it.
            plain = functools.partial(product, dtype=jnp.float32)
            on_cpu = lambda *operands: plain(*lax.optimization_barrier(operands))  # noqa: E731
            return lax.platform_dependent(*operands, cpu=on_cpu, default=plain)

        if exact and not spec.has_bias and not any(side.scales_rows for side in sides):
            # cuBLASLt rounds its f32 sums itself; XLA would write them in f32 and read
            # them again.
            rounded = functools.partial(product, dtype=spec.out_dtype)
            in_two_steps = lambda *operands: in_f32(*operands).astype(spec.out_dtype)  # noqa: E731
            return (
                lax.platform_dependent(*operands, cuda=rounded, default=in_two_steps),
            )
        # 2. Multiply. 3. Apply the scales that are one number along the contraction.
        out = in_f32(*operands)
        factors = []
        for side, first in zip(sides, (leading, leading + spec.rows), strict=True):
            scale = side.row_scales()
            if scale is not None:
                axes = (*range(leading), *range(first, first + scale.ndim - leading))
                factors.append(
                    jnp.expand_dims(scale, tuple(set(range(out.ndim)) - set(axes)))
                )
        if len(factors) == 2:
            out = rescaled(
                out, *factors, lambda factor: jnp.broadcast_to(factor, out.shape)
            )
        elif factors:
            out = out * jnp.broadcast_to(factors[0], out.shape)
        return (
            spec.add_bias(out, *(bias or [None]), vmap_dims).astype(spec.out_dtype),
        )

    # XLA may rewrite the product in jnp to calls of cuBLASLt.
    cpu = by_xla = reference

    def cuda(self, a, b, a_scale_inv, b_scale_inv, *bias, vmap_dims, spec):
        """Make one custom call on groups: a `[g, m, k]`, b `[g, n, k]`. XLA adds the
        bias.
        """
        # 1. Merge the dimensions to groups of matrices.
        modes = (
            ("1x32", "1x32") if spec.as_mx else _modes(a_scale_inv, b_scale_inv, spec)
        )
        *codes, shape = spec.groups(a, b, vmap_dims)
        (*groups, m, k), n = codes[0].shape, codes[1].shape[-2]
        if 0 in (*groups, m, n, k):
            return self.reference(
                a, b, a_scale_inv, b_scale_inv, *bias, vmap_dims=vmap_dims, spec=spec
            )
        scales = [
            _shapes.merge(scale, vmap_dims + spec.batch, 1)
            for scale in (a_scale_inv, b_scale_inv)
        ]
        if spec.as_mx:
            blocks = spec.a_block, spec.b_block
            scales = [
                _blocks.as_mx(*scaled, k)
                for scaled in zip(scales, blocks, (m, n), strict=True)
            ]
        # 2. Pad to whole blocks and aligned rows, and order the scales as cuBLASLt
        #    reads them.
        depth = -k % max(map(_blocks.depth, modes))
        codes = [_shapes.pad(x, -x.shape[-2] % ALIGNMENT, depth) for x in codes]
        rows = [x.shape[-2] for x in codes]
        scales = [
            _blocks.to_stored(*scaled)
            for scaled in zip(scales, modes, rows, strict=True)
        ]
        # 3. Multiply, cut off the padding and add the bias.
        dtype = jnp.float32 if spec.has_bias else spec.out_dtype
        results = [((*groups, *rows), dtype), ((WORKSPACE_BYTES,), jnp.uint8)]
        # Fast accumulation would span blocks, whose scales differ.
        precise = spec.precise or modes[0] != "rows"
        out, _ = _ffi.call(
            "block_scaled_matmul",
            results,
            *codes,
            *scales,
            precise=precise,
            a_scales=modes[0],
            b_scales=modes[1],
        )
        out = spec.add_bias(
            out[..., :m, :n].reshape(shape), *(bias or [None]), vmap_dims
        )
        return (out.astype(spec.out_dtype),)

    def not_on(self, capabilities, a, b, a_scale_inv, b_scale_inv, *_, spec):
        """Return why cuBLASLt cannot multiply these operands on GPUs of these compute
        capabilities; or None.
        """
        if a.dtype == b.dtype == E5M2:
            return "block_scaled_matmul: no tensor core multiplies two float8_e5m2"
        reason = _blocks.missing(
            _modes(a_scale_inv, b_scale_inv, spec), capabilities, spec.power_2_scale
        )
        a_scales, b_scales = (
            f"{a_scale_inv.dtype} of {spec.a_block}",
            f"{b_scale_inv.dtype} of {spec.b_block}",
        )
        return (
            None
            if reason is None
            else f"block_scaled_matmul: {reason} (scales are {a_scales} by {b_scales})"
        )

    def for_gpus(self, capabilities, a, b, a_scale_inv, b_scale_inv, *_, spec):
        """Return the spec of `cuda` on GPUs of these compute capabilities."""
        modes = _modes(a_scale_inv, b_scale_inv, spec)
        as_mx = _blocks.runs_as_mx(modes, capabilities, spec.power_2_scale)
        return dataclasses.replace(spec, as_mx=as_mx)

    def align(self, axes, sizes, mesh_shape, spec):
        (a_rows, a_cols), (b_rows, b_cols) = (
            block or (None, None) for block in (spec.a_block, spec.b_block)
        )
        followers = {
            "m": {"a_rows": a_rows},
            "n": {"b_rows": b_rows},
            "k": {"a_cols": a_cols, "b_cols": b_cols},
        }
        return _blocks.aligned(axes, sizes, mesh_shape, followers)


_block_scaled_matmul = _BlockScaledMatmul()
