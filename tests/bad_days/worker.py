"""The rows for one library, in a process that may die: `python -m tests.bad_days.worker LIBRARY BIG NAME...`.

It prints the name of a row before it runs it, and the verdict as JSON after.
"""

import dataclasses
import json
import sys
import warnings

import jax

from tests import conftest as conftest  # eight CPU devices; `import oracle`

from . import libraries, rows, verdict


def main(name, big, *names):
    # As users have JAX: Flax's own FP8 promotes dtypes.
    jax.config.update("jax_numpy_dtype_promotion", "standard")
    jax.config.update("jax_numpy_rank_promotion", "allow")
    warnings.simplefilter("ignore")
    library = dataclasses.replace(libraries.LIBRARIES[name], big=big == "big")
    for each in names:
        print(json.dumps({"begins": each}), flush=True)
        found = verdict.judged(rows.BY_NAME[each], library)
        print(json.dumps({"row": each, "outcome": found.outcome.name, "measured": found.measured}), flush=True)
        jax.clear_caches()


if __name__ == "__main__":
    main(*sys.argv[1:])
