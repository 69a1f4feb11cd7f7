"""What the fast run leaves to the slow one: recipes with options, in layers, transforms and on meshes.

How a layer or a transform hands tensors to a product does not depend on a recipe's options; `test_products.py` has them
all.
"""

import re

import pytest

OPTIONS = re.compile(r"e4m3|e5m2|power_2|hybrid|floor")
FILES = ("test_layers", "test_transforms", "test_meshes")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        callspec = getattr(item, "callspec", None)
        if item.path.stem in FILES and "recipes" in item.path.parts and callspec and OPTIONS.search(callspec.id):
            item.add_marker("slow")
