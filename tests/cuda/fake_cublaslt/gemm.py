"""The GEMM on numpy arrays, over the stand-ins for cuBLASLt and the CUDA runtime."""

import ctypes
from pathlib import Path

import numpy as np
import oracle
from oracle import BF16, E4M3, E5M2, F16, F32

# jaxfp8::Dtype
DTYPES = {dtype: code for code, dtype in enumerate((BF16, F16, np.dtype(F32)))}
DTYPES |= {E4M3.dtype: 3, E5M2.dtype: 4}
COUNTS = (
    "heuristics",
    "matmuls",
    "handles",
    "alive",
    "alignment",
    "fast",
    "batch",
    "algorithm",
)
WORKSPACE = 1 << 20
FIRST = 2  # of the stand-in's algorithms (cublaslt.cc), the first that runs


class Gemm:
    """LaunchScaledMatmul on numpy arrays."""

    def __init__(self, folder: Path, fake: str | None = "libcublasLt.so.13"):
        self.fake = ctypes.CDLL(str(folder / fake)) if fake else None
        self.library = ctypes.CDLL(str(folder / "libgemm.so"))
        self.set_device(0)

    def set_device(self, ordinal: int, capability: int = 90) -> None:
        self.library.fake_device(ordinal, capability)
        if self.fake:
            self.fake.fake_capability(capability)

    def counts(self) -> dict[str, int]:
        out = (ctypes.c_int64 * len(COUNTS))()
        self.fake.fake_counts(out)
        return dict(zip(COUNTS, out, strict=True)) | {
            "copies": self.library.fake_copies()
        }

    def error(
        self, a, b, a_scale, b_scale, out, *, bias=None, accumulator=None,
        precise=False, workspace=WORKSPACE, workspace_shift=0, modes=(0, 0),
    ) -> str:  # fmt: skip
        """The reason of a failure, or nothing. Scales: `[1]`, `[s, 4]`, or `[g, ...]`
        as `modes` has them.
        """

        def pointer(x):
            return ctypes.c_void_p(None if x is None else x.ctypes.data)

        g, m, k = a.shape
        batch = 1 if any(modes) else g // max(a_scale.shape[0], b_scale.shape[0])
        sizes = (g, batch, m, b.shape[1], k, int(precise), *modes)
        strides = (
            0 if x.size == 1 else x.nbytes // x.shape[0] for x in (a_scale, b_scale)
        )
        text = ctypes.create_string_buffer(4096)
        guarded = aligned(np.full(workspace + 512, 165, np.uint8), workspace_shift)
        self.library.scaled_matmul(
            *(DTYPES[x.dtype] for x in (a, b, out)), pointer(a), pointer(b),
            pointer(a_scale), pointer(b_scale), *map(ctypes.c_int64, strides),
            pointer(bias), pointer(accumulator), pointer(out), pointer(guarded[256:]),
            ctypes.c_int64(workspace), *map(ctypes.c_int64, sizes), text,
        )  # fmt: skip
        assert (guarded[:256] == 165).all() and (
            guarded[256 + workspace :] == 165
        ).all(), "outside of the workspace"
        assert self.library.fake_capture_mode_is_restored()
        return text.value.decode()

    def check(
        self, g, m, n, k, formats=(E4M3, E4M3), scales=(1, 1), bias=False,
        accumulator=None, shift=0, scale_shifts=(0, 0), out_dtype=F32, **options,
    ):  # fmt: skip
        """One product of random codes, against the oracle.

        `scales`: how many each operand has; `accumulator`: None, "apart" or "in place";
        `shift`, `scale_shifts`: of a and of both scales, in bytes off alignment.
        """
        rng = np.random.default_rng(m * n)
        a, b = (
            aligned(oracle.quantize(rng.standard_normal((g, rows, k)), 8, fmt)[0], off)
            for rows, fmt, off in zip((m, n), formats, (shift, 0), strict=True)
        )
        a_scale, b_scale = (rng.uniform(0.5, 2, count).astype(F32) for count in scales)
        out_dtype = np.dtype(out_dtype)
        bias_dtype = F16 if out_dtype == F16 else BF16
        bias = aligned(rng.standard_normal(n).astype(bias_dtype)) if bias else None
        out = aligned(np.full((g, m, n), np.nan, out_dtype))
        add = None
        if accumulator:
            add = aligned(rng.standard_normal((g, m, n)).astype(F32))
            addend = add.copy()
            out = add if accumulator == "in place" else out
        buffers = (
            spaced(x, off)
            for x, off in zip((a_scale, b_scale), scale_shifts, strict=True)
        )
        error = self.error(a, b, *buffers, out, bias=bias, accumulator=add, **options)
        assert error == "", error
        for i in range(g):
            of_a, of_b = (x[i * x.size // g] for x in (a_scale, b_scale))
            product = oracle.scaled_matmul(
                a[i],
                b[i],
                of_a,
                of_b,
                bias=bias,
                accumulator=addend[i] if accumulator else None,
                out_dtype=out_dtype,
            )
            product.check(out[i], f"group {i}")


def aligned(x, shift=0) -> np.ndarray:
    """A copy that starts on a 256-byte boundary, or `shift` bytes behind one."""
    storage = np.empty(x.nbytes + 512, np.uint8)
    first = -storage.ctypes.data % 256 + shift
    copy = storage[first : first + x.nbytes].view(x.dtype).reshape(x.shape)
    copy[...] = x
    return copy


def spaced(scales, shift=0) -> np.ndarray:
    """Scales as the custom call has them: `[1]`, or `[s, 4]` with nothing to read
    behind the first of each four.
    """
    if scales.size > 1:
        scales = np.stack([scales, *[np.full_like(scales, np.nan)] * 3], axis=1)
    return aligned(scales, shift)
