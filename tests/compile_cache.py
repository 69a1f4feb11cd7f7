"""Compiled programs of the CPU, kept between runs in `build/programs`."""

import hashlib
import pathlib
import shutil

import jax
from jax._src import compiler

ROOT = pathlib.Path(__file__).parents[1]
# What acts while XLA compiles, after the key of a program is made.
SOURCES = [
    *sorted((ROOT / "jaxfp8" / "ops").glob("*.py")),
    *sorted((ROOT / "jaxfp8" / "_jax").glob("*.py")),
]


def enable() -> None:
    """Keep compiled programs in a folder for this JAX and these sources; remove the
    folders of other sources.
    """
    digest = hashlib.sha256(
        b"".join(path.read_bytes() for path in SOURCES)
    ).hexdigest()[:16]
    folder = ROOT / "build" / "programs" / f"jax-{jax.__version__}-{digest}"
    for other in folder.parent.glob(f"jax-{jax.__version__}-*"):
        if other != folder:
            shutil.rmtree(other, ignore_errors=True)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    compiler._get_cache_key = _only_whole_programs(compiler._get_cache_key)


def _only_whole_programs(get_cache_key):
    """Keep programs with `custom_partitioning` out: they name a rule by its address,
    which may be another's.
    """

    def cache_key(options, backend, computation, *args, **kwargs):
        is_whole = backend.platform == "cpu" and "CustomSPMDPartitioning" not in str(
            computation
        )
        return (
            get_cache_key(options, backend, computation, *args, **kwargs)
            if is_whole
            else None
        )

    return cache_key
