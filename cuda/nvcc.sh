#!/bin/sh
# Runs nvcc and keeps what ptxas says about registers and spills: nvcc.sh LOG NVCC ARGUMENTS...
# Everything else that the compiler says is shown.
log=$1
shift
"$@" -Xptxas -v >"$log" 2>&1
status=$?
grep -v -e '^ptxas info' -e 'bytes stack frame' "$log" >&2
exit $status
