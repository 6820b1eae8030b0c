#!/usr/bin/env bash
# ./test.sh [pytest's flags]: all tests but those of GPUs, in the lab's environment, which is prepared on first use.
# Without flags three tests run at a time, and then, one after another, those that have to be alone. With flags all run
# one after another.
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
if [ "${1:-}" = --quick ]; then exec "$python" -m pytest -m "quick and not alone" --numprocesses 2 "${@:2}"; fi
if [ $# -gt 0 ]; then exec "$python" -m pytest "$@"; fi
exec "$python" -m pytest --numprocesses 3 --dist loadgroup
