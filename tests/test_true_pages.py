"""CONTRIBUTING and the pages for developers name what exists, in backticks."""

import re

import pytest
import snippets
import tiers

ROOT = snippets.ROOT
PAGES = ["CONTRIBUTING.md", "docs/architecture.md", "tests/README.md"]
SOURCES = ["jaxfp8", "common", "cpu", "cuda", "tools", "tests", "benchmarks", "docs"]
SUFFIXES = {".py", ".h", ".cc", ".cu", ".cuh", ".sh", ".txt"}


def words() -> set[str]:
    """Every word of the sources and of the names of files: a name that is defined or
    imported there is one of them.
    """
    paths = [path for folder in SOURCES for path in (ROOT / folder).rglob("*")]
    texts = [str(path.relative_to(ROOT)) for path in [*paths, *ROOT.iterdir()]]
    sources = [path for path in paths if path.suffix in SUFFIXES]
    for path in [*sources, ROOT / "pyproject.toml", ROOT / "Makefile"]:
        texts.append(path.read_text(errors="ignore"))
    return set(re.findall(r"\w+", " ".join(texts)))


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    """Of the code in backticks; a placeholder is no name."""
    prose = re.sub(r"```.*?```|<[^>]*>", "", (ROOT / page).read_text(), flags=re.DOTALL)
    code = " ".join(re.findall(r"`([^`]+)`", prose))
    assert set(re.findall(r"[A-Za-z_]\w{2,}", code)) - words() == set()


def test_files_of_the_tiers_exist():
    names = [*tiers.CI, *tiers.ONE_CASE, *tiers.LONGEST]
    assert [name for name in names if not (ROOT / "tests" / name).exists()] == []
