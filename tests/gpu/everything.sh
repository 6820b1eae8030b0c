#!/usr/bin/env bash
# tests/gpu/everything.sh [FOLDER]: tests, benchmark, calibration and some commands of docs/gpu.md on a machine with a GPU,
# in about ten minutes. What each part prints is kept in FOLDER (default: runs/gpu). PYTHON is an interpreter that has what
# they need (default: as of test.sh). The exit status is that of the last part that failed.
set -u
source "$(dirname "${BASH_SOURCE[0]}")/../../environment.sh"
if [ -n "${PYTHON:-}" ]; then python=$PYTHON; else prepare requirements.txt requirements-dev.txt || exit; fi
out=$(realpath -m "${1:-$lab/runs/gpu}")
mkdir -p "$out"
cd "$lab"
export PYTHONPATH=$lab/src PYTHONUNBUFFERED=1
status=0

# part NAME SECONDS LINES COMMAND...: runs a command for so long at most, and shows the last lines that it prints.
part() {
    local name=$1 limit=$2 lines=$3 from=$SECONDS own=0
    timeout --signal INT --kill-after 20 "$limit" "${@:4}" >"$out/$name.log" 2>&1 || own=$?
    echo "## $name: status $own, $((SECONDS - from)) s"
    tail -n "$lines" "$out/$name.log" | cut -c1-200
    [ "$own" -eq 0 ] || status=$own
}

at_a_time=
"$python" -c "import xdist" 2>/dev/null && at_a_time="--numprocesses 2"
training="--device cuda --data sample --steps 6 --optimizer sgd --lr 0.1 --seq-len 64"
launch="$python -m distlab.launch"
loading="import time, torch
x = torch.ones(9, device='cuda'); torch.cuda._sleep(1); torch.cuda.synchronize()
with torch.cuda.stream(torch.cuda.Stream()): torch.cuda._sleep(10**10)
start = time.time(); torch.nn.functional.silu(x, inplace=True); print(f'loading a kernel took {time.time() - start:.4f} s')"

part machine 20 30 nvidia-smi
part compute-mode 20 3 bash -c "nvidia-smi -q -d COMPUTE; env | grep TF32; true"
part lazy-loading 20 1 "$python" -c "$loading"
part eager-loading 20 1 env CUDA_MODULE_LOADING=EAGER "$python" -c "$loading"
# No test begins after 4 minutes, so that most of those under way can end.
part tests 375 40 "$python" -m pytest --gpu --minutes 4 $at_a_time -vv -rsf --durations 0 --show-capture no
part one-process 30 8 $launch primer $training --batch-size 6
part timeline 30 8 $launch pp-dapple $training --world-size 3 --batch-size 6 --micro-batches 6 --trace --out "$out/timeline"
part bench 90 40 "$python" bench/gpu.py --turns 4
part calibrate 50 8 "$python" -m distlab.calibrate "$out/machine.json" --device cuda --world-size 4 --seconds 6
exit "$status"
