"""The text of `benchmarks/compare.py`, which needs no download: Python's own reference
manual.
"""

import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).parents[1] / "benchmarks"))
from _compare_corpus import Corpus as Corpus  # noqa: E402
