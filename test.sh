#!/usr/bin/env bash
# ./test.sh [pytest's flags]: all tests, in the lab's environment, which is prepared on first use.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"
prepare requirements.txt requirements-dev.txt
cd "$lab"
exec "$python" -m pytest "$@"
