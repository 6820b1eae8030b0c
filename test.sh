#!/usr/bin/env bash
# ./test.sh [pytest's flags]: all tests but those of GPUs, in the lab's environment, which is prepared on first use.
# Without flags two tests run at a time, and then those that have to be alone; with flags one after another.
# ./test.sh --quick [pytest's flags]: the tests marked quick, in about a minute: a parity test of every kind of layout, and
# what needs one process.
# ./test.sh --gpu [pytest's flags]: the tests of GPUs alone, within ten minutes (docs/gpu.md).
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
unset PYTHONDONTWRITEBYTECODE  # or each of some hundred processes would compile the lab anew
if [ "${1:-}" = --gpu ]; then
    prepare requirements.txt
    "$python" -c "import pytest" 2>/dev/null || prepare requirements.txt requirements-dev.txt
    cd "$lab"
    exec "$python" -m pytest -vv -rs "$@"  # each test's name, and why any was skipped
fi
prepare requirements.txt requirements-dev.txt
cd "$lab"
if [ "${1:-}" = --quick ]; then exec "$python" -m pytest -m "quick and not alone" --numprocesses 2 "${@:2}"; fi
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi
status=0
"$python" -m pytest -m "not alone" --numprocesses 2 --dist loadfile || status=$?
"$python" -m pytest -m alone || status=$?
exit "$status"
