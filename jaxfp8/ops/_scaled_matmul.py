"""scaled_matmul: the FP8 GEMM, both operands with the contracting dimension last."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .._jax import _batching, _compat
from ..numerics import _tpu
from . import _checks, _ffi, _shapes
from ._quantize import widening_on_cpu
from ._shapes import Product, rescaled
from ._transpose_codes import turned_codes

# The workspace of cuBLASLt, in bytes: NVIDIA's advice for Hopper, more than Ada needs.
# XLA lends the memory to other steps of the program.
WORKSPACE_BYTES = 32 * 2**20
# cuBLASLt wants 16-byte rows in FP8.
ALIGNMENT = 16

E5M2 = np.dtype(jnp.float8_e5m2)


def scaled_matmul(
    a: ArrayLike,
    b: ArrayLike,
    a_scale_inv: ArrayLike,
    b_scale_inv: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    out_dtype: DTypeLike = jnp.bfloat16,
    precise: bool = False,
    batch: int | None = None,
    contracting: int = 1,
    narrow_sums: bool = False,
    by_halves: bool = False,
    a_t: ArrayLike | None = None,
    b_t: ArrayLike | None = None,
) -> jax.Array:
    """Multiply two FP8 matrices and scale back.

    Equivalent to, in f32 and rounded once at the end:

        out = (a @ b.mT) * (a_scale_inv * b_scale_inv) + bias
        out = out.astype(out_dtype)

    Where `a_scale_inv * b_scale_inv` is not a normal number, the scales multiply one
    after the other: `(a @ b.mT) * a_scale_inv * b_scale_inv`.

    On NVIDIA GPUs cuBLASLt multiplies in FP8; elsewhere the codes are widened, which is
    exact, and multiplied with f32 accumulation: with `K` products,
    `|error| <= K * 2**-24 * sum(|a_k b_k|)` before the last rounding. The tensor cores
    of Ada and Hopper add with 13 bits, in steps of 16 and 32 products (docs/numerics.md
    has the bound).

    Args:
        a: float8_e4m3fn or float8_e5m2 `[..., m, k]`.
        b: float8_e4m3fn or float8_e5m2 `[..., n, k]`.
        a_scale_inv: f32[] or f32[1].
        b_scale_inv: f32[] or f32[1].
        bias: bfloat16, float16 or float32 `[..., n]`, added to every row.
        out_dtype: bfloat16, float16 or float32.
        precise: turns fast accumulation off. On Ada and Hopper the tensor cores then
            hand their sums to f32 at intervals, in place of once at the end; bits that
            a step drops stay lost. Elsewhere it changes nothing.
        batch: the number of leading dimensions that a and b share. m and n are then any
            numbers of dimensions; by default m and n are one dimension each.
        contracting: the number of dimensions that k stands for.
        narrow_sums: adds the parts of the result that the TPUs of a mesh have in
            `out_dtype`, where they hold parts of k: half of the bytes between devices
            for bfloat16, and a second rounding. By default TPUs add in f32; other
            devices add in `out_dtype` anyway.
        by_halves: says that the halves of a result `[m, 2, n]` are read apart, such as
            the gradients of two kernels: without a bias one GPU computes each half by a
            product of its own, and copies neither.
        a_t, b_t: a and b as `[..., k, m]` and `[..., k, n]`, if another product reads
            the operands in that layout. On one device a_t and b_t are not read. On a
            mesh, if a or b has to be gathered, a_t or b_t is gathered in its place, so
            that only one layout crosses devices.

    Returns:
        `[..., m, n]` of `out_dtype`.

    Raises:
        TypeError: an argument has another dtype; or the op is differentiated.
        ValueError: an argument has another shape.
    """
    op = "scaled_matmul"
    a, b, (_, _, n, _), terms, product = _shapes.checked_product(
        _ScaledMatmul, a, b, bias, batch, contracting, out_dtype, precise
    )
    a_scale_inv = _checks.scale(op, "a_scale_inv", a_scale_inv)
    b_scale_inv = _checks.scale(op, "b_scale_inv", b_scale_inv)
    is_pair = len(n) == 2 == n[0] and not terms
    second = {i: x for i, x in enumerate((a_t, b_t)) if x is not None}
    product = dataclasses.replace(
        product,
        second=tuple(second),
        narrow_sums=_checks.flag(op, "narrow_sums", narrow_sums),
        by_halves=_checks.flag(op, "by_halves", by_halves) and is_pair,
    )
    return product(a, b, a_scale_inv, b_scale_inv, *terms, *second.values())[0]


def to_f32(codes):
    """Widen by a cast to f32, which XLA fuses on most platforms. XLA:CPU has no
    transposed products of bfloat16.

    Programs for TPUs multiply the codes as they are.
    """
    return codes if _tpu.is_target() else codes.astype(jnp.float32)


def _spaced(scale):
    """Space scales `[s]` as `[s, 4]`: cuBLASLt reads each at 16 bytes. `[1]` stays: XLA
    aligns buffers.
    """
    (count,) = scale.shape
    return scale if count == 1 else lax.broadcast_in_dim(scale, (count, 4), (0,))


def call_cublaslt(name, a, b, *more, depth, shape, dtype, **attributes):
    """Make one custom call on groups: a `[g, m, k]`, b `[g, n, k]`.

    Args:
        name: the name of the custom call.
        a, b: the codes. Every size is padded; zeros add nothing to a sum.
        *more: further operands, padded as well.
        depth: the multiple to which k is padded.
        shape, dtype: those of the result.
        **attributes: the attributes of the custom call.
    """
    (*groups, m, k), n = a.shape, b.shape[-2]
    a, b = (_shapes.pad(x, -x.shape[-2] % ALIGNMENT, -k % depth) for x in (a, b))
    results = [
        ((*groups, a.shape[-2], b.shape[-2]), dtype),
        ((WORKSPACE_BYTES,), jnp.uint8),
    ]
    out, _ = _ffi.call(name, results, a, b, *more, **attributes)
    return out[..., :m, :n].reshape(shape)


def _is_rewritten(a, b, vmap_dims):
    """Return whether XLA has an FP8 product of these operands: one pair of scales, and
    not E5M2 twice.
    """
    return vmap_dims == 0 and not a.dtype == b.dtype == E5M2


def _scalar(scale, dtype):
    """Convert an f32[1] scale as XLA needs it in the pattern.

    If the conversion to bfloat16 here meets XLA's conversion back to f32, XLA drops
    both and hands cuBLASLt the f32 scale, not rounded (`xla_allow_excess_precision`,
    which is on by default). The barrier keeps a reshape from coming between them.
    """
    return lax.optimization_barrier(scale.reshape(())).astype(dtype)


class _ScaledMatmul(Product):
    """The operands bias, a_t and b_t may follow the first four.

    `narrow_sums` says in what dtype TPUs add their parts of the result, `by_halves`
    that its halves are read apart.
    """

    name = "scaled_matmul"
    turned = turned_codes
    narrow_sums: bool = False
    by_halves: bool = False

    def for_gpus(self, ctx, capabilities):
        # Devices of a mesh add one result; before JAX 0.12 XLA copies halves of b.
        is_one = _compat.devices_of(ctx) in _tpu.ONE_DEVICE
        by_halves = self.by_halves and is_one and _compat.gives_parts_in_place
        return dataclasses.replace(self, by_halves=by_halves)

    def reference(self, *operands, widen=to_f32):
        """Widen the codes, which is exact, and multiply whole tensors with f32
        accumulation.
        """
        a, b, a_scale_inv, b_scale_inv, bias = self.split(operands)
        # XLA adds the parts of a product that a mesh has in the dtype of the dot.
        is_narrow = self.narrow_sums and _tpu.devices.value in ("mesh", "unknown")
        dtype = self.out_dtype if is_narrow else jnp.float32
        out = self.dot(widen(a), widen(b), dtype).astype(jnp.float32)
        out = rescaled(out, a_scale_inv, b_scale_inv)
        return self.finish(out, bias)

    def tpu(self, *operands):
        """Multiply by both halves of a pair apart, such as the kernels of gate and
        up.
        """
        a, b, *scales, bias = self.split(operands)
        columns = b.shape[self.leading : -self.contracting]
        if _tpu.are_apart(columns):
            halves = [_tpu.halves(b, self.leading)]
            if bias is not None:
                halves.append(_tpu.halves(bias))
            parts = [
                self.reference(a, kernel, *scales, *half)[0]
                for kernel, *half in zip(*halves, strict=True)
            ]
            # The product of `narrow_sums` is the gradient of a kernel.
            return [_tpu.joined(parts, is_gradient=self.narrow_sums)]
        contracted = b.shape[-self.contracting :]
        if bias is None and _tpu.are_apart(contracted):
            f32 = np.dtype(np.float32)
            in_f32 = dataclasses.replace(self, contracting=1, out_dtype=f32)
            pairs = zip(_tpu.halves(a), _tpu.halves(b), strict=True)
            gate, up = (in_f32.reference(*halves, *scales)[0] for halves in pairs)
            return [(gate + up).astype(self.out_dtype)]
        return self.reference(*operands)

    def cpu(self, *operands):
        """Widen to bfloat16: it has half of f32's bytes, and newer processors multiply
        it natively.
        """
        return self.reference(*operands, widen=widening_on_cpu())

    def cuda(self, *operands):
        """Make one custom call on groups: a `[g, m, k]`, b `[g, n, k]`. XLA adds a
        bias that cuBLASLt does not.
        """
        a, b, *scales, bias = self.split(operands)
        if self.by_halves and len(b.shape) == 2 + self.contracting:
            one = dataclasses.replace(self, by_halves=False)
            halves = [one.cuda(a, half, *scales)[0] for half in _tpu.halves(b, 0)]
            return (jnp.stack(halves, -2),)
        # 1. Merge the dimensions to groups of matrices. No tensor core multiplies E5M2
        #    by E5M2, and cuBLASLt refuses empty operands: leave both to XLA.
        a, b, shape = self.groups(a, b)
        (*groups, m, k), n = a.shape, b.shape[-2]
        if a.dtype == b.dtype == E5M2 or 0 in (*groups, m, n, k):
            return self.reference(*operands)

        # 2. The epilogue takes one bias for all groups, in the output's dtype (bfloat16
        #    for float32). Otherwise the GEMM returns f32 and XLA adds the bias.
        bias_dtype = jnp.float16 if self.out_dtype == np.float16 else jnp.bfloat16
        more = [_spaced(x.reshape(-1)) for x in scales]
        has_bias = self.has_bias and math.prod(groups) == 1 and bias.dtype == bias_dtype
        if has_bias:
            more.append(_shapes.pad(bias.reshape(n), -n % ALIGNMENT))
            bias = None

        # 3. Multiply, and add the bias that the epilogue did not take.
        out = call_cublaslt(
            "scaled_matmul",
            *(a, b, *more),
            depth=ALIGNMENT,
            shape=shape,
            dtype=self.out_dtype if bias is None else jnp.float32,
            precise=self.precise,
            has_bias=has_bias,
            has_accumulator=False,  # the handler can add an f32 array
        )
        return self.finish(out, bias)

    def by_xla(self, *operands):
        """Write the pattern that XLA's GPU compiler rewrites to FP8 products: convert,
        multiply by the scale, dot.

        XLA rewrites the product in the dtype of its operands. With float32 operands a
        bfloat16 result would take another pass for its conversion and the bias; so on
        GPUs the pattern has the dtype bfloat16 if the result has. On other platforms
        bfloat16 operands would be rounded, so the pattern stays in float32.
        """
        in_f32 = functools.partial(self.pattern, dtype=jnp.float32)
        narrow = self.out_dtype == jnp.bfloat16
        if not (narrow and _is_rewritten(*operands[:2], self.vmap_dims)):
            return in_f32(*operands)
        in_bf16 = functools.partial(self.pattern, dtype=jnp.bfloat16)
        return lax.platform_dependent(*operands, cuda=in_bf16, default=in_f32)

    def pattern(self, *operands, dtype):
        """Multiply by the pattern of `by_xla`, with operands of `dtype`."""
        a, b, a_scale_inv, b_scale_inv, bias = self.split(operands)
        scales_inside = _is_rewritten(a, b, self.vmap_dims)
        a, b = a.astype(dtype), b.astype(dtype)
        if scales_inside:
            a_scale, b_scale = _scalar(a_scale_inv, dtype), _scalar(b_scale_inv, dtype)
            a = a * lax.broadcast(a_scale, a.shape)
            b = b * lax.broadcast(b_scale, b.shape)
        # XLA's word for cuBLASLt's fast accumulation is the precision of the dot.
        precision = lax.Precision.HIGHEST if self.precise else lax.Precision.DEFAULT
        out = self.dot(a, b, dtype, precision)
        if not scales_inside:
            # Multiply by one factor: two would be two launches, and XLA's products have
            # no rule for scales that flush.
            out = out * _shapes.spread(a_scale_inv * b_scale_inv, out.shape)
        return self.finish(out, bias)

    def batch_first(self, operands, batch_dims):
        """Merge a batch of a alone, or of b alone, into its rows; make a batch with
        shared scales a batch dimension.
        """
        batched = {i for i, dim in enumerate(batch_dims) if dim is not None}
        # Batched scales need the rule of all ops.
        if batched & {2, 3}:
            return None
        operands, place = list(operands), self.leading
        if batched == {0}:
            # The batch is the first dimension of m.
            op, out_dim = dataclasses.replace(self, rows=self.rows + 1), place
        elif batched == {1} and not self.has_bias:
            # That of n; a bias would have no room for more columns.
            op, out_dim = self, place + self.rows
        else:
            op = dataclasses.replace(self, batch=self.batch + 1)
            place = out_dim = self.vmap_dims
            size, _ = _batching.batch_of(operands, batch_dims)
            batched = set(range(len(operands))) - {2, 3}
        for i in batched:
            x, dim = operands[i], batch_dims[i]
            if dim is None:
                x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
            operands[i] = jnp.moveaxis(x, dim, place)
        return op(*operands), [out_dim]
