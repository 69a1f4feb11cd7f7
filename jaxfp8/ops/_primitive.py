"""Ops as JAX primitives: all ops share one set of rules, made from the names of their dimensions.

An op names the dimensions of its operands and results. The names give the batching rule, the types of results on a
mesh, and the partitioning of the op (_partition.py). `vmap` adds vmapped dimensions: leading dimensions of every
operand and result, each index with its own scale and amax.

The lowering rule chooses by platform: a custom call where a native library is loaded and the user has not disabled the
call, the jnp reference elsewhere; for TPUs the reference as _tpu.py has it traced.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import _compat, _mesh
from .._jax._primitives import compiled, not_differentiable
from . import _disabled, _ffi, _support, _tpu
from ._implementation import selected
from ._partition import ONE as ONE, Dimensions, lower_partitioned

_NOT_ON = {}


def not_on(op: Primitive, capabilities: set, *types, implementation, vmap_dims, **static) -> str | None:
    """Return why no kernel of the CUDA library runs an equation of `op` on GPUs of these compute capabilities."""
    return _NOT_ON[op](capabilities, *types, **static)


def dims(name: str, count: int) -> tuple[str, ...]:
    """Return the names of `count` dimensions."""
    return tuple(f"{name}{i}" for i in range(count))


def tensor_op(
    name: str,
    reference: Callable,
    cpu: Callable,
    *,
    names: Callable,
    dtypes: Callable | None = None,
    cuda: Callable | None = None,
    custom_call: str | None = None,
    sizes: Callable = lambda *shapes, **static: {},
    batch_first: Callable | None = None,
    second_layouts: Callable = lambda **static: {},
    added: Callable = lambda **static: (),
    on_one_device_only: Callable = lambda **static: False,
    by_xla: Callable | None = None,
    not_on: Callable = lambda capabilities, *types, **static: None,
    for_gpus: Callable = lambda capabilities, *types, **static: static,
    align: Callable = lambda axes, sizes, mesh_shape, **static: axes,
    on_shards: Callable | None = None,
) -> Callable:
    """Make a primitive and return its call, `op(*operands, vmap_dims=0, **static) -> list of arrays`.

    Args:
        name: the op's name in messages and programs.
        reference, cpu, cuda: `(*operands, vmap_dims, **static) -> sequence of arrays`, where `vmap_dims` counts the
            vmapped dimensions. `cuda` is `cpu` by default.
        names: `(*ranks, **static) -> (operands, results)`: the names of the dimensions of each, without vmapped
            dimensions. A name stands for one size. A dimension that a result lacks was reduced: by max for a result
            named `ONE` (an amax), by sum for any other result.
        dtypes: `(*operands, **static) -> dtypes of the results`; float32 by default.
        custom_call: the custom call that `cpu` and `cuda` make; that of `name` by default.
        sizes: `(*shapes, **static) -> {name: size}` for names that only results have, from the shapes of the operands
            without the vmapped dimensions.
        batch_first: a batching rule to try first, `(run, operands, dims, vmap_dims, **static) -> (results, dims)`; it
            returns None where it does not apply.
        second_layouts: `(**static) -> {position: position}`: an operand, and the trailing operand that holds the same
            tensor with its dimensions in another order. A mesh may gather the second in place of the first; no
            implementation reads it.
        added: `(**static) -> positions` of operands that are added to the first result. Where a mesh sums parts of the
            result, one device adds them.
        on_one_device_only: `(**static) -> bool`: whether custom calls run on one device only. On a mesh and in a
            `shard_map` the reference runs.
        by_xla: a program in jnp that XLA's GPU compiler rewrites to calls of cuBLASLt. It runs under
            `implementation("xla")`, and on a GPU with FP8 where `cuda` finds no cuBLASLt. None where `cuda` needs no
            cuBLASLt.
        not_on: `(capabilities, *types, **static) -> reason` why `cuda` cannot take these operands on GPUs of these
            compute capabilities, so that the reference runs; or None.
        for_gpus: `(capabilities, *types, **static) -> static`: the static arguments of `cuda` on GPUs of these compute
            capabilities.
        align: `(axes, sizes, mesh_shape, **static) -> axes`, by the names of dimensions and of mesh axes: the last
            change to the mesh axes of each dimension, for an op that some cuts would break.
        on_shards: `(operands, cut, *, vmap_dims, **static) -> (operands, options)`: the last change to the operands of
            one device of a mesh, and keywords for the device's program; for an op whose part depends on the device's
            place. `cut(name)` returns the index of the device's shard of a dimension, and the number of shards. XLA
            does not cut the reference of such an op.
    """
    op = Primitive(f"jaxfp8_{name}")
    op.multiple_results = True
    custom_call, cuda = custom_call or name, cuda or cpu

    def call(*operands, vmap_dims=0, **static):
        return op.bind(*operands, implementation=selected(), vmap_dims=vmap_dims, **static)

    def all_names(operands, vmap_dims, static):
        # The `names` of an op leave out vmapped dimensions, which lead in every operand and result.
        leading = dims("vmapped", vmap_dims)
        sides = names(*(x.ndim - vmap_dims for x in operands), **static)
        return (tuple(leading + tuple(tensor) for tensor in side) for side in sides)

    def abstract(*operands, implementation, vmap_dims, **static):
        operand_names, result_names = all_names(operands, vmap_dims, static)
        # A result has the size and the mesh axes of each dimension that an operand has too; other sizes are computed.
        new = sizes(*(x.shape[vmap_dims:] for x in operands), **static)
        result_dtypes = dtypes(*operands, **static) if dtypes else [jnp.float32] * len(result_names)
        return _mesh.types(operands, operand_names, result_names, result_dtypes, new)

    def batch(operands, batch_dims, *, implementation, vmap_dims, **static):
        run = functools.partial(op.bind, implementation=implementation, **static)
        # 1. Try the op's own rule: it may make one larger product of a batch, without a vmapped dimension.
        if batch_first is not None:
            results = batch_first(run, operands, batch_dims, vmap_dims, **static)
            if results is not None:
                return results
        # 2. Move the batch dimension of every operand to the front; repeat an operand that has none.
        size = next(x.shape[d] for x, d in zip(operands, batch_dims, strict=True) if d is not None)
        operands = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, batch_dims, strict=True)
        ]
        # 3. Bind the same op with one vmapped dimension more, which every result has in front.
        outputs = run(*operands, vmap_dims=vmap_dims + 1)
        return outputs, [0] * len(outputs)

    def choose(platform, native, loaded, ctx, implementation, static):
        """Return the implementation that runs, and its static arguments."""
        if implementation == "ffi" and not loaded():
            raise RuntimeError(f'jaxfp8.ops.{name}: implementation("ffi"): no native library serves this platform')
        if implementation == "xla" and by_xla is not None:
            return by_xla, static
        # In an op without `by_xla` the implementation "xla" is the reference.
        if implementation not in (None, "ffi") or not loaded():
            return reference, static
        # The native library serves this platform. Find the reason why its kernel cannot run: the user's wish, ...
        lacks, native_static = _disabled.missing(custom_call), static
        if lacks is None and platform == "cuda":
            # ... the GPUs or cuBLASLt, or operands that these GPUs cannot take.
            gpus = _support.gpus(ctx)
            lacks = _support.missing_on(gpus, cublaslt=by_xla is not None)
            capabilities = set(map(_support.capability, gpus)) - {()}
            reason = None if lacks else not_on(capabilities, *ctx.avals_in, **static)
            lacks = lacks if reason is None else _support.Missing(reason, True)
            native_static = for_gpus(capabilities, *ctx.avals_in, **static)
        if lacks is None:
            return native, native_static
        if implementation == "ffi":
            raise RuntimeError(f'jaxfp8.ops.{name}: implementation("ffi"): {lacks.reason}')
        # Without FP8 hardware only the reference is left. Where just cuBLASLt is missing, XLA may still call its own.
        _support.warn(lacks.reason, lacks.instead)
        return reference if lacks.hardware else by_xla, native_static

    def lower(platform, native, loaded, ctx, *operands, implementation, vmap_dims, **static):
        # The names and the reference use `static`: `for_gpus` changes how a kernel runs, and not the op's results.
        run, run_static = choose(platform, native, loaded, ctx, implementation, static)
        in_jnp = reference
        if platform == "tpu" and implementation != "reference":
            run = in_jnp = _tpu.program(reference)
        return lower_partitioned(
            functools.partial(run, vmap_dims=vmap_dims, **run_static),
            functools.partial(in_jnp, vmap_dims=vmap_dims, **static),
            Dimensions(
                *all_names(ctx.avals_in, vmap_dims, static),
                second_layouts(**static),
                added(**static),
                functools.partial(align, **static),
                None if on_shards is None else functools.partial(on_shards, vmap_dims=vmap_dims, **static),
            ),
            on_one_device_only=on_one_device_only(**static),
            as_bytes=platform == "cpu",
            ctx=ctx,
            operands=operands,
        )

    _NOT_ON[op] = lambda *types, **static: _disabled.reason(custom_call) or not_on(*types, **static)
    op.def_abstract_eval(abstract)
    op.def_impl(compiled(op))
    ad.primitive_jvps[op] = functools.partial(not_differentiable, op, name)
    batching.primitive_batchers[op] = batch
    # The rule without a platform is the default: every platform without a native library lowers to the reference.
    for platform, native, loaded in (
        (None, None, lambda: False),
        ("tpu", None, lambda: False),
        ("cpu", cpu, lambda: _ffi.has_cpu_kernels),
        ("cuda", cuda, _ffi.has_cuda_kernels),
    ):
        mlir.register_lowering(op, functools.partial(lower, platform, native, loaded), platform=platform)
    _compat.needs_devices(op)
    return call
