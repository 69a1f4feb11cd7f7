"""CONTRIBUTING and the pages for developers name what exists: every name in backticks,
every package in the drawing.
"""

import re

import pytest
import snippets
import tiers
from test_floors import FLOORS

ROOT = snippets.ROOT
PAGES = ["CONTRIBUTING.md", "docs/architecture.md"]
SOURCES = [
    "jaxfp8/**/*.py",
    "common/**/*.*",
    "cpu/**/*.*",
    "cuda/**/*.*",
    "tools/*",
    "pyproject.toml",
    "Makefile",
]
FILE = r"[\w./{},]*(/|\.(py|md|h|cc|cu|txt|toml))[\w./{},]*"


def words() -> set[str]:
    """Every word of the sources: a name that is defined or imported there is one of
    them.
    """
    paths = (
        path
        for pattern in SOURCES
        for path in ROOT.glob(pattern)
        if path.is_file() and path.suffix != ".md"
    )
    return set(
        re.findall(r"\w+", " ".join(path.read_text(errors="ignore") for path in paths))
    )


def files(name: str) -> list[str]:
    """The files that a name with `{op}`, `{h,cc}` or `.h,.cc` stands for, as
    patterns.
    """
    name = re.sub(r"\.(\w+),\.(\w+)$", r".{\1,\2}", name.rstrip("/")).replace(
        "{op}", "*"
    )
    stem, brace, ends = name.partition("{")
    return [stem + end for end in ends.rstrip("}").split(",")] if brace else [name]


def missing(text: str, known: set[str]) -> list[str]:
    """The code in backticks that names a file, a target of make or a word that does not
    exist.
    """
    prose = " ".join(re.sub(r"```.*?```", "", text, flags=re.DOTALL).split())
    return [
        code
        for code in dict.fromkeys(re.findall(r"`([^`]+)`", prose))
        if not _exists(code, known)
    ]


def _exists(code, known):
    if target := re.fullmatch(r"make (\w[\w-]*)", code):
        return re.search(
            rf"^{target[1]}( [\w-]+)*:", (ROOT / "Makefile").read_text(), re.MULTILINE
        )
    # A placeholder and a file that the command writes need not exist.
    code = re.sub(r"<[^>]*>|\S+\.json", "", code)
    parts = code.split() if code.startswith("python ") else [code]
    return all(
        all(map(_glob, files(part)))
        if re.fullmatch(FILE, part)
        else _known(part, known)
        for part in parts
    )


def _known(code, known):
    return all(word in known for word in re.findall(r"[A-Za-z_]\w{2,}", code))


def _glob(pattern):
    # A page may leave out the folder that its sentence is about.
    folders = ("", "jaxfp8/", "tests/*/", "jaxfp8/*/", "cpu/", "cpu/*/")
    return any(
        path.exists() for folder in folders for path in ROOT.glob(folder + pattern)
    )


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    assert missing((ROOT / page).read_text(), words()) == []


def test_the_drawing_has_every_package_on_its_floor():
    svg = (ROOT / "docs" / "images" / "architecture.svg").read_text()
    boxes = re.findall(r'y="(\d+)"[^>]*font-weight="bold">([^<]+)<', svg)
    height = {
        name: -int(y)
        for y, names in boxes
        for name in names.split(", ")
        if "library" not in name
    }
    packages = {path.parent.name for path in (ROOT / "jaxfp8").glob("*/__init__.py")}
    assert set(height) == packages
    floors = [
        [height[name] for name in floor.split() if name in packages] for floor in FLOORS
    ]
    floors = [floor for floor in floors if floor]
    for below, above in zip(floors, floors[1:], strict=False):
        assert max(below) < min(above)


def test_every_package_and_every_folder_of_tests_is_in_their_table():
    """`tests/README.md` answers "I changed this: which tests?", and what it names
    exists.
    """
    text = (ROOT / "tests" / "README.md").read_text()
    tables = [
        [line.split("|")[1:-1] for line in part.splitlines() if line[:2] == "| "]
        for part in text.split("\n## ")
    ]
    changed, folders = (
        [[re.findall(r"`([\w./]+)`", cell) for cell in row] for row in tables[i]]
        for i in (1, 2)
    )
    packages = {path.parent.name for path in (ROOT / "jaxfp8").glob("*/__init__.py")}
    assert packages <= {name for row in changed for name in row[0]}
    for names, first, *_ in changed[1:]:
        own = [
            f"{name}/"
            for name in names
            if (ROOT / "tests" / name).is_dir() and name in packages
        ]
        assert first[: len(own)] == own, "a package's own folder comes first"
    for row in changed:
        assert all(
            (ROOT / "tests" / name).exists()
            for cell in row[1:]
            for name in cell
            if "." in name or "/" in name
        )
    tested = {
        path.parent.relative_to(ROOT / "tests").as_posix()
        for path in (ROOT / "tests").glob("*/**/test_*.py")
    }
    assert {f"{folder}/" for folder in tested} <= {
        name for row in folders for name in row[0]
    }


def test_files_of_the_tiers_exist():
    names = [*tiers.CI, *tiers.ONE_CASE, *tiers.LONGEST]
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []
