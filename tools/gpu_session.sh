#!/usr/bin/env bash
# What a GPU is needed for, in calls of ten minutes, each by itself on a bare machine without a network:
#
#   OUT=gpu-session/test tools/gpu_session.sh test [SECONDS]            build, self-test, benchmark of kernels, GPU tests
#   OUT=gpu-session/bench tools/gpu_session.sh bench [SECONDS]          the other benchmarks
#   OUT=gpu-session/sanitize tools/gpu_session.sh sanitize [SECONDS]    compute-sanitizer
#   OUT=gpu-session/minutes tools/gpu_session.sh minutes [SECONDS]      what comes first where there are fifteen minutes in all
#
# SECONDS, 570 by default, is for the whole call. Steps run in order of importance, each under a limit of its own and
# what is left of the budget; one that fails stops nothing but what needs its build. A step at its limit is interrupted,
# which makes pytest say where it was, and killed ten seconds later; its exit code is 124, or 137.
#
# Wheels of wheelhouse/ (tools/gpu_wheels.sh) are installed in a folder of the call, with the Python files of this
# checkout in the place of the wheel's. Without wheels of these very modules they are built here first.
#
# $OUT gets few files: steps.txt (the commit, exit codes, seconds), logs.tar.gz (a log of each step), and the JSON that
# programs write; after each step, so that what was done is there if the call is cut off. The report comes last, in less
# than 12,000 characters. In the environment:
#
#   PYTHON          the interpreter with jax; default python3
#   STEPS           only these steps, with the jaxfp8 that is installed unless `install` is one of them
#   JAXFP8_COMMIT   which commit this is, where there is no .git; by default the one of wheelhouse/built
#   JAXFP8_DISABLE  ops that run as their reference
set -u
cd "$(dirname "$0")/.." || exit 1
die() { printf 'gpu_session: %s\n' "$*" >&2; exit 2; }

call=${1:-} budget=${2:-570}
[[ $call =~ ^(test|bench|sanitize|minutes)$ ]] || die "expected test, bench, sanitize or minutes, got '$call'"
python=$(command -v "${PYTHON:-python3}") || die "${PYTHON:-python3} not found"

built() { sed -n "$1p" wheelhouse/built 2>/dev/null; }
commit=${JAXFP8_COMMIT:-}
[ -n "$commit" ] || [ ! -e .git ] || commit=$(git describe --always --dirty)
if [ -z "$commit" ] && [ -n "$(built 1)" ]; then
  commit=$(built 1)
  [ "$(built 2) $(built 3)" = "$(tools/digest.sh CMakeLists.txt cmake common cpu cuda) $(tools/digest.sh jaxfp8)" ] \
    || commit+=+changes
fi
[ -n "$commit" ] || die "which commit is this? There is no .git: set JAXFP8_COMMIT"
export JAXFP8_COMMIT=$commit

out=${OUT:-gpu-session/$call}
mkdir -p "$out"
out=$(cd "$out" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
mkdir "$work/logs"
printf '%s of %s%s\n' "$call" "$commit" "${JAXFP8_DISABLE:+, without $JAXFP8_DISABLE}" >"$out/steps.txt"
export PYTHONUNBUFFERED=1 PYTHONPATH="$work/site${PYTHONPATH:+:$PYTHONPATH}"
status=0

chosen() { case " ${STEPS:-$1} " in *" $1 "*) return 0 ;; *) return 1 ;; esac; }

record() {  # NAME CODE START
  printf '%-16s exit %-3s %4s s\n' "$1" "$2" "$((SECONDS - $3))" >>"$out/steps.txt"
  tar -czf "$work/logs.tar.gz" -C "$work" logs && mv "$work/logs.tar.gz" "$out/logs.tar.gz"
  [ "$2" -eq 0 ] || status=1
}

step() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$2 start=$SECONDS left=$((budget - SECONDS)) code
  shift 2
  chosen "$name" || return 0
  if [ "$left" -lt 5 ]; then
    printf '%-16s not started: the budget of %s s is spent\n' "$name" "$budget" >>"$out/steps.txt"
    status=1
    return 1
  fi
  [ "$left" -lt "$limit" ] && limit=$left
  printf '=== %s (at most %s s)\n' "$name" "$limit"
  # A shell in the background ignores INT, and what it starts too, unless told otherwise.
  timeout -s INT -k 10 "$limit" env --default-signal=INT "$@" >"$work/logs/$name.log" 2>&1
  code=$?
  record "$name" "$code" "$start"
  return "$code"
}

# The sources are compiled where a wheel is tried too: beside the self-test, with the CPUs that it leaves.
compile() {  # TARGET
  "$python" -m pip install -q --no-index --no-build-isolation --no-deps --no-compile --upgrade --target "$1" \
    -C cmake.define.JAXFP8_CUDA=ON -C build-dir="$work/build" .
}

install() {
  local wheels=(wheelhouse/*.whl)
  [ -e "${wheels[0]}" ] || wheels=()
  if [ "$(built 2)" = "$(tools/digest.sh CMakeLists.txt cmake common cpu cuda)" ]; then
    echo "the modules are those of the wheel"
  else
    echo "wheelhouse/ has no wheel of these modules: building"
    compile "$work/site" || return 1
    for i in "${!wheels[@]}"; do [[ ${wheels[i]} == */jaxfp8[-_]* ]] && unset "wheels[i]"; done
  fi
  if [ "${#wheels[@]}" -gt 0 ]; then
    "$python" -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$work/site" \
      "${wheels[@]}" || return 1
  fi
  find "$work/site/jaxfp8" -name '*.py' -delete
  tar -cf - --exclude=_ptxas --exclude=_modules.txt --exclude='*.so' --exclude=__pycache__ jaxfp8 | tar -xf - -C "$work/site"
}
export -f built compile install
export python work

