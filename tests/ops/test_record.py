"""The record of the selftest: what it is valid for, and files that are missing, damaged, or written by two at once."""

import json
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import pytest

from jaxfp8.ops import _ffi, _support

FAILED = ["values:amax", "graph:quantize"]


@pytest.fixture
def system(monkeypatch, tmp_path):
    """A cache folder, and a machine whose parts a test changes; the record is forgotten as in a new process."""

    def has(module=b"\x7fELF", driver="580.1", jax="0.12.0", jaxfp8="0.2.0", cublaslt=130100):
        (tmp_path / "_cuda.so").write_bytes(module)
        monkeypatch.setattr(_support, "driver", lambda: driver)
        monkeypatch.setattr(_support.jax, "__version__", jax)
        monkeypatch.setattr(_support.importlib.metadata, "version", {"jaxfp8": jaxfp8}.__getitem__)
        monkeypatch.setattr(_ffi, "cublaslt_version", lambda: cublaslt)
        _support.read_record.cache_clear()

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(_ffi, "module_path", lambda name: str(tmp_path / f"{name}.so"))
    has()
    yield has
    _support.read_record.cache_clear()


def write(kind="H200", failed=FAILED) -> pathlib.Path:
    path = _support.write_record(_support.record_key(kind), failed)
    _support.read_record.cache_clear()
    return path


def test_what_is_written_is_read(system):
    assert _support.read_record("H200") == {}
    write()
    record = _support.read_record("H200")
    assert record["failed"] == FAILED and len(record["date"].split("-")) == 3
    write(failed=[])
    assert _support.read_record("H200")["failed"] == []


@pytest.mark.parametrize(
    "change",
    [{"module": b"\x7fELF2"}, {"driver": "590"}, {"jax": "0.13.0"}, {"jaxfp8": "0.3.0"}, {"cublaslt": 130200}],
    ids=lambda change: next(iter(change)),
)
def test_another_system_is_another_record(system, change):
    """It has none, and its own takes nothing away."""
    write()
    system(**change)
    assert _support.read_record("H200") == {}
    write(failed=[])
    system()
    assert _support.read_record("H200")["failed"] == FAILED


def test_another_gpu_is_another_record(system):
    write()
    assert _support.read_record("B200") == {}
    write("B200", [])
    assert (_support.read_record("H200")["failed"], _support.read_record("B200")["failed"]) == (FAILED, [])


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"3",
        b"\xff\xfe",
        b"[" * 10**5,
        b'{"key": {}, "date": "", "failed": []}',
        b'{"key": 1}',
    ],
    ids=lambda content: content[:12].decode("latin-1"),
)
def test_a_damaged_file(system, content):
    write().write_bytes(content)
    assert _support.read_record("H200") == {}
    write()
    assert _support.read_record("H200")["failed"] == FAILED


@pytest.mark.parametrize("failed", [None, 3, {"a": 1}, [3, None], "amax"])
def test_a_file_with_other_types(system, failed):
    path = write()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"failed": failed, "date": 1}))
    assert all(isinstance(name, str) for name in _support.read_record("H200").get("failed", []))


@pytest.mark.parametrize("kind", ["folder", "pipe", "link to itself", "not readable", "a file for its folder"])
def test_what_stands_in_its_place(system, kind):
    """Reading gives nothing, and does not wait."""
    path = write()
    if kind == "not readable":
        if os.geteuid() == 0:
            pytest.skip("root reads every file")
        path.chmod(0)
    else:
        path.unlink()
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "link to itself":
        path.symlink_to(path)
    elif kind == "a file for its folder":
        path.parent.rmdir()
        path.parent.touch()
        with pytest.raises(OSError):
            write()
    assert _support.read_record("H200") == {}


@pytest.mark.parametrize("part", ["module_path", "cublaslt_version"])
def test_a_system_without_a_part(system, monkeypatch, part):
    def broken(*_):
        raise RuntimeError("none")

    write()
    monkeypatch.setattr(_ffi, part, broken)
    assert _support.read_record("H200") == {}


@pytest.mark.parametrize("cache, used", [(None, False), ("", False), ("relative", False), ("/absolute", True)])
def test_the_folder(system, monkeypatch, tmp_path, cache, used):
    """The XDG convention: a path that is not absolute does not count."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    if cache is not None:
        monkeypatch.setenv("XDG_CACHE_HOME", cache)
    folder = pathlib.Path("/absolute") if used else tmp_path / ".cache"
    assert _support.record_path({}).parent == folder / "jaxfp8"


def test_writers_at_once(system):
    """A reader always meets the whole file of one of them, and none leaves anything behind."""
    key, sizes = _support.record_key("H200"), {1, 500, 5000, 20000}
    path = _support.write_record(key, ["x"])
    with ThreadPoolExecutor(len(sizes)) as pool:
        writes = [pool.submit(_support.write_record, key, ["x"] * size) for size in sizes for _ in range(10)]
        while not all(write.done() for write in writes):
            assert len(json.loads(path.read_text())["failed"]) in sizes
    assert {write.result() for write in writes} == {path} and os.listdir(path.parent) == [path.name]
