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
    bare = [
        name
        for name in reference.public_names(module)
        if not reference.description(module, name)
    ]
    assert not bare, (
        f"{module}: {bare}: expected a docstring, or a comment above the line that "
        "defines a constant"
    )


@pytest.mark.parametrize("module", MODULES)
def test_every_public_method_is_described(module):
    for name in reference.public_names(module):
        described = getattr(importlib.import_module(module), name)
        for method, value in (
            vars(described).items() if inspect.isclass(described) else ()
        ):
            if (
                not method.startswith("_")
                and inspect.isfunction(value)
                and value.__module__.startswith("jaxfp8")
            ):
                assert inspect.getdoc(getattr(described, method)), (
                    f"{module}.{name}.{method} has no docstring"
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
