"""Negative controls: the interpreter finds each kind of fault of a kernel whose PTX is
wrong in one place.
"""

import contextlib
import re
from typing import NamedTuple

import jax
import oracle
import pytest
from equality import assert_all_bitwise
from ops import cases, targets
from oracle import BF16, E4M3, F32

from .. import (
    test_emulated_kernels as kernels,
    test_emulated_ragged as ragged,
)
from . import machine

RESULTS = "results"  # the launch ends, and the oracle has other numbers


@pytest.fixture(scope="module")
def interpreted():
    return machine.launchers()


@contextlib.contextmanager
def edited(library, folder, kernel, pattern, replacement):
    """Kernels of one file as they are after an edit of their PTX, which has to change
    something.
    """
    text = (machine.compiled() / f"{kernel}.ptx").read_text()
    changed = re.sub(pattern, replacement, text)
    assert changed != text, f"{pattern} is not in {kernel}.ptx"
    (folder / f"{kernel}.ptx").write_text(changed)
    library.ptx_use_folder(str(folder).encode())
    try:
        yield
    finally:
        library.ptx_use_folder(str(machine.compiled()).encode())


# ----------------------------------------------------- calls with answers of the oracle


def quantize(interpreted, size=1031):
    x = kernels.random_values((1, size), BF16)
    expected = kernels.each_group(oracle.quantize, x, F32(-3), E4M3)
    assert_all_bitwise(interpreted.quantize(x, -3, E4M3), expected, "quantize")


def amax(interpreted):
    x = kernels.random_values((1, 9000), BF16)
    oracle.assert_bitwise(
        interpreted.amax(x),
        oracle.quantize(x[0], F32(1), E4M3)[1][None],
        "amax",
    )


def tiles(interpreted):
    kernels.assert_tiles(interpreted, kernels.random_values((1, 128, 128), BF16))


def ragged_rows(interpreted, precise=True):
    interpreted.device = ragged.DEVICES["warpgroups"][0]
    a, b = ragged.operands(False, 2, 40, 720, 32)
    ragged.check(interpreted, a, b, [16, 24], precise=precise)


def fast_ragged_rows(interpreted):
    ragged_rows(interpreted, precise=False)


def tma_rows(interpreted, backwards=False):
    """More slices than stages, in two groups that are not whole tiles."""
    interpreted.device = ragged.DEVICES["warpgroups"][0]
    interpreted.configure(backwards=backwards)
    a, b = ragged.operands(False, 2, 200, 720, 32, b_fmt=E4M3)
    ragged.check(interpreted, a, b, [16, 24], tma=True)


def early_tma_rows(interpreted):
    """Copies arrive at once, and the warp that copies runs first."""
    try:
        tma_rows(interpreted, backwards=True)
    finally:
        interpreted.configure()


class Control(NamedTuple):
    """An edit of a kernel's PTX, a call that meets it, and the kind of fault that has
    to come.
    """

    kernel: str
    pattern: str
    replacement: str
    call: object
    kind: str


