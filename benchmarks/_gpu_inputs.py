"""What every case of the GPU benchmark starts from: its options, and random numbers."""

import dataclasses

import _gpu_models as models
import jax
import jax.numpy as jnp

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Options:
    """`tiny`: a dry run, at sizes for a CPU and with one of several like peers. `turns` of each candidate are timed."""

    tiny: bool
    turns: int

    def size(self, full: int, tiny: int = 64) -> int:
        return tiny if self.tiny else full

    def compilers(self, name: str = "") -> dict:
        """XLA's options that a candidate is compiled with, by the suffix of its name."""
        all_of_them = models.is_peer(name) and not self.tiny
        return models.COMPILERS if all_of_them else {"": None}


def normal(seed, shape, dtype=BF16):
    """Random numbers; zeros would run faster than what people train with."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
