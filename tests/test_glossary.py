"""Pronouns and metaphors name nothing in jaxfp8: docs/glossary.md has the terms."""

import ast

import snippets

PACKAGE = snippets.ROOT / "jaxfp8"

# Pronouns and metaphors that once stood for terms of the glossary.
FORBIDDEN = {
    *(
        "of",
        "of_x",
        "of_kernel",
        "found",
        "wanted",
        "stored",
        "seen",
        "own",
        "other",
        "others",
        "ours",
        "theirs",
    ),
    *("alone", "what", "members", "marks", "probe", "made", "asking"),
}
# Public names: an argument, and the function that names a user's layers.
PUBLIC = {
    ("ops/_amax.py", "stored"),
    ("linen/_layers.py", "of"),
    ("nnx/_layers.py", "of"),
}


def definitions(source: str) -> set[str]:
    """The identifiers that a program defines: variables, arguments, attributes,
    functions, classes.
    """
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Name, ast.Attribute)) and isinstance(
            node.ctx, ast.Store
        ):
            names.add(node.id if isinstance(node, ast.Name) else node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
    return names


def forbidden(path: str, source: str) -> set[str]:
    return {
        name
        for name in definitions(source)
        if name.lstrip("_").lower() in FORBIDDEN and (path, name) not in PUBLIC
    }


def test_identifiers_are_terms():
    paths = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    wrong = {
        path: names
        for path, file in paths.items()
        if (names := forbidden(path, file.read_text()))
    }
    assert wrong == {}
