"""docs/glossary.md: its terms are in use, and pronouns and metaphors name nothing in
the package.
"""

import ast
import re

import pytest
import snippets

GLOSSARY = snippets.ROOT / "docs" / "glossary.md"
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
# Public arguments, which keep their names.
PUBLIC = {("ops/_amax.py", "stored")}


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


def test_every_term_is_in_use():
    terms = re.findall(r"\*\*(.+?)\*\*", GLOSSARY.read_text())
    assert len(terms) == len(set(terms)) and len(terms) >= 30
    pages = [page for page in (snippets.ROOT / "docs").glob("*.md") if page != GLOSSARY]
    text = "\n".join(
        path.read_text() for path in [*pages, *PACKAGE.rglob("*.py")]
    ).lower()
    assert [
        term
        for term in terms
        if not re.search(rf"\b{re.escape(term.lower().removesuffix('s'))}", text)
    ] == []


def test_identifiers_are_terms():
    paths = {str(path.relative_to(PACKAGE)): path for path in PACKAGE.rglob("*.py")}
    wrong = {
        path: names
        for path, file in paths.items()
        if (names := forbidden(path, file.read_text()))
    }
    assert wrong == {}


@pytest.mark.parametrize(
    "source",
    [
        "def f(wanted): ...",
        "for of in x: ...",
        "_seen = 1",
        "_OURS = 1",
        "self.members = 2",
        "def _alone(): ...",
        "x = [own for own in y]",
    ],
)
def test_forbidden_identifiers_are_found(source):
    assert forbidden("ops/_amax.py", source)
    assert not forbidden("ops/_amax.py", "stored = f(x.found, wanted=1)")