EXPECT = r"(mov.u32\s+%r\d+), 40960;"  # bytes of a precise stage
# The wait of the warps that multiply; and one after which they go on at once.
WAIT = r"\.reg \.pred p; (mbarrier\.try_wait\S+ p, \[%\w+\]), (%\w+);"
NO_WAIT = (
    r".reg .pred p, w; .reg .u32 t; mov.u32 t, %tid.x; setp.lt.u32 w, t, 256; "
    r"\1, \2; @w setp.eq.u32 p, t, t;"
)
CONTROLS = {
    "a fence for the tensor cores dropped": Control(
        "ragged_matmul", r"fence.proxy.async.shared::cta;", "", ragged_rows, "proxy"
    ),
    "a fence of sums dropped": Control(
        "ragged_matmul", r"wgmma.fence.sync.aligned;", "", ragged_rows, "order"
    ),
    "sums used before the wait": Control(
        "ragged_matmul",
        r"wgmma.wait_group.sync.aligned 0;",
        "wgmma.wait_group.sync.aligned 1;",
        fast_ragged_rows,
        "undefined",
    ),
    "a copy over the operand of a product": Control(
        "ragged_matmul",
        r"wgmma.wait_group.sync.aligned 1;",
        "",
        fast_ragged_rows,
        RESULTS,
    ),
    "wgmma without a warp of its warpgroup": Control(
        "ragged_matmul",
        r"(wgmma.mma_async)",
        r".reg .pred q; .reg .u32 t; mov.u32 t, %tid.x; setp.ge.u32 q, t, 32; @q \1",
        ragged_rows,
        "warpgroup",
    ),
    "fewer bytes than are copied": Control(
        "ragged_tma", EXPECT, r"\1, 24576;", tma_rows, "count"
    ),
    "a stage released by fewer warps than read it": Control(
        "ragged_tma", r"(mov.u32\s+%r\d+), 8;", r"\1, 7;", tma_rows, "overwrite"
    ),
    "a read of a stage that has not arrived": Control(
        "ragged_tma", WAIT, NO_WAIT, early_tma_rows, "phase"
    ),
    "registers that nobody gives": Control(
        "ragged_tma",
        "setmaxnreg.inc.sync.aligned.u32 232",
        "setmaxnreg.inc.sync.aligned.u32 240",
        tma_rows,
        "registers",
    ),
    "a store where an atomic was": Control(
        "amax",
        r"atom.global.max.u32\s+%\w+, (\[%\w+\]), (%\w+);",
        r"st.global.u32 \1, \2;",
        amax,
        "race",
    ),
    "a barrier for some threads": Control(
        "quantize_transpose",
        r"bar.sync\s+0;",
        "{.reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.ne.u32 p, t, 5; @p "
        "bar.sync 0;}",
        tiles,
        "(race|barrier|warp)",
    ),
    "a wait dropped": Control(
        "ragged_matmul", r"cp.async.wait_group 3;", "", ragged_rows, "pending"
    ),
    "a load before its buffer": Control(
        "quantize",
        r"(ld.global.nc.v4.u32 \{[^}]*\}, \[%\w+)\]",
        r"\1+-16]",
        quantize,
        "outside",
    ),
    "a mask short of a lane": Control(
        "amax",
        r"(redux.sync.max.u32 %\w+, %\w+), %\w+;",
        r"\1, 2147483647;",
        amax,
        "warp",
    ),
    "a vector store off its alignment": Control(
        "quantize_transpose",
        r"st.global.v4.u32 \[(%\w+)\]",
        r"st.global.v4.u32 [\1+4]",
        tiles,
        "misaligned",
    ),
    "shared memory that nobody wrote": Control(
        "quantize_transpose",
        r"st.shared.u32.*;",
        "",
        tiles,
        "undefined",
    ),
    "a write to an operand": Control(
        "amax",
        r"(ld.global.nc.v4.u32 \{(%\w+)[^}]*\}, \[(%\w+)\];)",
        r"\1 st.global.u32 [\3], \2;",
        amax,
        "(nc|read-only)",
    ),
    "a loop that never ends": Control(
        "quantize", r"(\n\$L__BB0_3:)", r"\1 bra $L__BB0_3;", quantize, "endless"
    ),
    "an instruction of another kind": Control(
        "quantize", "copysign.f32", "lg2.approx.f32", quantize, "unknown"
    ),
}


@pytest.mark.parametrize("name", CONTROLS)
def test_controls(name, interpreted, tmp_path):
    control = CONTROLS[name]
    control.call(interpreted)  # as it is
    edit = control.kernel, control.pattern, control.replacement
    with edited(interpreted.library, tmp_path, *edit):
        with pytest.raises(AssertionError) as error:
            control.call(interpreted)
    message = str(error.value)
    if control.kind == RESULTS:
        assert "launch failed" not in message, message
    else:
        assert re.search(
            rf"^{control.kind}: [^\n]*\n  {control.kernel}.ptx:\d+: ",
            message,
            re.MULTILINE,
        ), message


# Of 16 elements, of each of two kernels: a root and a quotient, and for each moment the
# root of a fraction and the inverse of an amax, two for a root and four for a quotient.
# And terms with +0, three for an update and two more to apply it.
FUSED = {
    "adam_update": 2 * (16 * (2 + 4) + 2 * (16 * 2 + 4)) + 16 * (3 + 5),
    "encode_moment": 0,
}


@pytest.mark.parametrize("kernel", FUSED)
@pytest.mark.usefixtures("interpreted")
def test_no_product_of_moments_is_fused(kernel):
    """A product that is rounded with a sum differs too seldom for tests of numbers."""
    assert (machine.compiled() / f"{kernel}.ptx").read_text().count("fma.") == FUSED[
        kernel
    ]


def test_a_fault_is_an_error_of_the_call():
    """With its line of PTX: no kernel can be found in a folder without PTX."""
    library = machine.register_handlers(machine.ARCHITECTURE)
    library.ptx_use_folder(b"/nonexistent")
    try:
        with pytest.raises(
            (jax.errors.JaxRuntimeError, ValueError),
            match="unknown: folder /nonexistent",
        ):
            cases.run_target(targets.filled(targets.good("amax")), "ptx_90a_cuda_")
    finally:
        library.ptx_use_folder(str(machine.compiled()).encode())
        assert machine.take_fault(library).startswith("unknown: folder")


def test_every_kernel_is_known(interpreted):
    """The parser decodes all instructions of all entries."""
    entries = sum(
        file.read_text().count("\n.entry ") for file in machine.compiled().glob("*.ptx")
    )
    assert interpreted.library.ptx_parse_all() == entries > 250, machine.take_fault(
        interpreted.library
    )
