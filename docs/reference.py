"""The API reference: which names are public, and the pages that Sphinx reads for them.

A module says what is public in its `__all__`, as Python and type checkers read it.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
import pathlib
import pkgutil

import docstrings

# Parts that packages share; what users need of them is in `jaxfp8` itself.
SHARED = {"jaxfp8.dot", "jaxfp8.numerics"}


def public_modules() -> list[str]:
    """`jaxfp8`, its modules, and every one below it without an underscore, in the order
    of the alphabet.
    """
    found, packages = ["jaxfp8"], ["jaxfp8"]
    while packages:
        package = packages.pop()
        for module in pkgutil.iter_modules(
            importlib.import_module(package).__path__, f"{package}."
        ):
            if (
                not module.name.rpartition(".")[2].startswith("_")
                and module.name not in SHARED
            ):
                found.append(module.name)
                packages += [module.name] * module.ispkg
    listed = importlib.import_module("jaxfp8").__all__
    found += [
        f"jaxfp8.{name}" for name in listed if inspect.ismodule(_value("jaxfp8", name))
    ]
    return sorted(set(found))


def public_names(module: str) -> list[str]:
    """The public names of a module, but for those that are modules themselves, in the
    order of the alphabet.
    """
    names = getattr(importlib.import_module(module), "__all__", ())
    return sorted(name for name in names if not inspect.ismodule(_value(module, name)))


def homes() -> dict[str, str]:
    """Each public name, as `module.name`, and the name under which it is described: the
    first of the same object.
    """
    found, first = {}, {}
    for module in public_modules():
        for name in public_names(module):
            where = _origin(module, name)
            found[f"{module}.{name}"] = first.setdefault(where, f"{module}.{name}")
    return found


def description(module: str, name: str) -> str:
    """The docstring of a function or class; of anything else the comment above its
    definition. Empty where none is.
    """
    node = _definition(module, name)
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return ast.get_docstring(node) or ""
    above = _lines(_origin(module, name)[0])[: node.lineno - 1]
    comment = []
    while above and above[-1].startswith("# "):
        comment.insert(0, above.pop()[2:])
    return "\n".join(comment)


def write_pages(folder: pathlib.Path) -> None:
    """`folder/<module>.rst` for each public module. Pages that stay what they are are
    not touched.
    """
    folder.mkdir(exist_ok=True)
    described = homes()
    pages = {
        folder / f"{module}.rst": _page(module, described)
        for module in public_modules()
    }
    for stale in set(folder.glob("jaxfp8*.rst")) - set(pages):
        stale.unlink()
    for path, text in pages.items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)


def _page(module: str, described: dict[str, str]) -> str:
    lines = [module, "=" * len(module), "", f".. automodule:: {module}", ""]
    for name in public_names(module):
        full, node = f"{module}.{name}", _definition(module, name)
        if described[full] != full:
            lines += [
                f".. py:attribute:: {full}",
                "   :no-index:",
                "",
                f"   :py:obj:`{described[full]}`",
                "",
            ]
        elif isinstance(node, ast.ClassDef):
            lines += [f".. autoclass:: {full}", "   :members:", ""]
        elif isinstance(node, ast.FunctionDef):
            lines += [f".. autofunction:: {full}", ""]
        else:
            lines += [f".. py:data:: {name}", ""]
            lines += [
                f"   {line}"
                for line in docstrings.inline(description(module, name)).splitlines()
            ] + [""]
    return "\n".join(lines)


# -------------------------------------------------------------- what a source file says


def _value(module: str, name: str):
    return getattr(importlib.import_module(module), name)


def _lines(module: str) -> list[str]:
    return (
        pathlib.Path(importlib.import_module(module).__file__).read_text().splitlines()
    )


@functools.cache
def _body(module: str) -> list[ast.stmt]:
    return ast.parse("\n".join(_lines(module))).body


def _imported(module: str) -> dict[str, tuple[str, ast.alias]]:
    """The names that a module imports from others: from where, and how it says so."""
    package = importlib.import_module(module).__spec__.parent
    found = {}
    for node in _body(module):
        if isinstance(node, ast.ImportFrom):
            source = importlib.util.resolve_name(
                "." * node.level + (node.module or ""), package
            )
            found |= {
                alias.asname or alias.name: (source, alias) for alias in node.names
            }
    return found


def _defined(module: str) -> dict[str, ast.stmt]:
    """The names that a module defines, and where."""
    found = {}
    for node in _body(module):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found[node.name] = node
        for target in getattr(node, "targets", [getattr(node, "target", None)]):
            if isinstance(target, ast.Name):
                found[target.id] = node
    return found


def _origin(module: str, name: str) -> tuple[str, str]:
    """The module where a name is defined, and what it is called there."""
    while name in _imported(module):
        module, alias = _imported(module)[name]
        name = alias.name
    return module, name


def _definition(module: str, name: str) -> ast.stmt:
    module, name = _origin(module, name)
    return _defined(module)[name]
