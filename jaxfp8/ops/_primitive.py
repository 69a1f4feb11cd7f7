"""Ops as JAX primitives: one set of rules for all of them, from the names of their dimensions.

An op names the dimensions of its operands and results. What `vmap` does, what type a result has on a mesh, and how the
op is partitioned (_partition.py) follow from the names. `vmap` adds vmapped dimensions: leading dimensions of every
operand and result, each index with its own scale and amax.

What runs is chosen when the program is lowered, by platform: a custom call where a native library is loaded and nobody
has disabled it, the jnp reference elsewhere.
"""

import functools
from collections.abc import Callable

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._jax import _compat, _mesh
from .._jax._primitives import compiled, not_differentiable
from . import _disabled, _ffi, _partition, _support
from ._implementation import selected

ONE = ("one",)  # the dimensions of a scale or an amax: f32[1] for each member


_NOT_ON = {}


def not_on(op: Primitive, capabilities: set, *types, implementation, members, **static) -> str | None:
    """Why no kernel of the CUDA library runs an equation of `op` on GPUs of these compute capabilities; or None."""
    del implementation, members
    return _NOT_ON[op](capabilities, *types, **static)


def dims(name: str, count: int) -> tuple[str, ...]:
    """The names of `count` dimensions."""
    return tuple(f"{name}{i}" for i in range(count))


def tensor_op(
    name: str,
    *,
    names: Callable,
    dtypes: Callable,
    reference: Callable,
    cpu: Callable,
    cuda: Callable,
    combine: Callable,
    custom_call: str | None = None,
    sizes: Callable = lambda *shapes, **static: {},
    batch_first: Callable | None = None,
    other_layouts: Callable = lambda **static: {},
    added: Callable = lambda **static: (),
    on_one_device_only: tuple[str, ...] = (),
    by_xla: Callable | None = None,
    not_on: Callable = lambda capabilities, *types, **static: None,
    for_gpus: Callable = lambda capabilities, *types, **static: static,
    align: Callable = lambda axes, sizes, shards, **static: axes,
) -> Callable:
    """A primitive `op(*operands, members=0, **static) -> list of arrays`.

    Args:
        name: of the op; messages and programs show it.
        names: `(*ranks, **static) -> (operands, results)`: the names of the dimensions of each, without members. A name
            stands for one size; one that a result lacks was reduced.
        dtypes: `(*operands, **static) -> dtypes of the results`.
        reference, cpu, cuda: `(*operands, members, **static) -> sequence of arrays`.
        custom_call: the one that `cpu` and `cuda` make, where it has another op's name.
        other_layouts: `(**static) -> {position: position}`: operands, the last ones, that hold the same as another one,
            with its dimensions in another order. A mesh may move them in its place; no implementation sees them.
        added: `(**static) -> positions` of operands that are added to the first result: once, where a mesh sums parts
            of it.
        combine: `(**static) -> lax.pmax or lax.psum`, the reduction over the shards of dimensions that a result lacks;
            None where there is none, so that these dimensions cannot be cut. Or one of them for each result.
        sizes: `(*shapes, **static) -> {name: size}`: of the names that results alone have, from the shapes of the
            operands without members.
        batch_first: a batching rule to try first, `(run, operands, dims, members, **static) -> (results, dims)`; it
            returns None where it does not apply.
        on_one_device_only: the platforms on which the reference runs on a mesh and in a `shard_map`.
        by_xla: jnp as XLA's GPU compiler wants it, to call cuBLASLt itself: what runs where it is selected, and where a
            GPU has FP8 but `cuda` finds no cuBLASLt. None where `cuda` needs none.
        not_on: `(capabilities, *types, **static) -> reason`: why `cuda` has nothing for these operands on GPUs of these
            compute capabilities, so that the reference runs; or None.
        for_gpus: `(capabilities, *types, **static) -> static`: the static arguments of `cuda` on GPUs of these compute
            capabilities.
        align: `(axes, sizes, shards, **static) -> axes`: a last word on how dimensions are cut on a mesh, where not
            every cut is one of the op. All by the names of dimensions: the mesh axes, sizes and numbers of shards.
    """
    op = Primitive(f"jaxfp8_{name}")
    op.multiple_results = True
    custom_call = custom_call or name

    def call(*operands, members=0, **static):
        return op.bind(*operands, implementation=selected(), members=members, **static)

    def all_names(operands, members, static):
        leading = dims("member", members)
        return ([leading + part for part in parts] for parts in names(*(x.ndim - members for x in operands), **static))

    def abstract(*operands, implementation, members, **static):
        del implementation
        operand_names, result_names = all_names(operands, members, static)
        new = sizes(*(x.shape[members:] for x in operands), **static)
        return _mesh.types(operands, operand_names, result_names, dtypes(*operands, **static), new)

    def batch(operands, batch_dims, *, implementation, members, **static):
        run = functools.partial(op.bind, implementation=implementation, **static)
        if batch_first is not None:
            results = batch_first(run, operands, batch_dims, members, **static)
            if results is not None:
                return results
        size = next(x.shape[d] for x, d in zip(operands, batch_dims, strict=True) if d is not None)
        operands = [
            jnp.broadcast_to(x, (size, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            for x, d in zip(operands, batch_dims, strict=True)
        ]
        outputs = run(*operands, members=members + 1)
        return outputs, [0] * len(outputs)

    def lower(platform, native, loaded, ctx, *operands, implementation, members, **static):
        run, run_static = reference, static
        if implementation == "ffi" and not loaded():
            raise RuntimeError(f'jaxfp8.ops.{name}: implementation("ffi"): no native library serves this platform')
        if implementation == "xla" and by_xla is not None:
            run = by_xla
        elif implementation in (None, "ffi") and loaded():
            run = native
            lacks = _disabled.missing(custom_call)
            if lacks is None and platform == "cuda":
                lacks = _support.missing(ctx, cublaslt=by_xla is not None)
                capabilities = set(map(_support.capability, _support.gpus(ctx))) - {()}
                reason = None if lacks else not_on(capabilities, *ctx.avals_in, **static)
                lacks = lacks if reason is None else _support.Missing(reason, True)
                run_static = for_gpus(capabilities, *ctx.avals_in, **static)
            if lacks is not None:
                if implementation == "ffi":
                    raise RuntimeError(f'jaxfp8.ops.{name}: implementation("ffi"): {lacks.reason}')
                _support.warn(lacks.reason, lacks.instead)
                run = reference if lacks.hardware else by_xla
        run = functools.partial(run, members=members, **run_static)
        jnp_program = functools.partial(reference, members=members, **static)
        named = all_names(ctx.avals_in, members, static)
        return _partition.lower(
            run,
            jnp_program,
            *named,
            combine=combine(**static),
            other_layouts=other_layouts(**static),
            added=added(**static),
            on_one_device_only=platform in on_one_device_only,
            align=functools.partial(align, **static),
            as_bytes=platform == "cpu",
            ctx=ctx,
            operands=operands,
        )

    _NOT_ON[op] = lambda *types, **static: _disabled.reason(custom_call) or not_on(*types, **static)
    op.def_abstract_eval(abstract)
    op.def_impl(compiled(op))
    ad.primitive_jvps[op] = functools.partial(not_differentiable, name)
    batching.primitive_batchers[op] = batch
    for platform, native, loaded in (
        (None, None, lambda: False),
        ("cpu", cpu, lambda: _ffi.has_cpu_kernels),
        ("cuda", cuda, _ffi.has_cuda_kernels),
    ):
        mlir.register_lowering(op, functools.partial(lower, platform, native, loaded), platform=platform)
    _compat.needs_devices(op)
    return call
