"""Checks types as users of the package see them: `python tools/check_types.py`, in an
environment with basedpyright.

Every public function has annotations (`--verifytypes`), and tests/docs/usage.py
type-checks but where it must not. What types hold of JAX and Flax is theirs: that some
of those are not known is no error here.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
CHECKER = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
MISSING = "^(Type annotation for parameter|Return type annotation)"
# The checkout itself: what an editable install imports by a hook, no checker follows.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}
COMMANDS = ("jaxfp8.selftest", "jaxfp8.__main__")  # nobody imports them


def missing_annotations() -> list[str]:
    """A line for each annotation that a public function lacks."""
    command = [*CHECKER, "--verifytypes", "jaxfp8", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(
        command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True
    )
    report = json.loads(done.stdout)["typeCompleteness"]
    if not report["symbols"]:
        sys.exit(f"types: no symbols of jaxfp8 were found: {done.stdout[:2000]}")
    found = []
    for symbol in report["symbols"]:
        if not symbol["name"].startswith(COMMANDS):
            messages = [
                diagnostic["message"].splitlines()[0]
                for diagnostic in symbol["diagnostics"]
            ]
            found += [
                f"{symbol['name']}: {message}"
                for message in messages
                if re.search(MISSING, message)
            ]
    return found


def main() -> int:
    """Runs both checks; 1 where one fails."""
    missing = missing_annotations()
    print("\n".join([*missing, f"types: {len(missing)} annotations are missing"]))
    return subprocess.run(
        [*CHECKER, "tests/docs/usage.py"], cwd=ROOT, env=ENVIRONMENT
    ).returncode or bool(missing)


if __name__ == "__main__":
    sys.exit(main())
