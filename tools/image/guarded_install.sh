#!/bin/sh
# `pip install` under the image's constraints, preceded by a dry run whose plan the guard must accept.
#
#     guarded_install.sh ARGUMENTS-OF-PIP-INSTALL...
#
# PYTHON chooses the interpreter. PIP_CONSTRAINT must name the generated constraints file: an install without it is
# exactly what this script exists to prevent. GUARD_OPTIONS are handed to the guard (`--built-here vllm`).
set -eu

: "${PIP_CONSTRAINT:?name the generated constraints file}"
[ -s "$PIP_CONSTRAINT" ] || { echo "guarded install: $PIP_CONSTRAINT is missing or empty" >&2; exit 1; }
python=${PYTHON:-python3}
here=$(cd "$(dirname "$0")" && pwd)
report=$(mktemp)
trap 'rm -f "$report"' EXIT

"$python" -m pip install --quiet --dry-run --report "$report" "$@"
# shellcheck disable=SC2086  # several options in one variable are meant to be split
"$python" "$here/dry_run_guard.py" ${GUARD_OPTIONS:-} "$report"
"$python" -m pip install --no-cache-dir "$@"