# Where the sources do not hide the installed package. Several processes share the GPU's memory.
pytest=(env -C tests XLA_PYTHON_CLIENT_PREALLOCATE=false "$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors --durations=10
  -o faulthandler_timeout=60 ops cuda)

step machine 30 bash -c 'nvidia-smi; nvcc --version; "$python" -m pip list 2>/dev/null \
  | grep -i -E "^(jax|flax|torch|numpy|optax|nvidia-cu|pytest)"; true'
step install 300 bash -c install || call=none
case $call in
  test)
    if [ -e wheelhouse/built ] && chosen compile; then
      compiling=$SECONDS
      nice -n 19 timeout -k 10 200 bash -c 'compile "$work/compiled"' >"$work/logs/compile.log" 2>&1 &
      compiler=$!
    fi
    step selftest 200 env -C tests "$python" -m jaxfp8.selftest --json "$out/selftest.json"
    if [ -n "${compiler:-}" ]; then
      wait "$compiler"
      record compile $? "$compiling"
    fi
    step kernels 120 "$python" benchmarks/gpu.py --only ceilings kernels --budget 90 --json "$out/kernels.json"
    step gpu-tests 240 "${pytest[@]}" -n 8 --dist worksteal -m "gpu and not slow and not alone"
    step gpu-tests-alone 90 "${pytest[@]}" -m "gpu and not slow and alone"
    step gpu-tests-slow 120 "${pytest[@]}" -m "gpu and slow"
    ;;
  bench)
    step benchmarks "$budget" "$python" benchmarks/gpu.py --budget "$((budget - SECONDS - 105))" --json "$out/gpu.json" --only \
      ceilings gemm dense small_dense launches gated_mlp model torch_linear adamw
    step trainers 60 env JAX_PLATFORMS=cuda "$python" benchmarks/trainers.py --turns 50 --json "$out/trainers.json"
    ;;
  sanitize)
    for tool in memcheck racecheck initcheck synccheck; do
      step "$tool" 140 env -C tests "$python" cuda/sanitize.py "$tool"
    done
    ;;
  minutes)
    # Each step has its own record. What does not fit is named in steps.txt: STEPS="install losses" is a second call.
    gpu=("$python" benchmarks/gpu.py)
    step selftest 60 env -C tests "$python" -m jaxfp8.selftest --json "$out/selftest.json"
    step gpu-tests 45 "${pytest[@]}" -n 8 -m gpu -k "adam or histories or ragged or graph"
    step kernels 60 "${gpu[@]}" --json "$out/kernels.json" --only kernels --parts \
      ragged_matmul adam_update read_histories encode_moment
    step gpu-tests-tma 45 env JAXFP8_RAGGED_TMA=1 "${pytest[@]}" -n 8 -m gpu -k "ragged or graph"
    step tma 45 env JAXFP8_RAGGED_TMA=1 "${gpu[@]}" --json "$out/ragged_tma.json" --only kernels --parts ragged_matmul
    step model 160 "${gpu[@]}" --json "$out/gpu_model.json" --only model
    step scan 160 "${gpu[@]}" --json "$out/gpu_scan.json" --only scan
    step small 70 "${gpu[@]}" --json "$out/gpu_small.json" --peers-once --turns 5 --only small_dense
    step gemm 50 bash -c 'nvidia-smi --query-gpu=timestamp,power.draw,clocks.sm --format=csv -lms 200 >"$work/logs/watts.csv" &
      "$@"; code=$?; kill $! 2>/dev/null; exit "$code"' - "${gpu[@]}" --json "$out/gpu_gemm.json" --only gemm
    step trace 60 "$python" benchmarks/gpu_trace.py --only llama
    # XLA says which instructions it found in the profile that JAX took.
    step pgle 45 env JAX_PLATFORMS=cuda JAX_ENABLE_PGLE=true TF_CPP_MIN_LOG_LEVEL=0 \
      "$python" benchmarks/trainers.py --turns 5 --only "12 layers"
    step losses 130 "${gpu[@]}" --json "$out/gpu_losses.json" --only losses
    ;;
esac

report() {
  local log name
  for log in "$work"/logs/*.log; do
    name=$(basename "$log" .log)
    case $name in
      kernels | benchmarks) printf '\n--- %s\n' "$name" && tail -c 6500 "$log" ;;
      tma | model | scan | small | gemm | losses) printf '\n--- %s\n' "$name" && tail -c 2000 "$log" ;;
      pgle)
        printf '\n--- %s\n' "$name"
        grep -oE '(Found|Missing) [0-9]+ instructions|\] +custom-call.*' "$log" | sort | uniq -c | head -n 12
        ;;
      gpu-tests*)
        printf '\n--- %s\n' "$name"
        # Of a test that hangs pytest's workers print the stack, and nothing else says which one it was.
        grep -oE '[a-z_]+\.py", line [0-9]+ in test_.*' "$log" | sort -u | head -n 5 | sed 's/^/took 60 s: /'
        tail -n 10 "$log" | cut -c1-160
        ;;
      *) grep -q "^$name  *exit 0 " "$out/steps.txt" \
        || { printf '\n--- %s\n' "$name" && tail -n 12 "$log" | cut -c1-300; } ;;
    esac
  done
  printf '\n'
}
report | tail -c "$((11500 - $(wc -c <"$out/steps.txt")))"
cat "$out/steps.txt"
exit "$status"
