"""Plans on disk: those that come with the package, then those measured on this machine.

One JSON file for each model of device and version of cuBLASLt. Files are replaced as a whole, under a lock, so that
processes may write at the same time. A damaged file is ignored and written anew.
"""

import contextlib
import dataclasses
import json
import logging
import math
import os
import re
import tempfile
from pathlib import Path

from ..ops import _ffi
from ..ops._plans import DTYPES, Gemm, Plan, Platform

try:
    import fcntl
except ImportError:  # not a POSIX system: the last writer wins
    fcntl = None

SHIPPED = Path(__file__).with_name("_plans")
_FORMAT = 1
_NO_WAIT = getattr(os, "O_NONBLOCK", 0)
_log = logging.getLogger("jaxfp8")


def cache_folder() -> Path:
    """Return the folder of plans: `$JAXFP8_CACHE_DIR`, else `jaxfp8` in `$XDG_CACHE_HOME` or `~/.cache`."""
    if folder := os.environ.get("JAXFP8_CACHE_DIR"):
        return Path(folder)
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "jaxfp8"


def file_name(platform: Platform) -> str:
    """Return the name of the file with the plans of one platform."""
    device = re.sub(r"[^A-Za-z0-9.]+", "-", platform.device_name)
    return f"plans_{device}_cublaslt-{platform.cublaslt_version}.json"


def read(path: Path) -> tuple[Platform | None, dict[Gemm, Plan]]:
    """Return the platform and the plans of a file, without damaged entries; `(None, {})` of a missing or bad file."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe may never end
            raise OSError("not a regular file")
        content = json.loads(path.read_text())
        if content["format"] != _FORMAT:
            raise ValueError(f"format {content['format']}")
        platform = Platform(str(content["device_name"]), int(content["capability"]), int(content["cublaslt_version"]))
        entries = list(content["plans"])
    except FileNotFoundError:
        return None, {}
    except (OSError, ValueError, TypeError, KeyError, ArithmeticError, RecursionError) as error:
        _log.warning("jaxfp8: ignoring the plans in %s: %s: %s", path, type(error).__name__, error)
        return None, {}
    # A damaged entry costs one plan: the other entries are measurements as good as before.
    plans = {}
    for entry in entries:
        try:
            gemm = Gemm(**{name: entry[name] for name in Gemm._fields})
            plan = Plan(**{name: entry[name] for name in Plan._fields})
        except (TypeError, KeyError):
            continue
        if _is_plan(gemm, plan):
            plans[gemm] = plan
    if len(plans) < len(entries):
        _log.warning("jaxfp8: ignoring %d damaged plans in %s", len(entries) - len(plans), path)
    return platform, plans


def _is_plan(gemm: Gemm, plan: Plan) -> bool:
    numbers = all(type(getattr(gemm, name)) is type_ for name, type_ in Gemm.__annotations__.items())
    in_range = numbers and all(0 < value < 2**63 for value in gemm if type(value) is int)
    dtypes = numbers and all(dtype in DTYPES for dtype in (gemm.a, gemm.b, gemm.out))
    words = isinstance(plan.algorithm, str) and re.fullmatch("[0-9a-f]{128}", plan.algorithm)
    times = all(isinstance(time, (int, float)) and 0 < time < math.inf for time in plan[1:])
    return bool(in_range and dtypes and words and times)


def write(path: Path, platform: Platform, plans: dict[Gemm, Plan]) -> None:
    """Replace the file `path` by a file of these plans of one platform."""
    entries = [gemm._asdict() | plan._asdict() for gemm, plan in sorted(plans.items())]
    content = {"format": _FORMAT, **platform._asdict(), "plans": entries}
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(descriptor, "w") as file:
            json.dump(content, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path):
    """Hold the lock of the file `path` in the context; wait while another process holds it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Open without waiting: to open a pipe for writing may take for ever.
    with open(path.with_suffix(".lock"), "w", opener=lambda name, flags: os.open(name, flags | _NO_WAIT)) as lock:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@dataclasses.dataclass
class Store:
    """The plans that this process knows, beside the library's table of them.

    Attributes:
        plans: the plans of each platform; most platforms are other machines.
    """

    plans: dict[Platform, dict[Gemm, Plan]] = dataclasses.field(default_factory=dict)

    def load(self) -> None:
        """Read the shipped plans and those of this machine, which take precedence, into the module's table."""
        for folder in (SHIPPED, cache_folder()):
            try:
                paths = sorted(folder.glob("plans_*.json"))
            except (OSError, ValueError) as error:
                _log.warning("jaxfp8: no plans are read from %s: %s", folder, error)
                continue
            for path in paths:
                platform, plans = read(path)
                for gemm, plan in plans.items():
                    try:
                        _ffi.set_gemm_plan(platform, gemm, plan.algorithm)
                    except (RuntimeError, ValueError) as error:
                        _log.warning("jaxfp8: ignoring a plan in %s: %s: %s", path, gemm, error)
                    else:
                        self.plans.setdefault(platform, {})[gemm] = plan

    def on(self, platform: Platform) -> dict[Gemm, Plan]:
        """Return the plans of a platform."""
        return self.plans.setdefault(platform, {})

    def add(self, platform: Platform, plans: dict[Gemm, Plan]) -> None:
        """Keep measurements, here and on disk; where the disk cannot be written, warn and go on."""
        self.on(platform).update(plans)
        path = cache_folder() / file_name(platform)
        try:
            with _locked(path):
                before = read(path)
                present = before[1] if before[0] == platform else {}
                write(path, platform, present | plans)
        except (OSError, ValueError) as error:
            _log.warning("jaxfp8: plans are kept for this process only: %s", error)


store = Store()
