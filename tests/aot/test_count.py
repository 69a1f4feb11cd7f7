"""The counter, on small programs whose counts are known by looking at them."""

import jax
import jax.numpy as jnp
import pytest

from . import count, hlo

HEAD = "HloModule test, is_scheduled=true\n"


def module(text):
    return hlo.parse(HEAD + text)


def kinds(text) -> dict:
    return count.summary(HEAD + text)["kinds"]


LOOP = """
%fused (p: f32[256,512]) -> bf16[256,512] {
  %p = f32[256,512]{1,0} parameter(0)
  ROOT %c = bf16[256,512]{1,0} convert(%p)
}

%body (t: (s32[], f32[256,512])) -> (s32[], f32[256,512]) {
  %t = (s32[], f32[256,512]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[256,512]{1,0} get-tuple-element(%t), index=1
  %f = bf16[256,512]{1,0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="a (b) = c"}
  %y = f32[256,512]{1,0} copy(%x)
  ROOT %r = (s32[], f32[256,512]{1,0}) tuple(%i, %y)
}

%condition (t.1: (s32[], f32[256,512])) -> pred[] {
  %t.1 = (s32[], f32[256,512]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%t.1), index=0
  %three = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %three), direction=LT
}

ENTRY %main (a: f32[256,512]) -> f32[256,512] {
  %a = f32[256,512]{1,0} parameter(0), metadata={op_name="a"}
  %zero = s32[] constant(0)
  %b = f32[512,256]{1,0} bitcast(%a)
  %start = (f32[256,512]{1,0}, f32[256,512]{1,0}, u32[]) copy-start(%a)
  %done = f32[256,512]{1,0} copy-done(%start)
  %init = (s32[], /*index=1*/f32[256,512]{1,0}) tuple(%zero, %done)
  %loop = (s32[], f32[256,512]{1,0}) while(%init), condition=%condition, body=%body, TRIPS
  ROOT %out = f32[256,512]{1,0} get-tuple-element(%loop), index=1
}
"""
TRIPS = 'backend_config={"known_trip_count":{"n":"3"},"known_init_step":{"init":"0","step":"1"}}'


def test_a_loop_counts_as_often_as_it_runs():
    found = count.summary(HEAD + LOOP.replace("TRIPS", TRIPS))
    elements = 256 * 512
    assert found["kinds"] == {"fusion": 3, "copy": 3 + 1} and found["launches"] == 7
    assert found["bytes"] == elements * (3 * (4 + 2) + 4 * (4 + 4))
    assert found["copies"] == 4 and found["copied_bytes"] == elements * 4 * 8
    assert found["gemms"] == 0


def test_what_is_not_known_raises():
    with pytest.raises(ValueError, match="loop: a loop whose trip count"):
        count.launches(module(LOOP.replace("TRIPS", 'metadata={op_name="x"}')))
    branches = (
        "ENTRY %m (p: s32[]) -> f32[] {\n  %p = s32[] parameter(0)\n  ROOT %c = f32[] conditional(%p, %p, %p)\n}\n"
    )
    with pytest.raises(ValueError, match="c: which branch"):
        count.launches(module(branches))
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse(HEAD)
    with pytest.raises(ValueError, match="not an instruction"):
        hlo.parse(HEAD + "ENTRY %m () -> f32[] {\n  something else\n}\n")


CALLS = """
%inner (q: f32[4]) -> f32[4] {
  %q = f32[4]{0} parameter(0)
  ROOT %n = f32[4]{0} negate(%q)
}

%add (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %s = f32[] add(%l, %r)
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %buffer = f32[4]{0} custom-call(), custom_call_target="AllocateBuffer"
  %call = f32[4]{0} call(%p), to_apply=%inner
  %async = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-start(%call), kind=kLoop, calls=%inner
  %update = ((f32[4]{0}), f32[4]{0}, u32[]) fusion-update(%async)
  %done = f32[4]{0} fusion-done(%update)
  %wrapped = ((f32[4]{0}), f32[4]{0}, u32[]) async-start(%done), calls=%inner
  %unwrapped = f32[4]{0} async-done(%wrapped)
  %zero = f32[] constant(0)
  %sum = f32[] reduce(%unwrapped, %zero), dimensions={0}, to_apply=%add
  ROOT %sorted = f32[4]{0} sort(%unwrapped), dimensions={0}, to_apply=%add
}
"""


