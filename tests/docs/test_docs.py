"""The Python of README.md and of every page under docs/ runs as it is printed; other
blocks say why not.
"""

import re

import pytest
import snippets

# CI's `make docs` runs the notebooks.
NOTEBOOKS = [
    pytest.param(page, marks=pytest.mark.slow) for page in snippets.notebooks()
]


@pytest.mark.parametrize(
    "runs", [1, pytest.param(2, marks=pytest.mark.slow)], ids=["", "again"]
)
@pytest.mark.parametrize(
    "page", [*filter(snippets.has_program, snippets.pages()), *NOTEBOOKS]
)
def test_programs(page, runs, tmp_path, monkeypatch, capsys):
    """A page runs, and again in one process and folder: a second run finds the names
    and the files of the first.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(snippets.ROOT / "examples")  # files that users copy
    monkeypatch.setenv("MPLBACKEND", "agg")
    names = None
    for _ in range(runs):
        names = snippets.run(page, names)
    printed = without_numbers(capsys.readouterr().out)
    assert [
        part for part in outputs(page) if without_numbers(part) not in printed
    ] == []


def outputs(page) -> list[str]:
    """The parts of a page that its programs print: ```text fences, without the lines
    that "..." stands for.
    """
    fences = re.findall(
        r"^```text\n(.*?)^```$", snippets.text_of(page), re.MULTILINE | re.DOTALL
    )
    return [part for fence in fences for part in fence.split("...\n") if part]


def without_numbers(text) -> str:
    """The text with one sign for a number and one space between words: names and
    columns stay, digits and widths go.
    """
    return re.sub(r"-?\b\d[\d.]*(e[+-]?\d+)?\b", "#", " ".join(text.split()))


OTHERS = [
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "SECURITY.md",
    "examples/README.md",
    "benchmarks/README.md",
    "benchmarks/compiled.md",
    "benchmarks/losses.md",
    "tests/README.md",
]


@pytest.mark.parametrize("page", [*snippets.pages(), *snippets.notebooks(), *OTHERS])
def test_links_within_the_repository(page):
    """A file that is linked is there, and a page has the heading; Sphinx sees what is
    under docs/ alone.
    """
    prose = re.sub("```.*?```|`[^`]*`", "", snippets.text_of(page), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        path, _, heading = link.partition("#")
        # made when the site is built
        if "://" in link or path.startswith("api/") or heading.startswith("jaxfp8."):
            continue
        target = (snippets.ROOT / page).parent / path if path else snippets.ROOT / page
        assert target.exists(), link
        if heading:
            titles = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            assert heading in {
                re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
                for title in titles
            }, link
