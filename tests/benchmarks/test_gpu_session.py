"""tools/gpu_session.sh as a whole, in a small checkout and with a Python that only
acts: calls, failures, limits.
"""

import os
import pathlib
import shutil
import subprocess
import tarfile

import pytest

ROOT = pathlib.Path(__file__).parents[2]
RECORDS = ("model", "scan", "small", "gemm", "losses")  # of gpu.py, one each
# What a call leaves, beside steps.txt and logs.tar.gz.
JSON = {
    "test": {"selftest.json", "kernels.json"},
    "bench": {"gpu.json", "trainers.json"},
    "sanitize": set(),
    "minutes": {
        "selftest.json",
        "kernels.json",
        "ragged_tma.json",
        *(f"gpu_{name}.json" for name in RECORDS),
    },
}
# Says what it was asked, as a pip that installs jaxfp8 and as programs that write JSON
# and a table. `$json` is the argument of --json, `$target` that of --target.
PYTHON = """#!/bin/sh
echo "$PWD: $* (commit $JAXFP8_COMMIT)"
call="$*"
while [ $# -gt 0 ]; do
    case $1 in --json) json=$2;; --target) target=$2;; esac; shift;
done
if [ -n "$target" ]; then
    mkdir -p "$target/jaxfp8" &&
    touch "$target/jaxfp8/"_cuda.abi3.so "$target/jaxfp8/"old.py;
fi
if [ -n "$json" ]; then echo '{{}}' >"$json"; fi
case "$call" in
{cases}
*'-m pytest'*) head -c 60000 /dev/zero | tr '\\\\0' '.'; echo;
    echo '= 500 passed in 60 s =';;
*benchmarks/gpu.py*) seq -f 'kernel %g 47.1 us' 2000; echo 'quantize bf16 90 % met';;
esac
"""
TOOL = "#!/bin/sh\necho NVIDIA H200, says $0\n"

pytestmark = pytest.mark.skipif(
    shutil.which("timeout") is None or shutil.which("bash") is None, reason="needs bash"
)


@pytest.fixture
def checkout(tmp_path):
    """What travels: no .git, a wheelhouse whose wheel has these modules."""
    root = tmp_path / "checkout"
    shutil.copytree(ROOT / "tools", root / "tools")
    for folder in (
        "cmake",
        "common",
        "cpu",
        "cuda",
        "jaxfp8",
        "tests",
        "benchmarks",
        "wheelhouse",
    ):
        (root / folder).mkdir()
        (root / folder / "file.cc").write_text(folder)
    (root / "CMakeLists.txt").write_text("project()\n")
    (root / "jaxfp8" / "__init__.py").write_text("# of the checkout\n")
    for name in (
        "jaxfp8-0.2.0-cp312-abi3-linux_x86_64",
        "jaxfp8_cuda13-0.2.0-cp312-abi3-linux_x86_64",
        "flax-0.12.12-any",
    ):
        (root / "wheelhouse" / f"{name}.whl").touch()
    libraries = digest(root, "CMakeLists.txt", "cmake", "common", "cpu", "cuda")
    built = f"abc1234\n{libraries}{digest(root, 'jaxfp8')}"
    (root / "wheelhouse" / "built").write_text(built)
    for name in ("nvidia-smi", "nvcc"):
        tool = tmp_path / "bin" / name
        tool.parent.mkdir(exist_ok=True)
        tool.write_text(TOOL)
        tool.chmod(0o755)
    return root


def digest(root, *paths):
    return subprocess.run(
        ["bash", root / "tools" / "digest.sh", *paths], capture_output=True, text=True
    ).stdout


def session(root, call="test", cases="", budget=100, **environment):
    """Runs one call; returns the process, name -> line of steps.txt, and name ->
    log.
    """
    python = root.parent / "bin" / "python"
    python.write_text(PYTHON.format(cases=cases))
    python.chmod(0o755)
    out = root.parent / f"out-{call}"
    path = f"{python.parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", root / "tools" / "gpu_session.sh", call, str(budget)],
        env={k: v for k, v in os.environ.items() if k != "JAXFP8_COMMIT"}
        | {"PATH": path, "PYTHON": str(python), "OUT": str(out)}
        | environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    if not (out / "logs.tar.gz").exists():
        return done, {}, {}
    with tarfile.open(out / "logs.tar.gz") as archive:
        logs = {
            pathlib.Path(m.name).stem: archive.extractfile(m).read().decode()
            for m in archive
            if m.isfile()
        }
    steps = {
        line.split()[0]: line for line in (out / "steps.txt").read_text().splitlines()
    }
    return done, steps, logs


@pytest.mark.parametrize("call", JSON)
def test_a_whole_call(checkout, call):
    done, steps, logs = session(checkout, call)
    assert done.returncode == 0, done.stdout + done.stderr
    first, *names = steps
    assert steps[first] == f"{call} of abc1234"
    assert set(logs) - {"watts"} == set(names)
    assert all(" exit 0 " in steps[name] for name in names), steps
    out = checkout.parent / f"out-{call}"
    assert {path.name for path in out.iterdir()} == {"steps.txt", "logs.tar.gz"} | JSON[
        call
    ]
    assert "NVIDIA H200" in logs["machine"]
    # Only the last 12,000 characters are sent back: tables, summaries and all steps
    # have to be in them.
    report = done.stdout.split("(at most")[-1]
    assert len(report) < 12_000
    assert report.endswith("".join(f"{line}\n" for line in steps.values()))
    if call == "test":
        assert report.count("= 500 passed in 60 s =") == 3
        assert "-m gpu and not slow and not alone" in logs["gpu-tests"]
        assert "-n 8" not in logs["gpu-tests-alone"]
    if call == "minutes":
        assert all(f"gpu_{name}.json" in logs[name] for name in RECORDS)
    # Where the sources do not hide the installed package; and they all know the commit.
    in_tests = [
        name
        for name in steps
        if name.startswith(("gpu-tests", "selftest")) or name.endswith("check")
    ]
    assert all(logs[name].startswith(f"{checkout}/tests: ") for name in in_tests)
    assert all("(commit abc1234)" in logs[name] for name in names[2:])


def test_a_failure_stops_nothing_else(checkout):
    done, steps, _ = session(
        checkout, cases="*'not alone'*) echo 3 failed; exit 1;;\n*selftest*) exit 3;;"
    )
    assert done.returncode == 1 and "gpu-tests-slow" in steps
    assert [
        name
        for name, line in steps.items()
        if "exit" in line and " exit 0 " not in line
    ] == [
        "selftest",
        "gpu-tests",
    ]
    assert "3 failed" in done.stdout and "--- selftest" in done.stdout


def test_what_is_cut_off_takes_nothing_else(checkout):
    """A step that hangs is interrupted; what came before is there, what comes after is
    named.
    """
    hangs = "*'--only scan'*) sleep 60;;"
    done, steps, _ = session(checkout, "minutes", hangs, budget=15)
    assert done.returncode == 1
    ends = {name: line.split() for name, line in steps.items()}
    assert ends["model"][1:3] == ["exit", "0"] and ends["scan"][2] in ("124", "137")
    for name in ("small", "gemm", "trace", "losses"):
        assert "not started: the budget of 15 s is spent" in steps[name]
    out = checkout.parent / "out-minutes"
    assert (out / "gpu_model.json").exists() and (out / "kernels.json").exists()
    assert not (out / "gpu_losses.json").exists()