def test_what_is_launched():
    """Calls and asynchronous pairs are what they call; a reducer, and a buffer, is nothing."""
    assert kinds(CALLS) == {"negate": 2, "fusion": 1, "reduce": 1, "sort": 1}
    (fusion,) = (launch for launch in count.launches(module(CALLS)) if launch.kind == "fusion")
    assert fusion.bytes == 4 * 4 + 4 * 4


SLICES = """
%read (whole: f32[8,1024,512], index: s32[]) -> bf16[1024,512] {
  %whole = f32[8,1024,512]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %zero = s32[] constant(0)
  %slice = f32[1,1024,512]{2,1,0} dynamic-slice(%whole, %index, %zero, %zero), dynamic_slice_sizes={1,1024,512}
  %flat = f32[1024,512]{1,0} bitcast(%slice)
  ROOT %narrow = bf16[1024,512]{1,0} convert(%flat)
}

%write (whole: bf16[8,1024,512], part: bf16[1024,512], index: s32[]) -> bf16[8,1024,512] {
  %whole = bf16[8,1024,512]{2,1,0} parameter(0)
  %part = bf16[1024,512]{1,0} parameter(1)
  %index = s32[] parameter(2)
  %zero = s32[] constant(0)
  %seven = s32[] constant(7)
  %reversed = s32[] subtract(%seven, %index)
  %row = bf16[1,1024,512]{2,1,0} bitcast(%part)
  ROOT %update = bf16[8,1024,512]{2,1,0} dynamic-update-slice(%whole, %row, %reversed, %zero, %zero)
}

ENTRY %main (a: f32[8,1024,512], b: bf16[8,1024,512], i: s32[]) -> bf16[8,1024,512] {
  %a = f32[8,1024,512]{2,1,0} parameter(0)
  %b = bf16[8,1024,512]{2,1,0} parameter(1)
  %i = s32[] parameter(2)
  %r = bf16[1024,512]{1,0} fusion(%a, %i), kind=kLoop, calls=%read
  ROOT %w = bf16[8,1024,512]{2,1,0} fusion(%b, %r, %i), kind=kLoop, calls=%write
}
"""


def test_slices_cost_what_they_touch():
    read, write = count.launches(module(SLICES))
    elements = 1024 * 512
    assert read.bytes == elements * (4 + 2) + 4  # and the index
    assert write.bytes == elements * (2 + 2) + 4
    assert not read.is_copy and write.is_copy  # the first converts, the second only moves


def gemm(body: str, operands="%a, %b") -> list:
    text = f"""
%product (x: f8e4m3fn[16,32], y: f8e5m2[32,16]) -> bf16[16,16] {{
  %x = f8e4m3fn[16,32]{{1,0}} parameter(0)
  %y = f8e5m2[32,16]{{1,0}} parameter(1)
  %wide = bf16[32,16]{{1,0}} convert(%y)
  ROOT %dot = bf16[16,16]{{1,0}} dot(%x, FACTOR), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}

ENTRY %main (a: f8e4m3fn[16,32], b: f8e5m2[32,16], c: bf16[32,16]) -> bf16[16,16] {{
  %a = f8e4m3fn[16,32]{{1,0}} parameter(0)
  %b = f8e5m2[32,16]{{1,0}} parameter(1)
  %c = bf16[32,16]{{1,0}} parameter(2)
  ROOT %g = (bf16[16,16]{{1,0}}, u8[33554432]{{0}}) {body.replace("OPERANDS", operands)}
}}
"""
    (launch,) = count.launches(module(text.replace("FACTOR", "%wide" if "mixed" in body else "%y")))
    return [launch.is_gemm, launch.is_fp8]


def test_gemms():
    ours, cublas, fp8 = "jaxfp8_scaled_matmul_v2", "__cublas$lt$matmul", "__cublas$lt$matmul$f8"
    for target in (ours, cublas, fp8):
        call = f'custom-call(OPERANDS), custom_call_target="{target}"'
        assert gemm(call) == [True, True]
        assert gemm(call, "%c, %c") == gemm(call, "%a, %c") == [True, False]
    assert gemm('custom-call(OPERANDS), custom_call_target="jaxfp8_quantize_v1"') == [False, False]
    assert gemm("fusion(OPERANDS), kind=kCustom, calls=%product") == [True, True]
    assert gemm('fusion(OPERANDS), kind=kCustom, calls=%product, metadata={op_name="mixed"}') == [True, False]
    assert gemm("dot(OPERANDS), lhs_contracting_dims={1}, rhs_contracting_dims={0}") == [True, True]


