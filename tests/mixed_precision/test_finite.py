"""all_finite, select and first_nonfinite: which leaves count, and the same answer on
all devices.
"""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from cpu_mesh import mesh_of
from draws import KEY
from equality import assert_same_bits
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec as P
from parametrize import each_row

import jaxfp8
from jaxfp8.mixed_precision import all_finite, first_nonfinite, select

OWG = jaxfp8.OVERWRITE_WITH_GRADIENT
DEVICES = 8
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}


def tree(spoil=(), value=np.nan, dtype=np.float32):
    """Gradients and FP8 state, with `value` at one place of the leaves named."""
    leaves = {
        "a": np.ones((3, 5), dtype),
        "b": np.ones(7, dtype),
        "history": np.ones(4, np.float32),
    }
    for name in spoil:
        leaves[name].flat[-1] = value
    state = {"x_amax_history": leaves["history"], "x_scale": np.ones(1, np.float32)}
    return {
        "params": {
            "Dense_0": {"kernel": leaves["a"]},
            "Dense_1": {"bias": leaves["b"], "count": np.int32(3)},
        },
        OWG: {"Dense_0": {"Fp8DotGeneral_0": state}},
    }


# --------------------------------------------------------------------------- all_finite


@each_row("value", BAD)
@pytest.mark.parametrize("dtype", [np.float16, oracle.BF16, np.float32, np.complex64])
def test_one_bad_value(value, dtype):
    check = jax.jit(all_finite)
    assert check(tree(dtype=dtype)) and all_finite(tree(dtype=dtype))
    for leaf in "ab":
        assert not check(tree(leaf, value, dtype))
        assert not all_finite(tree(leaf, value, dtype))


def test_state_does_not_decide():
    assert all_finite(tree(["history"]))
    assert all_finite(
        jaxfp8.QTensor(jnp.full((2, 2), np.nan, jnp.float8_e4m3fn), jnp.full(1, np.nan))
    )
    assert not all_finite(
        jaxfp8.QTensor(
            jnp.ones((1, 1), jnp.float8_e4m3fn),
            jnp.ones(1),
            source=jnp.full((1, 1), np.nan),
        )
    )


def test_nothing_to_look_at():
    for nothing in (
        {},
        None,
        {"a": np.int32(1), "key": KEY},
        np.zeros((0, 3), np.float32),
    ):
        assert all_finite(nothing) and first_nonfinite(nothing) is None


# ------------------------------------------------------------------------------- select


@pytest.mark.parametrize(
    "finite",
    [True, False, np.bool_(True), np.bool_(False), jnp.bool_(True), jnp.bool_(False)],
)
def test_select(finite):
    """One of the two, to the bit, NaNs and negative zeros and all; no leaf is left
    out.
    """

    def draw(seed):
        bits = np.random.default_rng(seed).integers(0, 2**32, 64, np.uint32)
        return {
            "w": bits.view(np.float32),
            "h": bits.view(np.float16),
            "b": bits.astype(np.uint16).view(oracle.BF16),
            "opt_state": (np.int32(seed), bits > 2**31, None),
            OWG: {"x_amax_history": bits.view(np.float32)},
            "plain": jaxfp8.init_state(jaxfp8.DelayedScaling(amax_history_len=2)),
            # no NaN: XLA:CPU has but one
            "codes": jnp.asarray(bits.view(np.uint8) & 0xFB).view(jnp.float8_e5m2),
            "key": jax.random.key(seed),
        }

    def comparable(tree):
        return tree | {"key": jax.random.key_data(tree["key"])}

    new, old = draw(1), draw(2)
    for function in (select, jax.jit(select)):
        got = function(finite, new, old)
        assert_same_bits(comparable(got), comparable(new if finite else old))


def test_trees_that_differ():
    with pytest.raises(ValueError, match="key"):
        select(True, {"a": 1.0}, {"b": 1.0})
    for other in (np.ones(3, np.float16), np.ones(4, np.float32)):
        with pytest.raises(TypeError, match="select"):
            select(True, {"opt": [np.ones(3, np.float32)]}, {"opt": [other]})


# ---------------------------------------------------------------------- first_nonfinite


def layers(*bad):
    """Six layers; those named have a NaN."""

    def layer(name):
        return {
            "kernel": np.full((2, 2), np.nan if name in bad else 1, np.float32),
            "bias": np.ones(2),
        }

    stack = {str(i): layer(f"layers/{i}") for i in range(10, 14)}
    return {"params": {"head": layer("head"), "embed": layer("embed"), "layers": stack}}


