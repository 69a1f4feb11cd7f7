"""Ops as JAX primitives: one set of rules for all of them.

Every op works on groups: operands `[g, ...]`, with scales `[1]` or `[g]` (common/README.md). So `vmap` is more groups,
not a second kernel and not a loop. What runs is chosen when the program is lowered, by platform: a custom call where a
native library is loaded, the jnp reference elsewhere.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import NamedSharding, PartitionSpec

from . import _ffi
from ._implementation import selected


def grouped_op(
    name: str,
    *,
    results: Callable,
    reference: Callable,
    cpu: Callable,
    cuda: Callable,
    is_scale: Sequence[bool],
    merge: Callable | None = None,
) -> Callable:
    """A primitive `op(*operands, **static) -> list of arrays`.

    Args:
        name: of the op; messages and programs show it.
        results: `(*operands, **static) -> [(shape, dtype), ...]`.
        reference, cpu, cuda: `(*operands, **static) -> sequence of arrays`.
        is_scale: of each operand, whether it is `[1]` or `[g]` rather than `[g, ...]`.
        merge: a batching rule to try first, `(op, operands, batched, **static) -> (results, dims) or None`.
    """
    op = Primitive(f"jaxfp8_{name}")
    op.multiple_results = True

    def call(*operands, **static):
        return op.bind(*operands, implementation=selected(), **static)

    def abstract(*operands, implementation, **static):
        del implementation
        return [_like(operands[0], shape, dtype) for shape, dtype in results(*operands, **static)]

    def batch(operands, dims, *, implementation, **static):
        run = functools.partial(op.bind, implementation=implementation, **static)
        operands = [x if d is None else jnp.moveaxis(x, d, 0) for x, d in zip(operands, dims, strict=True)]
        batched = [d is not None for d in dims]
        if merge is not None and (merged := merge(run, operands, batched, **static)) is not None:
            return merged
        size = next(x.shape[0] for x, is_batched in zip(operands, batched, strict=True) if is_batched)
        groups = operands[0].shape[1 if batched[0] else 0]
        flat = [
            (_merge_scale if scale else _merge_tensor)(size, groups, is_batched, x)
            for x, is_batched, scale in zip(operands, batched, is_scale, strict=False)
        ]
        outputs = run(*flat)
        return [out.reshape(size, groups, *out.shape[1:]) for out in outputs], [0] * len(outputs)

    def lower(native, loaded, ctx, *operands, implementation, **static):
        run = reference
        if implementation == "ffi" and not loaded():
            raise RuntimeError(f'jaxfp8.ops.{name}: implementation("ffi"): no native library serves this platform')
        if implementation in (None, "ffi") and loaded():
            run = native
        return mlir.lower_fun(lambda *x: list(run(*x, **static)), multiple_results=True)(ctx, *operands)

    op.def_abstract_eval(abstract)
    op.def_impl(compiled(op))
    ad.primitive_jvps[op] = functools.partial(_not_differentiable, name)
    batching.primitive_batchers[op] = batch
    for platform, native, loaded in (
        (None, None, lambda: False),
        ("cpu", cpu, lambda: _ffi.has_cpu_kernels),
        ("cuda", cuda, _ffi.has_cuda_kernels),
    ):
        mlir.register_lowering(op, functools.partial(lower, native, loaded), platform=platform)
    return call


def shared_function(name: str, results: Callable) -> Callable:
    """Decorator: jnp that is one function in the program, however often it is used there.

    XLA inlines it. As a primitive, because a jitted function is traced anew, and written out again, for a backward.

    Args:
        name: of the function in the program.
        results: `(*operands) -> [(shape, dtype), ...]`.
    """

    def decorate(function):
        op = Primitive(name)
        op.multiple_results = True

        def batch(operands, dims):
            outputs = jax.vmap(function, in_axes=tuple(dims))(*operands)
            return outputs, [0] * len(outputs)

        op.def_abstract_eval(lambda *avals: [_like(avals[0], shape, dtype) for shape, dtype in results(*avals)])
        op.def_impl(compiled(op))
        ad.primitive_jvps[op] = functools.partial(_not_differentiable, name)
        batching.primitive_batchers[op] = batch
        mlir.register_lowering(op, mlir.lower_fun(function, multiple_results=True), inline=False)
        return op.bind

    return decorate


def compiled(op: Primitive) -> Callable:
    """How a primitive runs outside of jit, and in `jax.disable_jit()`: jitted, once for each set of parameters."""

    @functools.lru_cache(maxsize=1024)
    def jitted(params):
        return jax.jit(functools.partial(op.bind, **dict(params)))

    def run(*operands, **params):
        with jax.disable_jit(False):
            return jitted(tuple(params.items()))(*operands)

    return run


def _like(aval, shape, dtype):
    """A result that varies over the mesh axes that `aval` varies over."""
    sharding = NamedSharding(aval.sharding.mesh, PartitionSpec(*[None] * len(shape)))
    return aval.update(shape=tuple(shape), dtype=jnp.dtype(dtype), sharding=sharding, weak_type=False)


def _merge_tensor(size, groups, is_batched, x):
    """`[b, g, ...]` to `[b * g, ...]`; an operand that is not batched is repeated."""
    if not is_batched:
        x = jnp.broadcast_to(x, (size, *x.shape))
    return x.reshape(size * groups, *x.shape[2:])


def _merge_scale(size, groups, is_batched, scale):
    """`[b, 1 or g]` to `[b * g]`; one scale for everything stays `[1]`."""
    if not is_batched:
        if scale.shape == (1,):
            return scale
        scale = scale[None]
    return jnp.broadcast_to(scale, (size, groups)).reshape(-1)


def _not_differentiable(name, primals, tangents, **params):
    """Autodiff through an op raises, where a derivative of rounding would be silently wrong."""
    del primals, tangents, params
    raise TypeError(
        f"jaxfp8.ops.{name} is not differentiable. Use jaxfp8.dot_general, which has the straight-through gradient; it "
        "has first derivatives in reverse mode only."
    )
