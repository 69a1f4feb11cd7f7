"""Compare an FP8 library with the vectors of this folder, in numpy:
`python conformance/check.py adapter.py`.
"""

import argparse
import importlib.util
import json
import pathlib
import sys

import numpy as np

VECTORS = pathlib.Path(__file__).parent / "vectors"


def cases(path: pathlib.Path):
    """Yield `(case, options, inputs, expected, bounds)` of a file, in its order."""
    with np.load(path) as file:
        values = {name: file[name] for name in file.files}
    for case in [
        name.removesuffix("/options") for name in values if name.endswith("/options")
    ]:
        parts = {}
        for kind in ("in", "out", "bound"):
            start = f"{case}/{kind}/"
            parts[kind] = {
                name.removeprefix(start): value
                for name, value in values.items()
                if name.startswith(start)
            }
        yield (
            case,
            json.loads(str(values[f"{case}/options"])),
            parts["in"],
            parts["out"],
            parts["bound"],
        )


def difference(got, expected: np.ndarray, bound: np.ndarray | None) -> str | None:
    """Return what is wrong with an array, or None. Without a bound every bit counts,
    except which NaN a float is.
    """
    got = np.asarray(got)
    if got.shape != expected.shape or (bound is None and got.dtype != expected.dtype):
        return (
            f"expected {expected.dtype}{list(expected.shape)}, got "
            f"{got.dtype}{list(got.shape)}"
        )
    if bound is None and expected.dtype == np.float32:
        wrong = (got.view(np.uint32) != expected.view(np.uint32)) & ~(
            np.isnan(got) & np.isnan(expected)
        )
    elif bound is None:
        wrong = got != expected
    else:
        wrong = ~(np.abs(got.astype(np.float64) - expected) <= bound)
    if not wrong.any():
        return None
    first = tuple(map(int, np.unravel_index(np.argmax(wrong), wrong.shape)))
    return (
        f"{wrong.sum()} of {wrong.size} differ; first at {first}: expected "
        f"{expected[first]!r}, got {got[first]!r}"
    )


def check(
    adapter, factor: float = 1.0, vectors: pathlib.Path = VECTORS
) -> tuple[dict[str, int], list[str]]:
    """Return how many cases of each op ran, and what failed.

    Args:
        adapter: a module, or any object, with the functions that README.md lists.
        factor: by which the bounds of products grow, for sums that are not float32's.
        vectors: the folder of the files.
    """
    ran, failures = {}, []
    for path in sorted(vectors.glob("*.npz")):
        function = getattr(adapter, path.stem, None)
        ran[path.stem] = 0
        for case, options, inputs, expected, bounds in cases(path) if function else ():
            ran[path.stem] += 1
            result = function(**inputs, **options)
            for name, value in expected.items():
                bound = factor * bounds[name] if name in bounds else None
                wrong = (
                    "missing"
                    if name not in result
                    else difference(result[name], value, bound)
                )
                if wrong:
                    failures.append(f"{path.stem}, {case}: {name}: {wrong}")
    return ran, failures


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "adapter",
        type=pathlib.Path,
        help="a Python file with the functions that README.md lists",
    )
    parser.add_argument(
        "--factor", type=float, default=1.0, help="by which the bounds of products grow"
    )
    args = parser.parse_args()
    spec = importlib.util.spec_from_file_location("adapter", args.adapter)
    adapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(adapter)
    ran, failures = check(adapter, args.factor)
    for op, count in ran.items():
        print(f"{op}: {count} cases" if count else f"{op}: not in the adapter")
    print("\n".join(failures) or "all agree")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main())
