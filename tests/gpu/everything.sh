#!/usr/bin/env bash
# tests/gpu/everything.sh [FOLDER]: all that docs/gpu.md asks of a machine with one GPU, in ten minutes at most. What each
# part prints is kept in FOLDER (default: runs/gpu). The interpreter is python3, or what PYTHON says.
set -u
lab=$(realpath "$(dirname "${BASH_SOURCE[0]}")/../..")
out=$(realpath -m "${1:-$lab/runs/gpu}")
mkdir -p "$out"
cd "$lab"
python=${PYTHON:-python3}
export PYTHONPATH=$PWD/src PYTHONUNBUFFERED=1

# part NAME SECONDS LINES COMMAND...: runs a command for so long at most, and shows the last lines that it prints. SIGINT
# has pytest tell what has failed so far.
part() {
    local name=$1 limit=$2 lines=$3 from=$SECONDS
    timeout --signal INT --kill-after 5 "$limit" "${@:4}" >"$out/$name.log" 2>&1
    echo "## $name: status $?, $((SECONDS - from)) s"
    tail -n "$lines" "$out/$name.log" | cut -c1-200
}

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
part tests 360 40 "$python" -m pytest --gpu --minutes 5.5 ${at_a_time:-} -vv -rsf --durations 0 --show-capture no
part one-process 30 8 $launch primer $training --batch-size 6
part timeline 30 8 $launch pp-dapple $training --world-size 3 --batch-size 6 --micro-batches 6 --trace --out "$out/timeline"
part bench 90 40 "$python" bench/gpu.py --turns 4
part calibrate 50 8 "$python" -m distlab.calibrate "$out/machine.json" --device cuda --world-size 4 --seconds 6
