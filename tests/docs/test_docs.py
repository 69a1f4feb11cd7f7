"""The Python of README.md and of every page under docs/ runs as it is printed; other
blocks say why not.
"""

import re
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import snippets
from flax.training import train_state
from flax.traverse_util import flatten_dict

import jaxfp8


def check_custom_recipes(names):
    assert names["recipe"].quantizers()[0] is not None and names["amax"].shape == (1,)


def check_experts(names):
    for state in jax.tree.leaves(
        names["state"], is_leaf=lambda x: isinstance(x, jaxfp8.recipes.QuantizerState)
    ):
        assert (np.asarray(state.amax_history) > 0).sum() == 1
    experts = names["train"].params[jaxfp8.OVERWRITE_WITH_GRADIENT]["Experts_0"]
    for name, leaf in flatten_dict(experts, sep="/").items():
        if name.endswith("amax_history"):
            assert (np.asarray(leaf) > 0).sum() == 3, name


def check_mixed_precision(names):
    assert jnp.isfinite(names["loss"])
    assert names["loss_scale"].value <= 65536
    assert 1 <= names["train"].step <= 6


def check_performance(names):
    assert names["y"].dtype == jnp.bfloat16
    state = names["variables"][jaxfp8.OVERWRITE_WITH_GRADIENT]["Fp8DotGeneral_0"]
    assert all(leaf[0] > 0 for name, leaf in state.items() if name.endswith("history"))


# Checks of the names that a page leaves, beside its own asserts.
CHECKS = {
    "docs/custom_recipes.md": check_custom_recipes,
    "docs/experts.md": check_experts,
    "docs/mixed_precision.md": check_mixed_precision,
    "docs/performance.md": check_performance,
}


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
        CHECKS.get(page, lambda names: None)(names)
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


def test_the_lines_that_change():
    """README and the index show the same ones, and README's program without FP8 runs
    with the old ones.
    """
    pages = (snippets.text_of(page) for page in ("README.md", "docs/index.md"))
    shown, again = (
        re.search(r"```diff\n(.*?)```", page, re.DOTALL)[1].splitlines()
        for page in pages
    )
    assert shown == again
    old, new = (
        [line[1:].strip() for line in shown if line[0] == sign] for sign in "-+"
    )
    assert len(old) == len(new) == 3
    program = re.search(
        r"```python\n(.*?)```", snippets.text_of("README.md"), re.DOTALL
    )[1]
    for before, after in zip(old, new, strict=True):
        assert program.count(after) == 1
        program = program.replace(after, before)
    names = {"TrainState": train_state.TrainState}
    with jax.numpy_dtype_promotion("standard"):
        exec(compile(program, "README.md", "exec"), names)
    assert names["loss"] < 0.5 and "_overwrite_with_gradient" not in names["variables"]


def test_pictures_are_drawn_and_shown(tmp_path):
    """Every picture of docs/pictures.py is committed and on a page; their bytes follow
    the version of matplotlib.
    """
    sys.path.insert(0, str(snippets.ROOT / "docs"))
    pictures = pytest.importorskip("pictures")
    pictures.main(tmp_path)
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert len(drawn) == 6 and all("</svg>" in text for text in drawn.values())
    # as in performance.md
    assert "<!-- 2364 us -->" in drawn["timeline.svg"]
    # as in benchmarks/compiled.md
    assert all(
        f"<!-- {label} -->" in drawn["launches.svg"] for label in (30, 1920, 3056)
    )
    shown = "".join((snippets.ROOT / page).read_text() for page in snippets.pages())
    for name in drawn:
        assert (snippets.ROOT / "docs" / "images" / name).exists()
        assert f"images/{name})" in shown


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


@pytest.mark.parametrize("page", snippets.pages())
def test_python_is_marked_as_such(page):
    """Other fences hold no Python, but for one expression that stands for a place in a
    program: ```py.
    """
    text = (snippets.ROOT / page).read_text()
    fences = re.findall(r"^```([^\n]*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert len(re.findall("^ *```", text, re.MULTILINE)) == 2 * len(fences), (
        "a fence is not closed, or it is indented"
    )
    for language, body in fences:
        assert language not in ("python3", "py3", "pycon", "ipython", "Python"), (
            language
        )
        if language == "py":
            compile(body.strip(), page, "eval")
        if language in ("", "text"):
            assert "\nimport " not in body and not body.startswith(("import ", "from "))


EXCUSED = "*Not run here: it needs a GPU.*\n\n```python\nassert False\n```\n\n"


@pytest.mark.parametrize(
    "text, fails",
    [
        ("```python\nassert False\n```\n", True),
        (EXCUSED, False),
        ("*Not run here: .*\n\nOther text.\n\n```python\nassert False\n```\n", True),
        (f"{EXCUSED}```python\nassert False\n```\n\n{EXCUSED}", True),
        ("```python\nx = 1\n```\n\n```python\nassert x == 1\n```\n", False),
    ],
)
def test_what_runs(tmp_path, monkeypatch, text, fails):
    (tmp_path / "page.md").write_text(text)
    monkeypatch.setattr(snippets, "ROOT", tmp_path)
    if fails:
        with pytest.raises(AssertionError):
            snippets.run("page.md")
    else:
        snippets.run("page.md")
