"""Kernels of a few numbers, which cost a launch: the scales and histories of delayed
scaling.
"""

import jax
import jax.numpy as jnp
import numpy as np
from _gpu_answers import expect
from _gpu_inputs import normal

from jaxfp8 import ops

from ._work import F32, Work

FP8_MAX = np.float32(448)


def _positive(seed, shape):
    return abs(normal(seed, shape, F32)) + 1


def amax_to_scale(count):
    def check(results, amax, stored):
        del stored
        scale, scale_inv = (np.asarray(x) for x in results)
        exact = np.array_equal(scale, FP8_MAX / np.asarray(amax)) and np.array_equal(
            scale_inv, np.float32(1) / scale
        )
        expect("amax_to_scale", exact)

    return Work(
        jax.vmap(lambda amax, stored: ops.amax_to_scale(amax, stored, fp8_max=FP8_MAX)),
        lambda seed: (_positive(seed, (count, 1)), _positive(seed + 1, (count, 1))),
        check,
        chain=lambda results, arguments: results,
    )


def _histories(seed, quantizers, *shape):
    return [_positive(seed + i, shape) for i in range(quantizers)]


def delayed_scales(quantizers, length):
    def check(results, histories, stored):
        del stored
        for result, history in zip(results, map(np.asarray, histories), strict=True):
            scale = FP8_MAX / np.max(history)
            for got, want in zip(
                result, (scale, np.float32(1) / scale, 0), strict=True
            ):
                expect("delayed_scales", np.array_equal(np.ravel(got), np.ravel(want)))

    return Work(
        lambda histories, stored: ops.delayed_scales(
            histories, stored, fp8_max=[FP8_MAX] * quantizers
        ),
        lambda seed: (
            _histories(seed, quantizers, length),
            [jnp.ones((1,), F32)] * quantizers,
        ),
        check,
        chain=lambda results, arguments: (
            arguments[0],
            [scale_inv for _, scale_inv, _ in results],
        ),
    )


def histories(quantizers, length):
    """Read the state of eight layers, and write it: the numbers that are read are
    recorded, and no history stays.
    """

    def step(pairs):
        (reading,) = ops.read_histories([pairs], fp8_max=[[448.0] * len(pairs)])
        stays = jnp.arange(reading.shape[-1]) % ops.READING_NUMBERS == 2
        return ops.write_histories([pairs], [jnp.where(stays, 0, reading)])[0]

    def check(results, pairs):
        for (next_history, next_scale), (history, _) in zip(
            results, pairs, strict=True
        ):
            history, moved = np.asarray(history), np.roll(history, -1, axis=1)
            moved[:, 0] = history[:, 0]
            largest = history.max(axis=1, keepdims=True)
            expect(
                "read_histories, write_histories", np.array_equal(next_history, moved)
            )
            expect(
                "read_histories, write_histories", np.array_equal(next_scale, largest)
            )

    return Work(
        step,
        lambda seed: (
            list(
                zip(
                    _histories(seed, quantizers, 8, length),
                    _histories(seed, quantizers, 8, 1),
                    strict=True,
                )
            ),
        ),
        check,
        chain=lambda results, _: (results,),
    )


def rows(quantizers, length):
    """Read the state of eight products that are rows of the same arrays, and write it:
    each records its scale as the amax.
    """

    def step(pairs):
        recorded = []
        for reading in ops.read_rows(pairs, fp8_max=[FP8_MAX] * quantizers):
            parts = ops.split_reading(reading)
            scales = [part[3:] for part in parts]
            recorded.append(ops.join_recorded(scales, in_loop=False))
        return ops.write_rows(pairs, recorded)

    def check(results, pairs):
        for (next_history, next_scale), (history, _) in zip(
            results, pairs, strict=True
        ):
            history = np.asarray(history)
            scale = FP8_MAX / history.max(axis=1)
            moved = np.roll(history, -1, axis=1)
            moved[:, 0] = scale
            expect("read_rows, write_rows", np.array_equal(next_history, moved))
            wanted = np.float32(1) / scale[:, None]
            expect("read_rows, write_rows", np.array_equal(next_scale, wanted))

    work = histories(quantizers, length)
    return Work(step, work.arguments, check, chain=work.chain)


# By number of scales, and by quantizers and the length of their histories.
KERNELS = {
    "amax_to_scale": (amax_to_scale, ((1,), (4096,))),
    "delayed_scales": (delayed_scales, ((3, 16), (16, 1024))),
    "read_histories, write_histories": (histories, ((3, 16), (64, 1024))),
    "read_rows, write_rows": (rows, ((3, 16), (24, 1024))),
}
