"""The kernels of layers on a GPU, one by one, by JAX's profiler: how often, how long,
and in which order.

    python benchmarks/gpu_trace.py [--calls N] [--only PROGRAM ...]

Prints for each program the launches of a call, the time from the first to the last, the
time that the device worked, and the kernels by their share of it. An earlier form of
this program printed `results/h200_trace.txt` on an H200.
"""

import argparse
import functools
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path

import _gpu_models as models
import _gpu_training
import jax
import numpy as np
from _gpu_inputs import normal
from kernels import KERNELS, _chain

LAYERS = (models.OWN, models.DROP_IN, models.FLAX, models.BF16)
MOST_KERNELS, MOST_IN_ORDER = 14, 40


def events_of(calls: int, run, *arguments) -> dict[str, list]:
    """Run a program a few times; return its kernels by stream, each as
    `(start, duration, name)` in ns.
    """
    compiled = jax.jit(run).lower(*arguments).compile()
    for _ in range(3):
        jax.block_until_ready(compiled(*arguments))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready([compiled(*arguments) for _ in range(calls)][-1])
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(path))
    lines = [
        line
        for plane in data.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
    ]
    streams = {
        line.name: sorted((e.start_ns, e.duration_ns, e.name) for e in line.events)
        for line in lines
    }
    return {
        name: events for name, events in streams.items() if "Stream" in name and events
    }


def show(name: str, calls: int, run, *arguments) -> None:
    print(f"\n== {name}")
    for stream, events in events_of(calls, run, *arguments).items():
        span = (events[-1][0] + events[-1][1] - events[0][0]) / 1e3 / calls
        busy = sum(duration for _, duration, _ in events) / 1e3 / calls
        print(
            f"{stream}: {len(events) / calls:.1f} launches a call, span {span:.1f} "
            f"us, busy {busy:.1f} us"
        )
        durations = defaultdict(list)
        for _, duration, kernel in events:
            durations[kernel].append(duration / 1e3)
        for kernel, each in sorted(durations.items(), key=lambda item: -sum(item[1]))[
            :MOST_KERNELS
        ]:
            print(
                f"   {len(each) / calls:6.1f} x {statistics.median(each):8.2f} us  "
                f"{kernel[:150]}"
            )
        count = len(events) // calls
        if count <= MOST_IN_ORDER:  # of a call in the middle, with the gaps before
            order = events[count - 1 : 2 * count]
            gaps = [
                (b[0] - a[0] - a[1]) / 1e3
                for a, b in zip(order, order[1:], strict=False)
            ]
            steps = [
                f"{e[2][:40]} {e[1] / 1e3:.1f} (+{gap:.1f})"
                for e, gap in zip(order[1:], gaps, strict=True)
            ]
            print("   seq:", " | ".join(steps))


def layer(name: str, calls: int, model, m: int, k: int, n: int) -> None:
    x, grad = normal(0, (m, k)), normal(1, (m, n))
    variables = jax.jit(model.init)(jax.random.key(0), x)
    show(name, calls, models.forward_and_backward(model), variables, x, grad)


def llama(name: str, calls: int) -> None:
    """Trace the gradients of the benchmark's model as a scan."""
    model = _gpu_training.llama(name, in_a_scan=True)
    batch = np.zeros((2, 4097), np.int32)
    variables = jax.jit(model.init)(jax.random.key(0), batch[:, :-1])

    def gradients(variables, batch):
        loss = _gpu_training.loss_fn
        return jax.value_and_grad(loss)(variables, model.apply, batch)

    show(f"llama {name}", calls, gradients, variables, batch)


def kernel(part: str, calls: int) -> None:
    make, shapes = KERNELS[part]
    work = make(*shapes[0])
    show(part, calls, functools.partial(_chain, work, 20), *work.arguments(0))


def programs(calls: int) -> dict:
    """Return the functions that trace, by name."""
    traces = {}
    for name in LAYERS:
        for title, m, n in (("small dense", 2048, 1024), ("dense", 8192, 8192)):
            title, model = f"{title} {name}", models.dense(name, n)
            traces[title] = functools.partial(layer, title, calls, model, m, n, n)
        traces[f"llama {name}"] = functools.partial(llama, name, calls)
    mlp = models.gated_mlp(models.OWN, 14336)
    title = "gated own"
    traces[title] = functools.partial(layer, title, calls, mlp, 8192, 4096, 4096)
    for part in ("delayed_scales", "read_histories, write_histories", "amax_to_scale"):
        traces[part] = functools.partial(kernel, part, calls)
    return traces


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--calls", type=int, default=3, help="calls that are traced (default: 3)"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], help="how names of programs begin"
    )
    args = parser.parse_args()
    for name, trace in programs(args.calls).items():
        if name.startswith(tuple(args.only)):
            trace()


if __name__ == "__main__":
    main()
