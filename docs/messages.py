"""The page of all errors and warnings, which is read from the sources: nothing lists
messages by hand.
"""

import ast
import pathlib
import re

import docstrings

PACKAGE = pathlib.Path(__file__).parents[1] / "jaxfp8"
WARNINGS = {"warn", "warning"}
# What makes an exception or a reason that another function raises or warns of.
_MADE = ("Error", "Unavailable")
_HEAD = """\
Errors and warnings
===================

Every message of jaxfp8, by package: search this page for a few words of yours that are not names, shapes or numbers.
``…`` stands for those. The causes of the most frequent ones are in :doc:`/troubleshooting`.
"""


def messages() -> list[tuple[str, str, str]]:
    """`(package, kind, text)` of each message that the package raises, warns or logs,
    with … for what it formats.
    """
    rows = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        package = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        tree = ast.parse(path.read_text())
        rows |= {(package, kind, _text(text)) for kind, text in _templates(tree)}
        for node in ast.walk(tree):
            call = node.exc if isinstance(node, ast.Raise) else node
            if isinstance(call, ast.Call) and call.args:
                kind = ast.unparse(call.func).rpartition(".")[2]
                if (
                    isinstance(node, ast.Raise)
                    or kind in WARNINGS
                    or kind.endswith(_MADE)
                ):
                    texts = [_text(argument) for argument in call.args]
                    rows.add((package, kind, max(texts, key=len)))
            elif (
                isinstance(node, ast.Assign)
                and ast.unparse(node.targets[0]) == "message"
            ):
                rows.add((package, "", _text(node.value)))
    # A message of fewer words is made elsewhere.
    return sorted(row for row in rows if len(re.findall(r"\w+", row[2])) > 2)


def _templates(tree: ast.Module):
    """Sentences that a module keeps in constants, such as `_REMEDIES`, are parts of its
    messages.
    """
    for node in tree.body:
        if isinstance(node, ast.Assign) and re.fullmatch(
            "_[A-Z_]+", ast.unparse(node.targets[0])
        ):
            if len(_text(node.value).split()) > 12:
                yield "", node.value


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return re.sub(r"%[sd]|\{\w*\}", "…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value) for value in node.values)
    if isinstance(node, ast.BinOp):
        return _text(node.left) + _text(node.right)
    return "…"


def write_page(path: pathlib.Path) -> None:
    """The page, in reStructuredText; a file that is up to date stays as it is."""
    lines, last = [_HEAD], None
    for package, kind, text in messages():
        if package != last:
            heading = f"jaxfp8.{package}".removesuffix(".__init__")
            lines += ["", heading, "-" * 40, ""]
            last = package
        kind = (
            f"*{kind}*: "
            if kind[:1].isupper()
            else "*warning*: "
            if kind in WARNINGS
            else ""
        )
        lines.append(f"- {kind}{docstrings.escaped(' '.join(text.split()))}")
    page = "\n".join(lines) + "\n"
    if not path.exists() or path.read_text() != page:
        path.write_text(page)
