#!/usr/bin/env bash
# ./test.sh [pytest's flags]: all tests but those of GPUs, in the lab's environment, which is prepared on first use.
# Without flags two tests run at a time; then three of those that wait, without others that compute; then those that have
# to be alone. With flags they run one after another.
# ./test.sh --quick [pytest's flags]: the tests marked quick, in about a minute: a parity test of every kind of layout, and
# what needs one process.
# ./test.sh --gpu [pytest's flags]: the tests of GPUs alone, within ten minutes (docs/gpu.md).
set -euo pipefail
self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do
    target=$(readlink "$self")
    case $target in /*) self=$target ;; *) self=$(dirname "$self")/$target ;; esac
done
source "$(dirname "$self")/environment.sh"
cd "$lab"
unset PYTHONDONTWRITEBYTECODE  # or each of some hundred processes would compile the lab anew
if [ "${1:-}" = --gpu ]; then
    prepare requirements.txt
    "$python" -c "import pytest" 2>/dev/null || prepare requirements.txt requirements-dev.txt
    exec "$python" -m pytest -vv -rs "$@"  # each test's name, and why any was skipped
fi
prepare requirements.txt requirements-dev.txt
if [ "${1:-}" = --quick ]; then exec "$python" -m pytest -m "quick and not waits and not alone" --numprocesses 2 "${@:2}"; fi
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi
having() { grep -rl --include="test_*.py" "mark\.$1" tests; }  # pytest takes seconds to collect the others
status=0
"$python" -m pytest -m "not waits and not alone" --numprocesses 2 --dist loadfile || status=$?
"$python" -m pytest -m waits --numprocesses 3 --dist worksteal $(having waits) || status=$?
"$python" -m pytest -m alone $(having alone) || status=$?
exit "$status"
