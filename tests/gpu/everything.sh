#!/usr/bin/env bash
# tests/gpu/everything.sh [FOLDER]: questions to a machine with a GPU, most important first, in about ten minutes: do ranks
# share the GPU over NCCL, do they train like one process, how fast is a step? What each part prints is kept in FOLDER
# (default: runs/gpu). PYTHON is an interpreter that has what they need (default: as of test.sh). The exit status is that
# of the last part that failed.
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
probe="$python tests/gpu/probe.py"

part machine 20 30 nvidia-smi
part compute-mode 20 3 bash -c "nvidia-smi -q -d COMPUTE; env | grep TF32; true"
part versions 30 1 "$python" -c "import torch; print(torch.__version__, torch.version.cuda, torch.cuda.nccl.version())"
part two-on-one 100 3 $probe sharing
part four-on-one 100 3 $probe sharing --ranks 4
part nccl 240 30 "$python" -m pytest --gpu --minutes 3 $at_a_time -vv -rsf --durations 0 --show-capture no tests/gpu/test_nccl.py
part query 60 4 $probe query
part loading 60 2 $probe loading
part runs 80 5 "$python" bench/gpu.py --tables runs --turns 3 --sizes 1B
part compiled 90 5 "$python" bench/gpu.py --tables compiled --turns 4 --sizes 100M
part kernels 60 1 $probe kernels --compiled
# Of the others, those that begin in time.
others="tests/gpu/test_checkpoints.py tests/gpu/test_reports.py tests/gpu/test_failures.py tests/gpu/test_model.py"
part tests 110 40 "$python" -m pytest --gpu --minutes 1.5 $at_a_time -vv -rsf --durations 0 --show-capture no $others
part parity 70 40 "$python" -m pytest --gpu --minutes 0.8 $at_a_time -vv -rsf --durations 0 --show-capture no tests/gpu/test_parity.py
part one-process 30 8 $launch primer $training --batch-size 6
part timeline 30 8 $launch pp-dapple $training --world-size 3 --batch-size 6 --micro-batches 6 --trace --out "$out/timeline"
part calibrate 50 8 "$python" -m distlab.calibrate "$out/machine.json" --device cuda --world-size 4 --seconds 6
exit "$status"
