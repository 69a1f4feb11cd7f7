#!/usr/bin/env bash
# Makes a virtual environment with jaxfp8 (editable, compiled modules built) and what an extra needs.
#
#   tools/setup.sh VENV EXTRA [cuda]
#
# Runs again only when something it depends on changed; the stamps live in the environment. With `cuda`, the CUDA module
# is built as well, with a toolkit from wheels where the machine has none, and the compiler for GPUs installed. The module
# has code for the GPUs of $JAXFP8_CUDA_ARCHITECTURES, such as "90a" or "89;90a"; for all that are supported without it.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=$1 extra=$2 want_cuda=${3:-}
python=${PYTHON:-python3}

say() { printf 'jaxfp8: %s\n' "$*" >&2; }
die() { say "error: $*"; exit 1; }
# Runs a long step quietly; shows what it printed if it fails.
step() {
  local title=$1 log; shift
  say "$title ..."
  log=$(mktemp)
  if ! "$@" >"$log" 2>&1; then tail -n 30 "$log" >&2; rm -f "$log"; return 1; fi
  rm -f "$log"
}

command -v "$python" >/dev/null || die "'$python' not found; install Python 3.11 or newer, or name one: make PYTHON=/path/to/python"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
  || die "$("$python" --version) is too old; Python 3.11 or newer is needed: make PYTHON=/path/to/python"

if [ ! -x "$venv/bin/pip" ]; then
  say "making $venv with $("$python" --version)"
  "$python" -m venv "$venv" >/dev/null 2>&1 \
    || die "'$python -m venv' failed; install the venv module (Debian and Ubuntu: apt install python3-venv)"
fi

digest() { cat "$@" | cksum | tr -d ' '; }
sources=$(find CMakeLists.txt cmake common cpu cuda -name build -prune -o -type f ! -name '*.md' -print | sort)
dependencies="$(digest pyproject.toml) $extra"
build="$(digest pyproject.toml $sources) $(command -v "${CXX:-c++}" || command -v g++ || true)"

# Without --no-compile pip would translate every file of every package, most of which nobody imports: half of its time.
# Python translates a file when it is imported first.
pip_install() { "$venv/bin/python" -m pip --disable-pip-version-check -q install --no-compile "$@"; }

# The requirements of an extra, one a line; with `only`, without those of the package and its build.
requirements() {
  "$venv/bin/python" - "$@" <<'PY'
import sys, tomllib
pyproject = tomllib.load(open("pyproject.toml", "rb"))
project = pyproject["project"]
names = list(project["optional-dependencies"][sys.argv[1]])
if "only" not in sys.argv:
    # jaxlib's headers come with jax; pip adds no build tools where it does not isolate the build.
    build = [r for r in pyproject["build-system"]["requires"] if not r.startswith("jaxlib")]
    names += [*project["dependencies"], *build, "cmake>=3.24", "ninja"]
for name in names:
    if name.startswith("jaxfp8["):
        names += project["optional-dependencies"][name[len("jaxfp8["):-1]]
    else:
        print(name)
PY
}

stamp="$venv/.jaxfp8-$extra"
if [ "$(cat "$stamp" 2>/dev/null)" != "$dependencies" ]; then
  step "installing Python packages for '$extra'" pip_install -U pip \
    || die "pip cannot reach a package index"
  # The build runs in this environment: its jaxlib has the FFI headers.
  requirements "$extra" >"$venv/requirements.txt"
  step "  downloading (a few hundred MB the first time)" pip_install -r "$venv/requirements.txt" \
    || die "these packages could not be installed: $(tr '\n' ' ' <"$venv/requirements.txt")"
  printf '%s' "$dependencies" >"$stamp"
fi

define=AUTO
if [ "$want_cuda" = cuda ]; then
  toolkit="$venv/.jaxfp8-toolkit"
  if [ ! -e "$toolkit" ]; then
    requirements toolkit only >"$venv/requirements.txt"
    step "installing the CUDA 13.0 toolkit from wheels (500 MB the first time)" \
      pip_install -r "$venv/requirements.txt" \
      || die "no CUDA toolkit: its wheels could not be installed here"
    # XLA's compiler for TPUs, likewise: JAX would look for a TPU. A JAX reads the programs of the version that it names.
    libtpu=$("$venv/bin/python" -c 'import importlib.metadata
print(next(r.split(";")[0] for r in importlib.metadata.requires("jax") if r.startswith("libtpu")))')
    step "installing $libtpu, to compile for TPUs without one" \
      pip_install --no-deps --target "$venv/tpu" "$libtpu" \
      || say "warning: no libtpu; programs of tests/tpu will be skipped"
    touch "$toolkit"
  fi
  # XLA's compilers for GPUs, for tests that count what is in a program: in folders of their own, because JAX would look
  # for the GPU on every start.
  version=$("$venv/bin/python" -c 'import jax; print(jax.__version__)')
  for cuda in cuda13 cuda12; do
    [ -d "$venv/aot-$cuda" ] || step "installing JAX's plugin $version for $cuda, to compile for GPUs without one" \
      pip_install --no-deps --target "$venv/aot-$cuda" "jax-$cuda-plugin==$version" "jax-$cuda-pjrt==$version" \
      || say "warning: no plugin for $cuda and JAX $version; tests of it in tests/aot will be skipped"
  done
  define=ON
fi

# A module once built with CUDA, or for more GPUs, is not thrown away by a later run that asks for less.
stamp="$venv/.jaxfp8-build"
built=$(cat "$stamp" 2>/dev/null || true)
architectures=${JAXFP8_CUDA_ARCHITECTURES:-all}
wanted="$build $define"
[ "$define" = AUTO ] || wanted+=" $architectures"
[ "$define" = ON ] || [[ $built != "$build ON "* ]] || wanted=$built
if [ "$built" != "$build ON all" ] && [ "$built" != "$wanted" ]; then
  started=$SECONDS
  options=(-C cmake.define.JAXFP8_CUDA="$define" -C cmake.define.JAXFP8_CUDA_ARCHITECTURES="$architectures")
  PATH="$(cd "$venv/bin" && pwd):$PATH" step "building the compiled modules (CUDA: $define, GPUs: $architectures)" \
    pip_install --no-build-isolation --no-deps -e . "${options[@]}" -C build-dir="build/$(basename "$venv")" \
    || die "the compiled modules could not be built"
  say "built in $((SECONDS - started)) s"
  # What was not built, and why.
  find "$venv"/lib/python*/site-packages/jaxfp8/_modules.txt -exec grep 'not built' {} + | sed 's/^/jaxfp8: /' >&2 || true
  printf '%s' "$wanted" >"$stamp"
fi