ORDER = ["embed", *(f"layers/{i}" for i in range(10, 14)), "head"]


def test_which_layer():
    """The layer whose backward made the NaN is the one nearest to the loss; all before
    it have it too.
    """
    assert first_nonfinite(layers()) is None
    assert first_nonfinite(layers(), ORDER) is None
    bad = layers(*ORDER[:4])
    assert first_nonfinite(bad, ORDER) == "params/layers/12/kernel"
    assert first_nonfinite(bad) == "params/embed/kernel", (
        "without an order the first in the tree"
    )
    assert first_nonfinite(layers(*ORDER), ORDER) == "params/head/kernel"
    assert first_nonfinite(bad, ["layers", "head"]) == "params/layers/10/kernel"
    assert (
        first_nonfinite(layers("embed"), ["layers", "head"]) == "params/embed/kernel"
    ), "of no layer named: last"


def test_nnx():
    model = nnx.Sequential(
        nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Linear(3, 2, rngs=nnx.Rngs(1))
    )
    x = np.float32([[1, 2]])
    good = nnx.grad(lambda m: m(x).sum())(model)
    bad = nnx.grad(lambda m: jnp.sqrt(0.0 * m(x)).sum())(model)
    assert all_finite(good) and not all_finite(bad)
    assert first_nonfinite(good) is None
    assert first_nonfinite(bad, ["layers/0", "layers/1"]).startswith("layers/1/")


def test_an_order_of_another_model():
    with pytest.raises(
        ValueError,
        match=(
            r"first_nonfinite: order: expected the names of layers in .*got "
            r"'decoder'"
        ),
    ):
        first_nonfinite(layers(), ["embed", "decoder"])


# ------------------------------------------------------------------------------- meshes


def gradients(bad):
    """Two leaves, one of them cut by rows; a NaN on device 5 alone, or nowhere."""
    cut = np.ones((DEVICES, 4), np.float32)
    if bad:
        cut[5, 2] = np.nan
    return {"cut": cut, "whole": np.ones(3, np.float16)}


def test_arrays_cut_by_jit():
    """With types of where they lie."""
    mesh = mesh_of("Explicit", data=DEVICES)
    specs = {"cut": P("data"), "whole": P()}
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    with jax.set_mesh(mesh):
        grads = jax.device_put(gradients(bad=True), shardings)
        finite, got = jax.jit(
            lambda g: (
                all_finite(g),
                select(all_finite(g), jax.tree.map(jnp.negative, g), g),
            )
        )(grads)
        assert first_nonfinite(grads) == "cut"
    assert not finite
    assert_same_bits(got, grads)
    assert got["cut"].sharding.is_equivalent_to(shardings["cut"], 2)


def in_shard_map(function, mesh, check_vma, **specs):
    return jax.jit(jax.shard_map(function, mesh=mesh, check_vma=check_vma, **specs))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("shape", [(8,), (4, 2), (2, 4)])
@pytest.mark.parametrize("bad", [True, False])
def test_gradients_that_differ_in_shard_map(check_vma, shape, bad):
    """FSDP, or pipeline stages: one device has the NaN, all skip. The answer has no
    axis left in its type.
    """
    mesh = mesh_of(**dict(zip(("data", "model"), shape, strict=False)))
    axes = tuple(mesh.axis_names)

    def function(grads):
        finite = all_finite(grads)
        seen = jnp.reshape(finite, (1,))
        seen = lax.pcast(seen, axes, to="varying") if check_vma else seen
        return (
            finite,
            seen,
            select(finite, jax.tree.map(jnp.negative, grads), grads),
        )

    specs = {"cut": P(axes), "whole": P()}
    finite, seen, got = in_shard_map(
        function,
        mesh,
        check_vma,
        in_specs=(specs,),
        out_specs=(P(), P(axes), specs),
    )(gradients(bad))
    assert seen.tolist() == [not bad] * DEVICES
    assert finite == (not bad)
    sign = 1 if bad else -1
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, sign * b), got, gradients(bad)
    )


def test_gradients_that_agree_need_no_collective():
    """Summed over the devices already, as types say: one reduction a leaf, and no
    all-reduce.
    """
    mesh = mesh_of(data=DEVICES)

    def lowered(spec):
        return (
            in_shard_map(all_finite, mesh, True, in_specs=(spec,), out_specs=P())
            .lower(np.ones(DEVICES))
            .as_text()
        )

    assert "all_reduce" not in lowered(P())
    assert lowered(P("data")).count("all_reduce") == 1
