"""The tables and comparisons that the op tests share."""

import jax
import jax.numpy as jnp
import numpy as np
import oracle
from bad_days.fuzz import values
from oracle import BF16, F16, F32, assert_bitwise as assert_bitwise

from . import targets

FORMATS = tuple(oracle.FORMATS.values())
FORMAT_IDS = tuple(oracle.FORMATS)
INPUT_DTYPES = (BF16, F16, np.dtype(F32))
DTYPE_IDS = ("bf16", "f16", "f32")


def _scales() -> np.ndarray:
    rng = np.random.default_rng(7)
    powers = 2.0 ** np.concatenate([np.arange(-126, 128, 23), np.arange(-9, 10, 2)])
    scattered = 2.0 ** rng.uniform(-40, 40, 20)
    near_one = np.nextafter(F32(1), F32([0, 2]))
    return np.concatenate([powers, scattered, near_one, [np.finfo(F32).max]]).astype(
        F32
    )


SCALES = _scales()  # every scale is a normal f32
# Scales no recipe produces. Rules: finite x and infinite product saturate; 0 * inf and
# any NaN product give NaN.
STRANGE_SCALES = F32([0.0, -0.0, -1.0, -(2.0**100), np.inf, -np.inf, np.nan])
SHAPES = (
    (),
    (1,),
    (7,),
    (1, 1),
    (7, 5, 3),
    (217, 41),
    (4, 1, 9),
    (2, 3, 1, 5, 2),
    (4097,),
    (64, 128),
)
EMPTY_SHAPES = ((0,), (0, 5), (3, 0), (2, 0, 4))
MATRIX_SHAPES = ((1, 1), (1, 9), (9, 1), (217, 41), (64, 128), (33, 257), (130, 66))
EMPTY_MATRIX_SHAPES = ((0, 5), (5, 0), (0, 0))


# The custom calls of the CPU, and those of CUDA, under the names that programs carry.
TARGETS = {
    "adam_update": "jaxfp8_adam_update_v1",
    "amax": "jaxfp8_amax_v1",
    "amax_to_scale": "jaxfp8_amax_to_scale_v1",
    "decode_moment": "jaxfp8_decode_moment_v1",
    "delayed_scales": "jaxfp8_delayed_scales_v3",
    "dequantize": "jaxfp8_dequantize_v1",
    "encode_moment": "jaxfp8_encode_moment_v1",
    "join_recorded": "jaxfp8_join_recorded_v1",
    "quantize": "jaxfp8_quantize_v3",
    "quantize_blocks_transpose": "jaxfp8_quantize_blocks_transpose_v2",
    "quantize_transpose": "jaxfp8_quantize_transpose_v3",
    "read_histories": "jaxfp8_read_histories_v3",
    "split_reading": "jaxfp8_split_reading_v1",
    "undo_factors": "jaxfp8_undo_factors_v1",
    "write_histories": "jaxfp8_write_histories_v5",
}
CPU_ONLY = ("decode_moment", "join_recorded", "split_reading", "undo_factors")
CUDA_TARGETS = {op: name for op, name in TARGETS.items() if op not in CPU_ONLY} | {
    "quantize_activation": "jaxfp8_quantize_activation_v2",
    "quantize_activation_grad": "jaxfp8_quantize_activation_grad_v1",
    "quantize_norm": "jaxfp8_quantize_norm_v2",
    "quantize_pair": "jaxfp8_quantize_pair_v1",
    "scaled_matmul": "jaxfp8_scaled_matmul_v2",
    "read_rows": "jaxfp8_read_rows_v1",
    "transpose_codes": "jaxfp8_transpose_codes_v1",
    "write_rows": "jaxfp8_write_rows_v1",
    "block_scaled_matmul": "jaxfp8_block_scaled_matmul_v1",
    "ragged_matmul": "jaxfp8_ragged_matmul_v1",
}


