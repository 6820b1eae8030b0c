# Sourced by launch.sh and test.sh: sets $python to an interpreter that has what the lab needs.
#
# An environment that is active and has it is used as it is; otherwise .venv/ is made from requirements.txt, once.

lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

# has_all PYTHON FILE...: true if PYTHON is 3.10 or newer and has every distribution that the FILEs name, in a version that
# pyproject.toml admits (its ranges also cover what GPU machines carry).
has_all() {
    "$1" - "${@:2}" <<'PYTHON' 2>/dev/null
import re, sys
from importlib.metadata import version
from pathlib import Path

assert sys.version_info >= (3, 10)
files = [Path(name) for name in sys.argv[1:]]
least = dict(re.findall(r'^ +"([\w-]+)>=([\d.]+)"', (files[0].parent / "pyproject.toml").read_text(), re.M))
numbers = lambda text: [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]
for file in files:
    for name in re.findall(r"^([A-Za-z][\w-]*)==", file.read_text(), re.M):
        assert numbers(version(name)) >= numbers(least.get(name, "0")), name
PYTHON
}

# prepare FILE...: sets $python to an interpreter with what the requirements files list, the last one including the others.
prepare() {
    local files=("${@/#/$lab/}") base file
    export PYTHONPATH=$lab/src${PYTHONPATH:+:$PYTHONPATH}
    python=$(command -v python3 || command -v python || true)
    if [ -n "$python" ] && has_all "$python" "${files[@]}"; then return; fi

    python=$lab/.venv/bin/python
    if is_installed "${files[@]}"; then return; fi
    if command -v flock >/dev/null; then  # two first launches at once: the second waits for the first
        exec 9>"$lab/.venv.lock"
        flock 9
        if is_installed "${files[@]}"; then exec 9>&-; return; fi
    fi

    for base in python3 python3.13 python3.12 python3.11 python3.10 ""; do
        [ -n "$base" ] && "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && break
    done
    if [ -z "$base" ]; then
        echo "# the lab needs Python 3.10 or newer on the PATH, as python3" >&2
        return 1
    fi
    echo "# preparing $lab/.venv from ${*: -1}: some minutes, once" >&2
    if ! { "$python" -m pip --version >/dev/null 2>&1 || "$base" -m venv --clear "$lab/.venv"; } >&2; then
        echo "# $base -m venv failed: on Debian and Ubuntu, install python3-venv; then run the command again" >&2
        return 1
    fi
    local quiet=-qq  # a terminal shows pip's progress
    if [ -t 2 ]; then quiet=; fi
    if ! "$python" -m pip install $quiet --disable-pip-version-check -r "${files[${#files[@]} - 1]}" -e "$lab" >&2; then
        echo "# pip could not install ${*: -1}, for the reason above; run the command again to go on" >&2
        return 1
    fi
    for file in "${files[@]}"; do cp "$file" "$lab/.venv/"; done
    exec 9>&-
}

# is_installed FILE...: true if .venv has been made from these requirements files as they are now.
is_installed() {
    local file
    for file in "$@"; do cmp -s "$file" "$lab/.venv/${file##*/}" || return 1; done
}
