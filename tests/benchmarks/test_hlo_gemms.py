"""Counting GEMMs in compiled programs: as H200 programs write them, and what only looks like FP8."""

import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def gemms():
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    from _hlo_gemms import gemms

    return gemms


TRITON = """
%gemm_fusion_dot_computation (p0: f8e4m3fn[64,64], p1: f8e4m3fn[64,64]) -> f32[64,64] {
  %p0 = f8e4m3fn[64,64]{1,0} parameter(0)
  %p1 = f8e4m3fn[64,64]{1,0} parameter(1)
%WIDEN  ROOT %dot.1 = f32[64,64]{1,0} dot(%LHS, %RHS), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

ENTRY %main (a: f8e4m3fn[64,64], b: f8e4m3fn[64,64]) -> f32[64,64] {
  %a = f8e4m3fn[64,64]{1,0} parameter(0)
  %b = f8e4m3fn[64,64]{1,0} parameter(1)
  ROOT %f = f32[64,64]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_fusion_dot_computation, \
backend_config={"fusion_backend_config":{"kind":"__triton_gemm"}}
}
"""


def test_triton(gemms):
    fp8 = TRITON.replace("%WIDEN", "").replace("%LHS", "%p0").replace("%RHS", "%p1")
    assert gemms(fp8) == {"fp8 triton": 1}
    assert gemms(fp8, repetitions=2) == {"fp8 triton": 0.5}


def test_widened_operands_are_not_fp8(gemms):
    widen = "  %w0 = bf16[64,64]{1,0} convert(%p0)\n  %w1 = bf16[64,64]{1,0} convert(%p1)\n"
    wide = TRITON.replace("%WIDEN", widen).replace("%LHS", "%w0").replace("%RHS", "%w1")
    assert gemms(wide) == {"bf16 triton": 1}


@pytest.mark.parametrize(
    "target, dtype, kind",
    [
        ("__cublas$lt$matmul$f8", "f8e4m3fn", "fp8 cublaslt"),
        ("__cublas$lt$matmul", "bf16", "bf16 cublaslt"),
        ("__cublas$gemm", "f32", "f32 cublas"),
        ("jaxfp8_scaled_matmul_v2", "f8e4m3fn", "fp8 jaxfp8"),
        ("jaxfp8_quantize_v1", "bf16", None),
    ],
)
def test_custom_calls(gemms, target, dtype, kind):
    text = f"""
ENTRY %main (a: {dtype}[64,64]) -> f32[64,64] {{
  %a = {dtype}[64,64]{{1,0}} parameter(0)
  %c = (f32[64,64]{{1,0}}, u8[1024]{{0}}) custom-call(%a, %a), custom_call_target="{target}"
  ROOT %r = f32[64,64]{{1,0}} get-tuple-element(%c), index=0
}}
"""
    assert gemms(text) == ({kind: 1} if kind else {})
