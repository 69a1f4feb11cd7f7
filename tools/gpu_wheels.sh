#!/usr/bin/env bash
# Fills wheelhouse/ with what a GPU machine without a network may lack: our wheels, Flax, pytest and what these import.
# The machine has Python 3.12, JAX with its CUDA plugin, and NumPy. tools/gpu_session.sh installs them.
#
#   tools/gpu_wheels.sh VENV     VENV: an environment for the tools, made by tools/wheels.sh
#
# wheelhouse/built says what our wheels were made of: the commit, and digests of the modules' sources and of the package.
# They are made again only when the modules' sources have changed. PYTHON is 3.12 or newer: its wheels fit all of them.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1
"${PYTHON:-python3}" -c 'import sys; sys.exit(sys.version_info < (3, 12))' \
  || { echo "gpu_wheels: needs Python 3.12 or newer, whose wheel fits that of the GPU machine: PYTHON=python3.12" >&2; exit 1; }

modules=$(tools/digest.sh CMakeLists.txt cmake common cpu cuda)
mkdir -p wheelhouse
if [ "$(sed -n 2p wheelhouse/built 2>/dev/null)" != "$modules" ]; then
  tools/wheels.sh "$venv" cuda13
  rm -f wheelhouse/jaxfp8[-_]*.whl
  cp dist/jaxfp8[-_]*.whl wheelhouse/
fi
printf '%s\n' "$(git describe --always --dirty)" "$modules" "$(tools/digest.sh jaxfp8)" >wheelhouse/built

# Flax from 0.12.12 on works with JAX 0.11.2. Of what it needs, Orbax and TensorStore are for checkpoints: no GPU test
# has any.
find wheelhouse -name '*.whl' ! -name 'jaxfp8[-_]*' -delete # of each package one version
"${PYTHON:-python3}" -m pip --disable-pip-version-check -q download --no-deps --only-binary=:all: -d wheelhouse \
  --python-version 3.12 --implementation cp \
  --platform manylinux_2_28_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux2014_x86_64 --platform any \
  flax==0.12.12 optax msgpack treescope rich markdown-it-py mdurl pygments absl-py typing_extensions PyYAML \
  pytest pytest-xdist execnet iniconfig pluggy packaging hypothesis sortedcontainers
du -ch wheelhouse/*.whl | tail -n 1
