"""The environment of a comparison: machine, devices and versions."""

import jax

from ..inspect._machine import processor, versions


def environment() -> dict:
    """Return the processor, the devices and the versions that times and losses depend on."""
    return {
        "machine": {"cpu": processor(), "devices": [str(device) for device in jax.devices()]},
        "versions": versions(("jax", "jaxlib", "flax", "optax", "numpy")),
    }


def device_name() -> str:
    """Return the device that programs run on, as its vendor calls it."""
    device = jax.devices()[0]
    return f"{processor()} (CPU)" if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"
