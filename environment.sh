# Sourced by launch.sh and test.sh: sets $python to an interpreter that has what the lab needs.
#
# An environment that is active and has it is used as it is; otherwise .venv/ is made from requirements.txt, once.
# On Linux, LAB_TORCH=cpu or LAB_TORCH=cuda chooses torch's build for .venv/; otherwise it depends on the machine, see
# install_torch. LAB_TORCH_INDEX is the address of another copy of PyTorch's index of CPU builds.

# Ctrl-C ends the script even if the program that it runs, such as pyenv's python3, catches the signal and goes on.
trap 'exit 130' INT

# Messages to a stream that the caller has closed are lost, and end nothing.
{ : >&2; } 2>/dev/null || exec 2>/dev/null
{ : >&1; } 2>/dev/null || exec >/dev/null
{ : <&0; } 2>/dev/null || exec </dev/null

# torch looks up the name of each address that connects to a store. glibc would wait 5 s for a name server that is silent.
export RES_OPTIONS=${RES_OPTIONS:-timeout:1 attempts:3}

unset CDPATH  # or cd may go elsewhere, and print where
lab=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if ! pwd -P >/dev/null 2>&1; then  # or torch's libraries would not be found, with an error of theirs
    echo "# the current folder has been deleted; change to a folder that exists" >&2
    exit 2
fi

# The current folder is no place for Python's modules: a random.py there would be run in place of Python's own, and the
# folder may be a stranger's. With -c, -m and - it is the first entry of sys.path; the first argument replaces it.
own_path='import sys; sys.path[0] = sys.argv.pop(1)'
run_script="$own_path; exec(sys.stdin.read())"
run_module="$own_path; import runpy; runpy.run_module(sys.argv.pop(1), run_name='__main__', alter_sys=True)"

# has_all PYTHON FILE...: true if PYTHON is 3.10 or newer and has every distribution that the FILEs name, in a version that
# pyproject.toml admits (its ranges also cover what GPU machines carry).
has_all() {
    "$1" -c "$run_script" "$lab/src" "${@:2}" <<'PYTHON' 2>/dev/null
import re, sys
from importlib.metadata import version
from pathlib import Path

def require(holds):  # an assert would not hold under PYTHONOPTIMIZE
    if not holds:
        sys.exit(1)

require(sys.version_info >= (3, 10))
files = [Path(name) for name in sys.argv[1:]]
least = dict(re.findall(r'^ +"([\w-]+)>=([\d.]+)"', (files[0].parent / "pyproject.toml").read_text(), re.M))
numbers = lambda text: [int(part) for part in re.findall(r"\d+", text.partition("+")[0])]
for file in files:
    for name in re.findall(r"^([A-Za-z][\w-]*)==", file.read_text(), re.M):
        require(numbers(version(name)) >= numbers(least.get(name, "0")))
PYTHON
}

# prepare FILE...: sets $python to an interpreter with what the requirements files list, the last one including the others.
prepare() {
    local files=("${@/#/$lab/}") base file path=:${PYTHONPATH:-}:
    case $lab in
        *:*)
            echo "# $lab: Python's path cannot have a folder with a colon in its name; move or rename the lab's folder" >&2
            return 2
            ;;
    esac
    while [[ $path == *::* ]]; do path=${path//::/:}; done  # an empty entry is the current folder
    path=${path%:}
    export PYTHONPATH=$lab/src$path
    case ${LAB_TORCH:-} in
        "" | cpu | cuda) ;;
        *)
            echo "# LAB_TORCH=$LAB_TORCH: give cpu or cuda, or leave it out for the build that fits this machine" >&2
            return 2
            ;;
    esac
    python=$(command -v python3 || command -v python || true)
    if [ -n "$python" ] && has_all "$python" "${files[@]}"; then return; fi
    if [ -n "$python" ] && ! "$python" -c '' 2>/dev/null && "$python" -E -c '' 2>/dev/null; then
        echo "# Python does not start with the variables PYTHON... of this shell" \
            "($("$python" -c '' 2>&1 | grep Error: | tail -n 1)); correct or unset them" >&2
        return 2
    fi

    python=$lab/.venv/bin/python
    if is_installed "${files[@]}"; then return; fi
    if ! [ -w "$lab" ]; then
        echo "# $lab: you may not write there, so .venv/ cannot be made; activate an environment that has the packages of" \
            "requirements.txt, or copy the lab into a folder of yours" >&2
        return 2
    fi
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
    if ! { run pip --version >/dev/null 2>&1 || python=$base run venv --clear "$lab/.venv"; } >&2; then
        echo "# $base -m venv failed: on Debian and Ubuntu, install python3-venv; then run the command again" >&2
        return 1
    fi
    install_torch || return
    if ! pip_install -r "${files[${#files[@]} - 1]}" -e "$lab"; then
        echo "# pip could not install ${*: -1}, for the reason above; run the command again to continue" >&2
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