def test_a_custom_call_in_a_fusion():
    """XLA gives a custom call a slice of its operand, or of where its result goes: one launch, the call's own."""
    text = """
%fused (w: f32[8,512,512], i: s32[], s: f32[1]) -> (f8e4m3fn[1,512,512], f32[1]) {
  %w = f32[8,512,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1]{0} parameter(2)
  %z = s32[] constant(0)
  %row = f32[1,512,512]{2,1,0} dynamic-slice(%w, %i, %z, %z), dynamic_slice_sizes={1,512,512}
  %q = (f8e4m3fn[1,512,512]{2,1,0}, f32[1]{0}) custom-call(%row, %s), custom_call_target="TARGET"
  %codes = f8e4m3fn[1,512,512]{2,1,0} get-tuple-element(%q), index=0
  %amax = f32[1]{0} get-tuple-element(%q), index=1
  ROOT %both = (f8e4m3fn[1,512,512]{2,1,0}, f32[1]{0}) tuple(%codes, %amax)
}

ENTRY %main (w: f32[8,512,512], i: s32[], s: f32[1]) -> (f8e4m3fn[1,512,512], f32[1]) {
  %w = f32[8,512,512]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %s = f32[1]{0} parameter(2)
  ROOT %f = (f8e4m3fn[1,512,512]{2,1,0}, f32[1]{0}) fusion(%w, %i, %s), kind=kCustom, calls=%fused
}
"""
    (quantize,) = count.launches(module(text.replace("TARGET", "jaxfp8_quantize_v1")))
    assert not quantize.is_gemm and not quantize.is_copy
    assert quantize.bytes == 512 * 512 * (4 + 1) + 3 * 4  # and index, scale and amax
    (product,) = count.launches(module(text.replace("TARGET", "jaxfp8_scaled_matmul_v2")))
    assert product.is_gemm and not product.is_fp8


def test_gemms_have_no_bytes():
    text = """
ENTRY %main (a: bf16[512,512]) -> bf16[512,512] {
  %a = bf16[512,512]{1,0} parameter(0)
  %g = (bf16[512,512]{1,0}, s8[4194304]{0}) custom-call(%a, %a), custom_call_target="__cublas$lt$matmul"
  %y = bf16[512,512]{1,0} get-tuple-element(%g), index=0
  %q = (f8e4m3fn[512,512]{1,0}, f32[]) custom-call(%y, %y), custom_call_target="jaxfp8_quantize_v1"
  ROOT %z = f8e4m3fn[512,512]{1,0} get-tuple-element(%q), index=0
}
"""
    found = count.summary(HEAD + text)
    assert found["kinds"] == {"custom-call": 2} and (found["gemms"], found["fp8_gemms"]) == (1, 0)
    assert found["bytes"] == 512 * 512 * (2 + 1) + 4  # an operand that is there twice is read once


COLLECTIVES = """
%max (l: f32[], r: f32[]) -> f32[] {
  %l = f32[] parameter(0)
  %r = f32[] parameter(1)
  ROOT %m = f32[] maximum(%l, %r)
}

%add (l: bf16[], r: bf16[]) -> bf16[] {
  %l = bf16[] parameter(0)
  %r = bf16[] parameter(1)
  ROOT %s = bf16[] add(%l, %r)
}

%body (t: (s32[], f32[6])) -> (s32[], f32[6]) {
  %t = (s32[], f32[6]{0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %x = f32[6]{0} get-tuple-element(%t), index=1
  %y = f32[6]{0} all-reduce(%x), channel_id=1, replica_groups={{0,1}}, to_apply=%max
  ROOT %r = (s32[], f32[6]{0}) tuple(%i, %y)
}

ENTRY %main (a: bf16[16,8], q: f8e4m3fn[2,8], s: (s32[], f32[6])) -> bf16[16,8] {
  %a = bf16[16,8]{1,0} parameter(0)
  %q = f8e4m3fn[2,8]{1,0} parameter(1)
  %s = (s32[], f32[6]{0}) parameter(2)
  %loop = (s32[], f32[6]{0}) while(%s), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %g = (f8e4m3fn[2,8]{1,0}, f8e4m3fn[16,8]{1,0}) all-gather-start(%q), channel_id=2, dimensions={0}
  %gd = f8e4m3fn[16,8]{1,0} all-gather-done(%g)
  %s.1 = ((bf16[16,8]{1,0}), bf16[2,8]{1,0}) reduce-scatter-start(%a), channel_id=3, dimensions={0}, to_apply=%add
  %sd = bf16[2,8]{1,0} reduce-scatter-done(%s.1)
  %r = ((bf16[16,8]{1,0}), bf16[16,8]{1,0}) all-reduce-start(%a), channel_id=4, to_apply=%add
  ROOT %rd = bf16[16,8]{1,0} all-reduce-done(%r)
}
"""


