"""`python -m tests.bad_days [TEXT]`: every bad day, or those with TEXT in their title,
for jaxfp8 and for Flax's own FP8, side by side, as a table in Markdown.
"""

import sys
import warnings

import jax

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from .libraries import FLAX, OURS
from .rows import BY_NAME
from .verdict import judged


def main() -> None:
    # As users have JAX: Flax's own FP8 promotes dtypes.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    warnings.simplefilter("ignore")
    wanted = " ".join(sys.argv[1:])
    print(f"| row | {OURS.name} | {FLAX.name} |\n|---|---|---|")
    for row in BY_NAME.values():
        # "more than 2^31 elements" takes 12 GiB: by its name alone
        if wanted not in row.title or (row.name == "large" and not wanted):
            continue
        cells = [row.title]
        for library in (OURS, FLAX):
            verdict = judged(row, library)
            cells.append(f"{verdict.outcome.value}: {verdict.measured}")
            jax.clear_caches()
        print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
