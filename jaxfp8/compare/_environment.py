"""Where a comparison ran."""

import importlib.metadata
import pathlib
import platform

import jax


def environment() -> dict:
    """The processor, the devices and the versions that times and losses depend on."""
    packages = ("jax", "jaxlib", "flax", "optax", "numpy")
    return {
        "machine": {"cpu": cpu_model(), "devices": [str(device) for device in jax.devices()]},
        "versions": {"python": platform.python_version()}
        | {name: importlib.metadata.version(name) for name in packages},
    }


def device_name() -> str:
    """The device that programs run on, as its vendor calls it."""
    device = jax.devices()[0]
    return f"{cpu_model()} (CPU)" if device.platform == "cpu" else f"{device.device_kind} ({device.platform})"


def cpu_model() -> str:
    """The processor, as the system names it."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
