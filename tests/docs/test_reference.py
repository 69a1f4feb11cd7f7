"""The API reference: it has every public name, each with a description."""

import importlib
import inspect
import sys

import pytest
import snippets

sys.path.insert(0, str(snippets.ROOT / "docs"))

import reference  # noqa: E402

MODULES = reference.public_modules()


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_is_described(module):
    assert (importlib.import_module(module).__doc__ or "").strip(), (
        f"{module} has no docstring"
    )
    bare = []
    for name in reference.public_names(module):
        if not reference.description(module, name):
            bare.append(name)
        described = getattr(importlib.import_module(module), name)
        methods = vars(described) if inspect.isclass(described) else {}
        for method, value in methods.items():
            is_public = inspect.isfunction(value) and not method.startswith("_")
            if is_public and value.__module__.startswith("jaxfp8"):
                if not inspect.getdoc(getattr(described, method)):
                    bare.append(f"{name}.{method}")
    assert not bare, (
        f"{module}: {bare}: expected a docstring, or a comment above the line that "
        "defines a constant"
    )


@pytest.mark.parametrize("module", MODULES)
def test_modules_list_what_they_show(module):
    """An `__all__` is in the order of the alphabet, modules first; a module without one
    has no names, which `dir` and `import *` would give.
    """
    namespace = vars(importlib.import_module(module))
    names = reference.public_names(module)
    if "__all__" in namespace:
        modules = sorted(set(namespace["__all__"]) - set(names))
        assert namespace["__all__"] == [*modules, *names]
    else:
        shown = {name for name in namespace if not name.startswith("_")}
        assert not {n for n in shown if not inspect.ismodule(namespace[n])}
