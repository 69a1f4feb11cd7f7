"""Flax's own FP8 tests, unmodified, with our classes in the place of Flax's.

    git clone --depth 1 https://github.com/google/flax
    python tools/flax_fp8_tests.py flax

Runs the case `Fp8Test` of the checkout's tests/linen/linen_test.py against the
installed Flax. Each line says which class of ours ran in that test.
`nn.NANOOFp8DotGeneralOp` stays Flax's, because AMD's fnuz formats are not ours, and
some tests are of Flax's private functions alone. Exit status 0 where all pass.
"""

import argparse
import importlib.util
import pathlib
import sys
import unittest

import flax
import flax.linen as nn
import jax
from flax.linen import fp8_ops

import jaxfp8
from jaxfp8.linen import Fp8Einsum
from jaxfp8.linen._dot_general import Fp8Module

SWAPS = {
    "Fp8DotGeneral": jaxfp8.Fp8DotGeneral,
    "Fp8DirectDotGeneralOp": jaxfp8.Fp8DotGeneral,
    "Fp8DotGeneralOp": jaxfp8.Fp8DotGeneral,
    "Fp8Einsum": Fp8Einsum,
}


def load(path: pathlib.Path):
    """The test file as a module."""
    spec = importlib.util.spec_from_file_location("flax_linen_test", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def count_uses() -> list:
    """A list that grows by one with each product of a module of ours."""
    uses, original = [], Fp8Module._read_state

    def counted(self, recipe):
        uses.append(type(self).__name__)
        return original(self, recipe)

    Fp8Module._read_state = counted
    return uses


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("checkout", type=pathlib.Path, help="a Flax checkout")
    path = parser.parse_args().checkout / "tests" / "linen" / "linen_test.py"
    if not path.is_file():
        parser.error(f"checkout: expected a Flax checkout, {path} is no file")

    for name, ours in SWAPS.items():
        for module in (nn, fp8_ops):
            if not hasattr(module, name):
                parser.error(
                    f"{module.__name__} has no {name}: this Flax has renamed its "
                    "classes"
                )
            setattr(module, name, ours)
    uses = count_uses()
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(load(path).Fp8Test)
    print(f"jax {jax.__version__}, flax {flax.__version__}, {path}")
    all_pass = suite.countTestCases() > 0
    for test in suite:
        uses.clear()
        result = unittest.TestResult()
        test(result)
        verdict = (
            "skipped"
            if result.skipped
            else "pass"
            if result.wasSuccessful()
            else "FAIL"
        )
        all_pass &= verdict == "pass"
        print(
            f"{verdict:8}{', '.join(sorted(set(uses))) or 'none of ours':16}"
            f"{test.id().split('.', 1)[1]}"
        )
        for _, trace in result.failures + result.errors:
            print(trace)
    print(
        f"{suite.countTestCases()} tests, {'all pass' if all_pass else 'not all pass'}"
    )
    return 0 if all_pass else 1


if __name__ == "__main__":
    sys.exit(main())
