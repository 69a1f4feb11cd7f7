"""JAX's plugin for CUDA 12 compiles the same programs: products here, and at night all
of this folder.
"""

import pytest

from . import conftest
from .test_products import (
    PROGRAM as PROGRAM,
    test_block_scaled_products_of_shards as test_block_scaled_products_of_shards,
    test_products_of_shards as test_products_of_shards,
)


@pytest.fixture(scope="module")
def on_h200():
    return conftest.compiler_of(12)