# run MODULE ARGUMENT...: python -m without the current folder.
run() { "$python" -c "$run_module" "$lab/src" "$@"; }

pip_install() {
    local quiet=-qq  # a terminal shows pip's progress
    if [ -t 2 ]; then quiet=; fi
    run pip install $quiet --disable-pip-version-check "$@" >&2
}

# install_torch: installs torch's CPU build into .venv where that is the one to have; nothing else comes from PyTorch's index.
# Otherwise pip finds torch where it finds everything: at PyPI, whose torch is built for CUDA on Linux and for the CPU
# elsewhere, or at what the user has configured. The sizes are those of torch 2.13 for x86-64.
install_torch() {
    local torch index=${LAB_TORCH_INDEX:-https://download.pytorch.org/whl/cpu} build=${LAB_TORCH:-} why="as LAB_TORCH says"
    torch=$(grep '^torch==' "$lab/requirements.txt")
    if [ "$(uname)" != Linux ] || is_there "$torch"; then return 0; fi
    if [ "$build" != cpu ] && has_indexes; then return 0; fi
    if [ -z "$build" ]; then
        build=cuda
        if has_driver; then
            why="there is an NVIDIA driver; LAB_TORCH=cpu takes the CPU build, about 200 MB"
        elif answers "$index/torch/"; then
            build=cpu
            why="there is no NVIDIA driver; LAB_TORCH=cuda takes PyPI's CUDA build"
        else
            why="there is no NVIDIA driver, but $index, which has CPU builds, does not answer"
        fi
    fi
    if [ "$build" = cuda ]; then
        echo "# torch: PyPI's CUDA build, about 3 GB with NVIDIA's libraries ($why)" >&2
        return 0
    fi
    echo "# torch: the CPU build, about 200 MB, from $index ($why)" >&2
    if ! pip_install --index-url "$index" --no-deps "$torch"; then
        echo "# pip could not install $torch from $index, for the reason above; LAB_TORCH=cuda takes PyPI's" >&2
        return 1
    fi
}

# is_there NAME==VERSION: true if .venv has that version of a package, in whichever build (2.13.0+cpu is one of 2.13.0).
is_there() {
    "$python" -c "$own_path"'; from importlib.metadata import version
sys.exit(version(sys.argv[1]).partition("+")[0] != sys.argv[2])' "$lab/src" "${1%%==*}" "${1#*==}" 2>/dev/null
}

# has_indexes: true if the user's pip is configured to look elsewhere than at PyPI, such as at a mirror or in a folder.
has_indexes() {  # not grep -q: it ends at the first match, and pip may still be writing
    run pip config list 2>/dev/null | grep -E "(index-url|find-links|no-index)='." >/dev/null
}

has_driver() {  # in WSL the driver is that of Windows, which puts its library there
    command -v nvidia-smi >/dev/null || [ -e /proc/driver/nvidia ] || [ -e /dev/nvidiactl ] ||
        [ -e /usr/lib/wsl/lib/libcuda.so.1 ]
}

# answers URL: true if the page is there within two seconds in all; urlopen's timeout holds for each wait, and not for DNS.
answers() {
    "$python" -c "$run_script" "$lab/src" "$1" <<'PYTHON' 2>/dev/null
import os, sys, threading, urllib.request

deadline = threading.Timer(2, os._exit, [1])
deadline.daemon = True
deadline.start()
urllib.request.urlopen(urllib.request.Request(sys.argv[1], headers={"User-Agent": "distributed-llm-lab"}))
PYTHON
}
