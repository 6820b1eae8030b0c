#!/usr/bin/env bash
# ./launch.sh <topology> [flags]: all ranks of a topology, on this machine or, started on each, on several.
# Without arguments: the list of topologies, and the flags for several machines.
set -euo pipefail
self=${BASH_SOURCE[0]}
while [ -L "$self" ]; do  # not readlink -f, which older macOS lacks
    target=$(readlink "$self")
    case $target in /*) self=$target ;; *) self=$(dirname "$self")/$target ;; esac
done
source "$(dirname "$self")/environment.sh"
prepare requirements.txt
if [ "${1:-}" = playground ] && [[ $python == "$lab"/.venv/* ]]; then
    has_all "$python" "$lab/requirements-playground.txt" || prepare requirements.txt requirements-playground.txt
fi
export TORCH_CPP_LOG_LEVEL=${TORCH_CPP_LOG_LEVEL:-ERROR}  # it warns of every address without a name
# Ctrl-C ends this process at once, without a traceback, until distlab.launch has started ranks.
quiet="import _signal as s; s.getsignal(2) is s.default_int_handler and s.signal(2, s.SIG_DFL)"
exec "$python" -c "$quiet; $run_module" "$lab/src" distlab.launch "$@"
