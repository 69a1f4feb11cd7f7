"""The benchmark of kernels: which answers it refuses, the traffic it counts."""

import jax
import jax.numpy as jnp
import kernels
import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("as_users_have_jax")


def wrong(leaf, is_product):
    """Each of these answers in place of the right one: an element, a row, or NaN."""
    dtype = leaf.dtype
    x = np.asarray(leaf).astype(np.float32)
    if is_product:
        last = slice(None) if x.ndim == 2 else (-1, slice(None))
        changes = [(last, 1.25 * x)]
    else:
        largest = np.unravel_index(np.argmax(x), x.shape)
        last = (-1,) * x.ndim
        changes = [(largest, x / 2), (last, 2 * x + 1)]
    for where, value in (*changes, (last, np.full_like(x, np.nan))):
        changed = x.copy()
        changed[where] = value[where]
        if not np.array_equal(changed, x):
            yield jnp.asarray(changed.astype(dtype))


@pytest.mark.parametrize("name", kernels.KERNELS)
def test_no_wrong_answer_is_timed(name):
    """Whatever an element of a result should be, another one is refused: no result is
    left unchecked.
    """
    make, shapes = kernels.KERNELS[name]
    work = make(*(kernels.TINY_SHAPES[-1] if shapes is kernels.SHAPES else shapes[0]))
    arguments = work.arguments(0)
    leaves, tree = jax.tree.flatten(jax.jit(work.step)(*arguments))
    work.check(jax.tree.unflatten(tree, leaves), *arguments)
    for i, leaf in enumerate(leaves):
        for changed in wrong(leaf, bool(work.operations)):
            with pytest.raises(AssertionError, match="wrong answer|off by"):
                work.check(
                    jax.tree.unflatten(tree, [*leaves[:i], changed, *leaves[i + 1 :]]),
                    *arguments,
                )


@pytest.mark.parametrize(
    "name, bytes_an_element",
    [
        ("amax f32", 4),
        ("quantize_transpose f32", 6),
        ("quantize_activation_grad silu_gated", 10),
        ("quantize_blocks_transpose 1x32", 4 + 2 / 32),
        ("adam_update, parameters", 16 + 28 / 128),
    ],
)
def test_traffic(name, bytes_an_element):
    """Bytes of arguments and results are those of cuda/README.md, but for vectors and
    single numbers.
    """
    make, _ = kernels.KERNELS[name]
    m, n = 256, 512
    work = make(m, n)
    counted = kernels._traffic(work, work.arguments(0))
    assert 0 <= counted - bytes_an_element * m * n <= 4 * 2 * (m + n) + 64
