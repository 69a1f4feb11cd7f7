#!/usr/bin/env bash
# One number for the sources under some paths, equal in every checkout of them: tools/digest.sh PATH...
set -euo pipefail
cd "$(dirname "$0")/.."
find "$@" \( -name build -o -name _ptxas -o -name __pycache__ \) -prune -o -type f ! -name '*.md' ! -name '*.so' ! -name _modules.txt -print \
  | LC_ALL=C sort | xargs cat | cksum | tr -d ' '
