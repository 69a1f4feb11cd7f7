"""The inputs of every case of the GPU benchmark: options and random numbers."""

import dataclasses

import _gpu_models as models
import jax
import jax.numpy as jnp

E4M3, BF16 = jnp.float8_e4m3fn, jnp.bfloat16


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run.

    Attributes:
        tiny: whether this is a dry run, at sizes for a CPU, and with the first of
            several similar peers.
        turns: how many turns of each candidate are timed.
        peers_once: whether peers are compiled only as XLA chooses, and not without
            Triton as well.
    """

    tiny: bool
    turns: int
    peers_once: bool = False

    def size(self, full: int, tiny: int = 64) -> int:
        return tiny if self.tiny else full

    def compilers(self, name: str = "") -> dict:
        """Return XLA's options to compile a candidate with, by the suffix that each
        adds to its name.
        """
        all_of_them = models.is_peer(name) and not (self.tiny or self.peers_once)
        return models.COMPILERS if all_of_them else {"": None}


def normal(seed, shape, dtype=BF16):
    """Return normal random numbers; on zeros a GPU would run faster than in
    training.
    """
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)
