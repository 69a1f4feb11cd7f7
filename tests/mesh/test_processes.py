"""Processes that train together over `jax.distributed`: each holds the state and weights of one process, bit for bit.

The processes (worker.py) are started here, on CPU devices that talk over Gloo, and end with the test whatever happens.
"""

import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from mesh import cases, worker

SECONDS = 240  # for all processes together; they take 20 where there is a core for each
TESTS = pathlib.Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(commands, seconds, **options):
    """Runs the commands at the same time. When one fails, or time is up, all are killed with what they started.

    Raises:
        AssertionError: with what the processes wrote to stderr.
    """
    end = time.monotonic() + seconds
    with contextlib.ExitStack() as stack:
        running = []
        for command in commands:
            errors = stack.enter_context(open(f"{command[-1]}.stderr", "w+"))
            process = subprocess.Popen(command, stderr=errors, start_new_session=True, **options)
            stack.callback(kill, process)
            running.append((process, errors))
        while any(process.poll() is None for process, _ in running):
            failed = any(process.returncode for process, _ in running)
            if failed or time.monotonic() > end:
                break
            time.sleep(0.1)
        codes = [process.poll() for process, _ in running]
        if any(codes) or None in codes:
            written = [pathlib.Path(errors.name).read_text()[-3000:] for _, errors in running]
            raise AssertionError(
                f"exit codes {codes}, None: killed after {seconds} s or another one's failure:\n"
                + "\n---\n".join(written)
            )


def kill(process):
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((2, 2), id="2 processes of 2 devices"),
        pytest.param((4, 1), id="4 processes of 1 device", marks=pytest.mark.slow),
    ],
)
def ranks(request, tmp_path_factory):
    """What each process holds at the end of each run: `{"run|path|index|device": values}`."""
    processes, devices = request.param
    folder, port = tmp_path_factory.mktemp("ranks"), free_port()
    files = [folder / f"rank{rank}.npz" for rank in range(processes)]
    commands = [
        [sys.executable, "-m", "mesh.worker", str(rank), str(processes), str(port), str(devices), str(file)]
        for rank, file in enumerate(files)
    ]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    run_together(commands, SECONDS, cwd=TESTS, env=environment | {"JAX_PLATFORMS": "cpu"})
    return [dict(np.load(file)) for file in files]


@pytest.mark.parametrize("name", worker.RUNS)
def test_every_process_holds_what_one_process_computes(ranks, name):
    layout, with_nan = worker.RUNS[name]
    alone = worker.train(cases.mesh(shape=(1,), axes=("all",)), layout, with_nan)
    wanted = {
        jax.tree_util.keystr(path): np.asarray(leaf)
        for path, leaf in jax.tree.leaves_with_path(dataclasses.asdict(alone))
    }
    seen = {path: np.zeros(leaf.shape, bool) for path, leaf in wanted.items()}
    for rank, shards in enumerate(ranks):
        for key, values in shards.items():
            run, path, index, device = key.split("|")
            if run != name:
                continue
            where = tuple(slice(*map(int, part.split(":"))) for part in index.split(",") if part)
            np.testing.assert_array_equal(values, wanted[path][where], f"rank {rank}, device {device}: {path}[{index}]")
            seen[path][where] = True
            if path.startswith("['state']"):
                assert values.shape == wanted[path].shape, "state is whole on every device"
    assert all(part.all() for part in seen.values())


def test_a_nan_is_seen_by_all(ranks):
    """The last process alone has it in its data. In that step no process notes an amax of x."""
    batches = worker.data(with_nan=True)
    poisoned = [np.isnan(batch.x).any(axis=(1, 2)) for batch in batches]
    assert [rows.tolist() for rows in poisoned if rows.any()] == [[False] * (cases.BATCH - 1) + [True]]
    for shards in ranks:
        histories = [
            values
            for key, values in shards.items()
            if key.startswith("fsdp with a NaN|['state']['w1']") and "input" in key and "amax_history" in key
        ]
        assert histories
        for history in histories:
            # H = 4 slots after 5 steps, newest first, oldest last: steps 4, 1, 2, 3 (roll(-1) and slot 0 overwritten).
            assert history[2] == 0 and (history[[0, 1, 3]] > 0).all()
