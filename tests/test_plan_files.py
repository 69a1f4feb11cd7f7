"""Plans on disk: what is read and written, damaged files, several writers, and which file wins."""

import json
import logging
import multiprocessing
import os
import signal

import pytest

from jaxfp8.autotune import _plan_files as files
from jaxfp8.ops import _ffi
from jaxfp8.ops._plans import Gemm, Plan, Platform

PLATFORM = Platform("NVIDIA H200", 90, 130002)
ALGORITHM = "0123456789abcdef" * 8


def gemm(m=16, **changes):
    fields = (1, m, 48, 32, "f8e4m3fn", "f8e5m2", "bf16", False, False, True, 32 << 20, 128)
    return Gemm(*fields)._replace(**changes)


def plan(microseconds=2.5, algorithm=ALGORITHM):
    return Plan(algorithm, microseconds, 3.5)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache folder; an empty folder in place of the shipped plans."""
    monkeypatch.setenv("JAXFP8_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "SHIPPED", tmp_path / "shipped")
    return tmp_path / "cache"


@pytest.fixture
def table(monkeypatch):
    """In place of the library's: (platform, gemm) -> algorithm."""
    table = {}

    def set_plan(platform, gemm, algorithm):
        if gemm.m % 16:
            raise RuntimeError("not a product that scaled_matmul computes")
        table[platform, gemm] = algorithm

    monkeypatch.setattr(_ffi, "set_gemm_plan", set_plan)
    return table


def path_in(folder, platform=PLATFORM):
    return folder / files.file_name(platform)


def test_round_trip(cache, table):
    plans = {gemm(): plan(), gemm(32, has_bias=True): plan(1.25)}
    files.Store().add(PLATFORM, plans)
    assert files.read(path_in(cache)) == (PLATFORM, plans)
    store = files.Store()
    store.load()
    assert store.plans == {PLATFORM: plans}
    assert table == {(PLATFORM, g): ALGORITHM for g in plans}


def test_additions(cache):
    """Other products stay, the same product is replaced, other platforms have other files."""
    store = files.Store()
    store.add(PLATFORM, {gemm(16): plan(), gemm(32): plan()})
    files.Store().add(PLATFORM, {gemm(32): plan(1.0), gemm(48): plan()})
    files.Store().add(PLATFORM._replace(cublaslt_version=1), {gemm(64): plan()})
    assert files.read(path_in(cache))[1] == {gemm(16): plan(), gemm(32): plan(1.0), gemm(48): plan()}
    assert len(list(cache.glob("*.json"))) == 2 and not list(cache.glob("*.new"))


def test_shipped_plans_come_first(cache, table):
    """A made-up table in the package is loaded; this machine's measurements take precedence."""
    other = "f" * 128
    files.write(path_in(files.SHIPPED), PLATFORM, {gemm(16): plan(), gemm(32): plan()})
    files.Store().add(PLATFORM, {gemm(32): plan(algorithm=other)})
    store = files.Store()
    store.load()
    assert table == {(PLATFORM, gemm(16)): ALGORITHM, (PLATFORM, gemm(32)): other}
    assert store.on(PLATFORM) == {gemm(16): plan(), gemm(32): plan(algorithm=other)}


def good() -> dict:
    return {
        "format": 1,
        **PLATFORM._asdict(),
        "plans": [g._asdict() | plan()._asdict() for g in (gemm(16), gemm(32))],
    }


DAMAGED = {
    "empty": "",
    "cut off": json.dumps(good())[:-40],
    "binary": b"\xff\xfe\x00",
    "not an object": "[1, 2]",
    "no format": json.dumps({k: v for k, v in good().items() if k != "format"}),
    "another format": json.dumps(good() | {"format": 2}),
    "no version": json.dumps(good() | {"cublaslt_version": None}),
    "an infinite version": json.dumps(good() | {"cublaslt_version": float("inf")}),
    "plans of another type": json.dumps(good() | {"plans": 3}),
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damaged_files(cache, table, content, caplog):
    """Ignored with one line in the log; the next measurement replaces them."""
    cache.mkdir()
    path_in(cache).write_bytes(content if isinstance(content, bytes) else content.encode())
    with caplog.at_level(logging.WARNING):
        files.Store().load()
    assert table == {}
    assert [record.message for record in caplog.records if "ignoring the plans in" in record.message], caplog.text
    files.Store().add(PLATFORM, {gemm(): plan()})
    assert files.read(path_in(cache)) == (PLATFORM, {gemm(): plan()})


WRONG = {
    "algorithm": ["0" * 127, "g" * 128, 5],
    "m": ["16", 2**63, True, -16, 24],  # the library refuses the last one
    **{"batch": [0], "k": [None], "a": ["f64"], "precise": [1]},
    "microseconds": [float("inf"), "fast", 0],
}


@pytest.mark.parametrize("change", [{name: value} for name in WRONG for value in WRONG[name]], ids=str)
def test_damaged_entries(cache, table, change, caplog):
    """The others stay."""
    content = good()
    content["plans"][0] |= change
    cache.mkdir()
    path_in(cache).write_text(json.dumps(content))
    with caplog.at_level(logging.WARNING):
        files.Store().load()
    assert table == {(PLATFORM, gemm(32)): ALGORITHM}
    assert "ignoring" in caplog.text


def test_folder_that_cannot_be_written(cache, caplog):
    cache.write_text("a file in its place")
    store = files.Store()
    with caplog.at_level(logging.WARNING):
        store.add(PLATFORM, {gemm(): plan()})
    assert store.on(PLATFORM) == {gemm(): plan()} and "for this process only" in caplog.text


@pytest.mark.parametrize("suffix", [".json", ".lock"])
def test_pipe_in_place_of_a_file(cache, table, suffix):
    """Nobody writes into it or reads from it, and nothing waits."""
    cache.mkdir()
    os.mkfifo(path_in(cache).with_suffix(suffix))
    signal.alarm(20)  # kills the process that waits
    files.Store().load()
    files.Store().add(PLATFORM, {gemm(): plan()})
    signal.alarm(0)
    assert table == {} and files.read(path_in(cache))[1] == ({gemm(): plan()} if suffix == ".json" else {})


@pytest.mark.parametrize("folder", ["x" * 5000, "~\u2603" * 400, "/dev/null", "/proc/self/mem/cache"])
def test_folder_that_cannot_be(cache, table, monkeypatch, folder):
    """The package is imported, and measurements hold for the process."""
    monkeypatch.setenv("JAXFP8_CACHE_DIR", folder)
    store = files.Store()
    store.load()
    store.add(PLATFORM, {gemm(): plan()})
    assert store.on(PLATFORM) == {gemm(): plan()} and table == {}


def _add(folder, first):
    os.environ["JAXFP8_CACHE_DIR"] = str(folder)
    for i in range(first, 40, 2):
        files.Store().add(PLATFORM, {gemm(16 * (i + 1)): plan()})


@pytest.mark.slow
def test_two_writers(cache):
    """Neither loses what the other has written, and a reader always finds a whole file."""
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_add, args=(cache, first)) for first in (0, 1)]
    for writer in writers:
        writer.start()
    reads = 0
    while any(writer.is_alive() for writer in writers):
        if path_in(cache).exists():
            json.loads(path_in(cache).read_text())
            reads += 1
    assert [writer.exitcode for writer in writers] == [0, 0]
    assert set(files.read(path_in(cache))[1]) == {gemm(16 * (i + 1)) for i in range(40)}
    assert reads and not list(cache.glob("*.new"))