def test_collectives():
    found = count.collectives(module(COLLECTIVES))
    assert [(c.kind, c.dtypes, c.reducer, c.times, c.bytes, c.in_loop) for c in found] == [
        ("all-reduce", ("f32",), "maximum", 5, 6 * 4, True),
        ("all-gather", ("f8e4m3fn",), None, 1, 16 * 8, False),
        ("reduce-scatter", ("bf16",), "add", 1, 16 * 8 * 2, False),
        ("all-reduce", ("bf16",), "add", 1, 16 * 8 * 2, False),
    ]
    summary = count.summary(HEAD + COLLECTIVES)
    assert summary["launches"] == 5 + 3 and summary["bytes"] == 0


READS = """
%narrow (p: f32[64,64]) -> bf16[64,64] {
  %p = f32[64,64]{1,0} parameter(0)
  ROOT %n = bf16[64,64]{1,0} convert(%p)
}

%rows (p: bf16[64,64]) -> bf16[64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %z = bf16[] constant(0)
  ROOT %s = bf16[64]{0} reduce(%p, %z), dimensions={1}, to_apply=%add
}

%sum (p: bf16[64,64], q: bf16[64,64]) -> bf16[64,64] {
  %p = bf16[64,64]{1,0} parameter(0)
  %q = bf16[64,64]{1,0} parameter(1)
  ROOT %s = bf16[64,64]{1,0} add(%p, %q)
}

ENTRY %main (v: f32[64,64], x: bf16[64,64]) -> bf16[64,64] {
  %v = f32[64,64]{1,0} parameter(0), metadata={op_name="v[\\'params\\'][\\'kernel\\']"}
  %x = bf16[64,64]{1,0} parameter(1), metadata={op_name="x"}
  %n = bf16[64,64]{1,0} fusion(%v), kind=kLoop, calls=%narrow
  %b = bf16[1,64,64]{2,1,0} bitcast(%n)
  %q = (f8e4m3fn[1,64,64]{2,1,0}, f32[1]{0}) custom-call(%b), custom_call_target="jaxfp8_quantize_v1"
  %codes = f8e4m3fn[1,64,64]{2,1,0} get-tuple-element(%q), index=0
  %amax = f32[1]{0} get-tuple-element(%q), index=1
  %again = f32[1]{0} copy(%amax)
  %m = f32[64]{0} fusion(%n), kind=kInput, calls=%rows
  %g = (bf16[64,64]{1,0}, s8[4]{0}) custom-call(%x, %codes), custom_call_target="__cublas$lt$matmul$f8"
  %y = bf16[64,64]{1,0} get-tuple-element(%g), index=0
  %z = bf16[64,64]{1,0} fusion(%y, %x), kind=kLoop, calls=%sum
  ROOT %o = bf16[64,64]{1,0} copy(%z)
}
"""


def test_reads():
    """Of the kernel: conversion, quantizer, reduction, but not the GEMM. Of x: the sum, but not what comes of it."""
    assert count.reads(module(READS), "['kernel']") == 3
    assert count.reads(module(READS), "x") == 1
    assert count.summary(HEAD + READS)["copies"] == 0  # of a scale, and of a tensor below `TENSOR`
    with pytest.raises(ValueError, match="grad: expected one argument"):
        count.reads(module(READS), "grad")


def test_types():
    found = hlo.arrays("(f32[2,3]{1,0:T(8,128)}, (pred[7]{0}, bf16[]), s4[8], token[])")
    assert [a.bytes for a in found] == [24, 7, 2, 4, 0]


def test_of_programs_before_compilation():
    def product(x, y):
        return x @ y

    x, y = jnp.ones((8, 16)), jnp.ones((16, 4))
    assert count.residual_bytes(product, x, y) == 4 * (8 * 16 + 16 * 4)
    assert count.stablehlo_operations(jax.jit(lambda x: jnp.sin(x) + 1).lower(x).as_text()) == 4
