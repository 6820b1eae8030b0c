#!/usr/bin/env bash
# ./test.sh [pytest's flags]: all tests, in the lab's environment, which is prepared on first use.
# Without flags two tests run at a time, and then those that have to be alone; with flags one after another.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare requirements.txt requirements-dev.txt
cd "$lab"
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi
status=0
"$python" -m pytest -m "not alone" --numprocesses 2 --dist loadfile || status=$?
"$python" -m pytest -m alone || status=$?
exit "$status"