def good_calls(op: str, sizes: dict):
    """Good calls of an op at these sizes, with every choice of shapes, on hard numbers
    that are not negative.
    """
    rng = np.random.default_rng(0)
    for call in targets.every_choice(op, targets.SIZES | sizes):
        with np.errstate(invalid="ignore"):  # integers have no infinity
            yield targets.filled(
                call, lambda shape, dtype: values.not_negative(rng, shape).astype(dtype)
            )


def run_target(call, prefix: str = "", **options):
    """The results of a `targets.Call`; operands that are no arrays are ones."""
    shapes = [jax.ShapeDtypeStruct(*result) for result in call.results]
    operands = [np.ones(*x) if isinstance(x, tuple) else x for x in call.operands]
    name = prefix + call.target if prefix else TARGETS[call.target]
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.block_until_ready(
            jax.ffi.ffi_call(name, shapes, **options)(*operands, **call.attributes)
        )


# Amaxes so far: none, one that counts, one that does not, and what a step that
# overflowed leaves behind.
AMAXES_SO_FAR = F32([0, 2.0**-149, 1e-3, 1e30, np.inf])


def assert_codes(name, got, x, scale, fmt: oracle.Format, what: str) -> None:
    """Compares the results of `quantize` or `quantize_transpose` with the oracle."""
    results = (
        ("data", "data_t", "amax")
        if name == "quantize_transpose"
        else ("codes", "amax")
    )
    for value, expected, result in zip(
        got, getattr(oracle, name)(x, scale, fmt), results, strict=True
    ):
        assert_bitwise(value, expected, f"{what}: {name}: {result} at scale {scale!r}")


def assert_quantized(got, x, scale, fmt: oracle.Format, what: str = "quantize") -> None:
    """`got` is the (data, amax) of `quantize`; compares both with the oracle."""
    assert_codes("quantize", got, x, scale, fmt, what)


def accumulation(implementation: str, precise: bool = False) -> dict:
    """The oracle's options for how an implementation adds up: the device's tensor
    cores, or f32.
    """
    if implementation not in ("cuda", "gpu"):
        return {}
    device = jax.devices("gpu")[0].compute_capability
    return {"accumulation": "precise" if precise else "fast", "device": device}


def random_values(shape, dtype, seed: int = 0, spread: float = 4.0) -> np.ndarray:
    """Normal values times a log-normal of `spread` octaves: some saturate, some flush
    to zero, most do neither.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(shape) * 2.0 ** (spread * rng.standard_normal(shape))
    with np.errstate(over="ignore"):  # float16: an infinity among the inputs is welcome
        return np.asarray(values, F32).astype(dtype)


def random_codes(shape, fmt: oracle.Format, seed: int = 0) -> np.ndarray:
    """Codes of normal values with amax near the largest value of the format."""
    values = random_values(shape, F32, seed, spread=1.0)
    return oracle.quantize(values, F32(fmt.max / 8), fmt)[0]


def probes_for(scales, fmt: oracle.Format) -> np.ndarray:
    """f32 `[scales, n]`: for every scale, x whose product with it lies on or next to a
    rounding boundary.

    For a power of two the products are exactly the boundaries and their neighbours,
    wherever x is representable; for the others x is the nearest f32 to boundary / scale
    and its two neighbours.
    """
    boundaries = oracle.rounding_probes(fmt).astype(np.float64)
    rows = []
    for scale in np.asarray(scales, np.float64):
        with np.errstate(over="ignore", under="ignore"):
            x = (boundaries / scale).astype(F32)
            rows.append(
                np.concatenate(
                    [
                        x,
                        np.nextafter(x, F32(np.inf)),
                        np.nextafter(x, F32(-np.inf)),
                    ]
                )
            )
    return np.stack(rows)


def dtype_of(fmt: oracle.Format):
    """The dtype argument for the ops."""
    return jnp.dtype(fmt.dtype)
