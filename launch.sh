#!/usr/bin/env bash
# ./launch.sh <topology> [flags]: all ranks of a topology on this machine. Without arguments: the list of topologies.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare requirements.txt
exec "$python" -m distlab.launch "$@"
