#!/usr/bin/env bash
# Everything that needs a GPU, in one call: build, tests, compute-sanitizer, benchmarks; for a machine without network.
#
#   OUT=results tools/gpu_session.sh [SECONDS]     (default 570)
#
# Steps run in order of importance, each under a limit of its own and the budget that is left; one that fails stops
# nothing but what needs its build. Each writes $OUT/NAME.log; $OUT/steps.txt has exit codes and seconds, and is shown
# last. 124 is the exit code of a step that ran into its limit. In the environment:
#
#   PYTHON         the interpreter with jax; default python3
#   STEPS          only these steps, with the jaxfp8 that is installed unless `build` is one of them
#   JAXFP8_COMMIT  which commit this is, where there is no .git
set -u
cd "$(dirname "$0")/.." || exit 1
budget=${1:-570}
out=${OUT:-gpu-session}
python=$(command -v "${PYTHON:-python3}") || { echo "gpu_session: ${PYTHON:-python3} not found" >&2; exit 1; }
mkdir -p "$out"
out=$(cd "$out" && pwd)
: >"$out/steps.txt"
status=0

step() {  # NAME LIMIT COMMAND...
  local name=$1 limit=$2 start=$SECONDS code left
  shift 2
  case " ${STEPS:-$name} " in *" $name "*) ;; *) return 0 ;; esac
  left=$((budget - SECONDS))
  if [ "$left" -lt 5 ]; then
    printf '%-12s not started: the budget of %s s is spent\n' "$name" "$budget" >>"$out/steps.txt"
    status=1
    return 1
  fi
  [ "$left" -lt "$limit" ] && limit=$left
  printf '=== %s (at most %s s)\n' "$name" "$limit"
  # -k: what does not end by itself, a hung kernel for example, is killed.
  timeout -k 10 "$limit" "$@" >"$out/$name.log" 2>&1
  code=$?
  printf '%-12s exit %-3s %4s s\n' "$name" "$code" "$((SECONDS - start))" >>"$out/steps.txt"
  if [ "$code" -ne 0 ]; then
    status=1
    tail -n 15 "$out/$name.log"
  fi
  return "$code"
}

step machine 30 bash -c "nvidia-smi; nvcc --version; \"$python\" -m pip list 2>/dev/null | grep -i -E '^(jax|flax|torch|numpy|optax|nvidia-cu|pytest)'; true"
step build 180 "$python" -m pip install --no-build-isolation --no-deps --force-reinstall -C cmake.define.JAXFP8_CUDA=ON . \
  && built=yes
if [ "${built:-}" = yes ] || [ -n "${STEPS:-}" ]; then
  # Tests run in their folder: at the root Python would import the sources, which have no libraries.
  pytest=(env -C tests "$python" -m pytest -q -p no:cacheprovider --continue-on-collection-errors)
  sanitize=(env -C tests "$python" cuda/sanitize.py)
  step gpu-tests 200 "${pytest[@]}" --durations=10 -m "gpu and not slow"
  step bench-first 200 "$python" benchmarks/gpu.py --budget 170 --only ceilings gemm quantize dense --json "$out/gpu_first.json"
  step memcheck 90 "${sanitize[@]}" memcheck
  step racecheck 60 "${sanitize[@]}" racecheck
  step bench-rest 400 "$python" benchmarks/gpu.py --budget "$((budget - SECONDS - 60))" \
    --only ceilings small_dense launches gated_mlp transformer_layer torch_linear --json "$out/gpu_rest.json"
  step slow-tests 120 "${pytest[@]}" -m "gpu and slow"
  step initcheck 60 "${sanitize[@]}" initcheck synccheck
fi

# The tables and the last lines come last, because only the end of the output is sent back.
for log in gpu-tests bench-first bench-rest; do
  [ -f "$out/$log.log" ] && { printf '\n--- %s\n' "$log"; tail -n 25 "$out/$log.log"; }
done
printf '\n'
cat "$out/steps.txt"
exit "$status"
