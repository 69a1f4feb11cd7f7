"""The plan of a GEMM on GPUs: the terms in which a measurement is kept."""

from typing import NamedTuple

# The dtypes by XLA's names, which cuda/tuner_bindings.cc reads.
DTYPES = ("bf16", "f16", "f32", "f8e4m3fn", "f8e5m2")


class Gemm(NamedTuple):
    """The properties of a GEMM that decide its plan; cuda/tuner_bindings.cc reads the fields by name."""

    batch: int
    m: int
    n: int
    k: int
    a: str
    b: str
    out: str
    has_bias: bool
    accumulate: bool
    precise: bool
    workspace_bytes: int
    alignment: int

    def __str__(self) -> str:
        options = ("has_bias", "accumulate", "precise")
        batch = f"{self.batch} x " if self.batch > 1 else ""
        words = [f"{batch}{self.m} x {self.n} x {self.k}", f"{self.a} by {self.b} to {self.out}"]
        return ", ".join(words + [name.removeprefix("has_") for name in options if getattr(self, name)])


class Platform(NamedTuple):
    """The validity of a measurement: one model of device, one version of cuBLASLt."""

    device_name: str
    capability: int  # 90 for sm_90
    cublaslt_version: int


class Plan(NamedTuple):
    """The measured plan of one GEMM."""

    algorithm: str  # cublasLtMatmulAlgo_t: its eight words, as 128 hexadecimal digits
    microseconds: float
    first_microseconds: float  # of the algorithm that cuBLASLt puts first
