"""The counter, on small programs whose counts are known by looking at them."""

import pytest

from . import count, hlo

HEAD = "HloModule test, is_scheduled=true\n"


def module(text):
    return hlo.parse(HEAD + text)


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
"""  # noqa: E501
TRIPS = (
    'backend_config={"known_trip_count":{"n":"3"},'
    '"known_init_step":{"init":"0","step":"1"}}'
)


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
        "ENTRY %m (p: s32[]) -> f32[] {\n  %p = s32[] parameter(0)\n  ROOT %c = f32[] "
        "conditional(%p, %p, %p)\n}\n"
    )
    with pytest.raises(ValueError, match="c: which branch"):
        count.launches(module(branches))
    with pytest.raises(ValueError, match="no ENTRY"):
        hlo.parse(HEAD)
    with pytest.raises(ValueError, match="not an instruction"):
        hlo.parse(HEAD + "ENTRY %m () -> f32[] {\n  something else\n}\n")
