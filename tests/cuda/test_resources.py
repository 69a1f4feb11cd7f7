"""Registers, spills and stack of every CUDA kernel, as ptxas reported them when the
library was built.

A spill or a stack frame is traffic that no budget of bytes counts; registers decide how
many blocks are resident on a multiprocessor and so how many loads are in flight.
"""

import collections
import re
from typing import NamedTuple

import pytest

from .test_library import ARCHITECTURES, REPORTS

# Registers a thread, and with them the blocks that fit on a multiprocessor: 65536
# registers, given to warps in steps of
# 256. The first pattern found in "architecture mangled_name" decides; other kernels
#      have the default.
BLOCK_SIZE = 256
DEFAULT_BUDGET = 64  # 4 blocks of 256 threads, half of the threads that Hopper holds
BUDGETS = {
    "ActivationGradientI.*ELb1EEENS": 128,  # 2 blocks, with sums of columns
    r"^sm_1\d\d .*ActivationGradientI.*(Gated|Clamped)": 128,  # 2 blocks
    "ActivationGradientI": 80,  # 3 blocks
    "RaggedMatmulKernel.*WarpgroupTile": 255,  # 1 block of 256 threads
    # 1 block of 384 threads, which setmaxnreg gives 40 or 232 of 168
    "RaggedTmaKernel": 168,
    "RaggedMatmulKernel": 128,  # 1 block of 512 threads
    "^sm_120 .*(TileKernel|(Amax|Quantize)KernelI)": 80,  # 3 blocks
    # 1 block: element by element
    "(QuantizeBlocksTranspose|LineAmaxes)Kernel.*Lb0E": 255,
    # 2 blocks: 64 registers hold a thread's share of a tile
    "(QuantizeBlocksTranspose|LineAmaxes)KernelIf": 128,
    "(QuantizeBlocksTranspose|LineAmaxes)Kernel": 80,  # 3 blocks: 32 registers hold it
    "^sm_120 .*AdamUpdateKernel": 128,  # 2 blocks
    "AdamUpdateKernel": 80,  # 3 blocks: two moments in registers
    "EncodeMomentKernel.*Lb0EEE": 80,  # 3 blocks: element by element
    "AmaxToScaleKernel": 32,  # 8 blocks
}

_KERNEL = re.compile(
    r"Compiling entry function '(\w+)' for '(\w+)'\n"
    r".*?(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads\n"
    r".*?Used (\d+) registers",
    re.DOTALL,
)


class Kernel(NamedTuple):
    """What one kernel uses on one architecture; its name is mangled, which tells the
    template's arguments apart.
    """

    name: str
    architecture: str
    stack: str
    stores: str
    loads: str
    registers: str

    @property
    def budget(self) -> int:
        """Registers a thread."""
        name = f"{self.architecture} {self.name}"
        budgets = (BUDGETS[pattern] for pattern in BUDGETS if re.search(pattern, name))
        return next(budgets, DEFAULT_BUDGET)

    @property
    def blocks(self) -> int:
        """How many blocks of BLOCK_SIZE threads fit on a multiprocessor."""
        of_a_warp = -(-int(self.registers) * 32 // 256) * 256
        return 65536 // (of_a_warp * (BLOCK_SIZE // 32))


@pytest.fixture(scope="module")
def kernels():
    if not REPORTS:
        pytest.skip("the CUDA module was not built, or without its report (make cuda)")
    logs = [log.read_text() for log in REPORTS]
    found = [Kernel(*fields) for log in logs for fields in _KERNEL.findall(log)]
    assert len(found) == sum(log.count("Compiling entry function") for log in logs)
    return found


def test_no_kernel_spills(kernels):
    for kernel in kernels:
        assert (kernel.stack, kernel.stores, kernel.loads) == ("0", "0", "0"), kernel
        assert int(kernel.registers) <= kernel.budget, kernel


def test_products_of_warpgroups_run_beside_their_warps():
    """ptxas waits for each wgmma where a warp uses its sums too early, or ignores a
    setmaxnreg, and says so.
    """
    logs = [log for log in REPORTS if "ragged" in log.name]
    if not logs:
        pytest.skip("the CUDA module was built without its report (make cuda)")
    for log in logs:
        assert not re.search("serialized|setmaxnreg", log.read_text()), log


def test_four_blocks_that_quantize_blocks_fit_on_hopper(kernels):
    of_halves = re.compile("QuantizeBlocksTransposeKernelINS_(3F16|4BF16).*Lb1E")
    if "sm_90a" not in ARCHITECTURES:
        pytest.skip("the CUDA module was built without sm_90a")
    found = [
        kernel
        for kernel in kernels
        if kernel.architecture == "sm_90a" and of_halves.search(kernel.name)
    ]
    assert found and {kernel.blocks for kernel in found} == {4}


def test_every_kernel_on_every_architecture(kernels):
    expected = (
        "Amax AmaxToScale Quantize Tile Dequantize QuantizeBlocksTranspose LineAmaxes"
    ).split()
    assert all(
        any(f"{name}Kernel" in kernel.name for kernel in kernels) for name in expected
    )
    counts = collections.Counter(kernel.architecture for kernel in kernels)
    assert set(counts) == set(ARCHITECTURES) and len(set(counts.values())) == 1, counts
