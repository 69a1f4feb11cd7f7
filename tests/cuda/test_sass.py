"""Instructions an element of the kernels that stream memory, read from the SASS of
sm_90a (tools/sass.py).

An H200 issues 132 * 4 * 32 instructions of a lane a cycle at 1.98 GHz: 33 T/s. At 4.3
TB/s and 4 bytes an element quantize_transpose meets 1.07 T elements a second, so 31
instructions an element would take as long as the memory; half of that leaves room for
latencies. A budget is today's figure: it may fall, and a test that sees it rise fails.
"""

import pathlib
import re
import sys

import pytest

from .test_library import ARCHITECTURES, MODULE, REPORTS

sys.path.insert(0, str(pathlib.Path(__file__).parents[2] / "tools"))
import sass  # noqa: E402

# kernel -> (its demangled name, elements that a thread handles in one pass of the main
# loop, instructions an element)
KERNELS = {
    "amax": (r"AmaxKernel<BF16, 8>", 32, 2.4),
    "quantize": (r"QuantizeKernel<BF16, E4M3, 8>", 32, 7.5),
    "quantize_transpose": (r"TileKernel<Identity<BF16, false, 1>, E4M3>", 64, 6.7),
    "with sums": (r"TileKernel<Identity<BF16, true, 1>, E4M3>", 64, 8.3),
    "silu": (r"TileKernel<Activated<BF16, Plain<Silu> ?>, E4M3>", 64, 12.2),
    "gated silu": (r"TileKernel<Activated<BF16, Gated<Silu> ?>, E4M3>", 64, 14.8),
    "clamped": (r"TileKernel<Activated<BF16, ClampedSwiGlu ?>, E4M3>", 64, 18.9),
    "gradient of gated silu": (
        r"TileKernel<ActivationGradient<BF16, Gated<Silu>, false>, E5M2>",
        64,
        24.0,
    ),
    "gradient of clamped": (
        r"TileKernel<ActivationGradient<BF16, ClampedSwiGlu, false>, E5M2>",
        64,
        34.2,
    ),
    "RMSNorm": (r"TileKernel<Normalized<BF16, false>, E4M3>", 64, 10.0),
    "LayerNorm": (r"TileKernel<Normalized<BF16, true>, E4M3>", 64, 11.2),
    "blocks of 1x32": (
        r"QuantizeBlocksTransposeKernel<BF16, E4M3, \(BlockShape\)1, true>",
        64,
        11.1,
    ),
    "blocks of 1x128": (
        r"QuantizeBlocksTransposeKernel<BF16, E4M3, \(BlockShape\)2, true>",
        64,
        8.6,
    ),
    "blocks of 128x128": (
        r"QuantizeBlocksTransposeKernel<BF16, E4M3, \(BlockShape\)3, true>",
        64,
        8.8,
    ),
    "Adam": (r"AdamUpdateKernel<false>", 16, 98.0),
    "Adam, with parameters": (r"AdamUpdateKernel<true>", 16, 105.0),
    "dequantize": (r"DequantizeKernel<E4M3, BF16, 8>", 32, 10.2),
}


@pytest.fixture(scope="module")
def kernels():
    """The instructions of the kernels of the table, by demangled name."""
    if not REPORTS or "sm_90a" not in ARCHITECTURES or not sass.find_tool("cuobjdump"):
        pytest.skip("needs the CUDA module with sm_90a and a disassembler (make cuda)")
    mangled = {
        name
        for log in REPORTS
        for name in re.findall(r"entry function '(\w+)' for 'sm_90a'", log.read_text())
    }
    names = dict(zip(sass.demangled(sorted(mangled)), sorted(mangled), strict=True))
    chosen = {
        plain: names[plain]
        for pattern, *_ in KERNELS.values()
        for plain in names
        if re.fullmatch(pattern, plain)
    }
    instructions = sass.disassemble(MODULE, list(chosen.values()))
    return {plain: instructions[name] for plain, name in chosen.items()}


@pytest.mark.parametrize("label", KERNELS)
def test_instructions_an_element(kernels, label):
    pattern, elements, budget = KERNELS[label]
    (name,) = (name for name in kernels if re.fullmatch(pattern, name))
    loop = sass.main_loop(kernels[name])
    figure = loop.cost.instructions / elements
    assert figure <= budget, (
        f"{label}: {figure:.1f} instructions an element, the budget is {budget}"
    )
    assert figure > budget - 1.5, (
        f"{label}: {figure:.1f} instructions an element: lower the budget of {budget}"
    )
