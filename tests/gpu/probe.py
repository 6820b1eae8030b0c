"""Questions to a GPU that no test of the lab answers; each prints its answer in a few lines.

    python tests/gpu/probe.py sharing --ranks 4    do several ranks work over NCCL on one GPU, and how?
    python tests/gpu/probe.py query                does cudaEventQuery keep Python's lock while a kernel is loaded?
    python tests/gpu/probe.py loading              what does CUDA_MODULE_LOADING=EAGER cost?
    python tests/gpu/probe.py kernels --size 1B    the time of a training step, by kind of kernel; also --compiled

Without a GPU, `sharing` rehearses over gloo.
"""

import importlib
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
import tyro

from simplellm import command_line

WAYS = {  # of letting ranks share a GPU: variables of the environment, for each rank
    "plain": {},  # expected: refused
    "enabled": {"NCCL_MULTI_RANK_GPU_ENABLE": "1"},  # from NCCL 2.30 on
    "names of hosts": {"NCCL_HOSTID": "rank{}"},  # any NCCL, over sockets; what the lab does
}
KINDS = {  # of kernels, by parts of their names
    "attention": ("flash", "fmha", "cudnn"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas"),
    "optimizer": ("multi_tensor", "adam"),
    "fused passes": ("triton",),
    "norms": ("norm",),
    "loss": ("softmax", "scatter", "gather"),
}


@dataclass
class Settings:
    """What to ask."""

    question: Annotated[Literal["sharing", "query", "loading", "kernels"], tyro.conf.Positional]
    """see above"""
    ranks: int = 2
    """of sharing"""
    size: str = "1B"
    """of kernels: a model of bench/gpu.py"""
    compiled: bool = False
    """of kernels: a step with --compile"""


def sharing(ranks: int) -> None:
    for number, (way, variables) in enumerate(WAYS.items()):
        own = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [sys.executable, __file__, "as_rank", str(rank), str(ranks), str(29811 + number)],
                env={**os.environ, **own, **{name: value.format(rank) for name, value in variables.items()}},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(ranks)
        ]
        told = []
        for process in processes:
            try:
                told += process.communicate(timeout=40)[0].splitlines()
            except subprocess.TimeoutExpired:
                process.kill()
                told.append("timed out")
        signs = [sign for sign in ("WORKS", "NCCL WARN", "Error", "timed out") if any(sign in line for line in told)]
        answer = next((line for line in told if signs and signs[0] in line), "it printed nothing")
        print(f"{way}: status {[process.returncode for process in processes]}: {answer[:200]}", flush=True)


def as_rank(rank: int, size: int, port: int) -> None:
    """Exchange tensors as the lab does: sums, shards in place, and messages both ways over a group for each way."""
    has_gpu = torch.cuda.is_available()
    device = torch.device("cuda", 0) if has_gpu else torch.device("cpu")
    address = f"tcp://127.0.0.1:{port}"
    library = "nccl" if has_gpu else "gloo"
    dist.init_process_group(library, init_method=address, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8):
        summed = torch.full((1000,), rank + 1, dtype=dtype, device=device)
        dist.all_reduce(summed)
        assert int(summed[7]) == size * (size + 1) // 2, dtype
    whole = torch.arange(size * 4.0, device=device).view(size, 4) + rank
    total = whole.clone()
    dist.all_reduce(total)
    if has_gpu:
        dist.reduce_scatter_tensor(whole[rank], whole)
        assert torch.equal(whole[rank], total[rank]), "a reduce-scatter in place"
        dist.all_gather_into_tensor(whole.view(-1), whole[rank].clone())
        assert torch.equal(whole, total)
    groups, peer = [dist.new_group(), dist.new_group()], rank ^ 1
    if peer < size:
        sent = torch.full((4_000_000,), float(rank), device=device)
        received = torch.empty_like(sent)
        works = [
            dist.isend(sent, peer, group) if rank % 2 == way else dist.irecv(received, peer, group)
            for way, group in enumerate(groups)
        ]
        for work in works:
            assert work is not None
            work.wait()
        assert float(received[5]) == peer
    small, seconds = torch.ones(1000, device=device), []
    for _ in range(20):
        started = time.perf_counter()
        dist.all_reduce(small)
        small.sum().item()
        seconds.append(time.perf_counter() - started)
    if rank == 0:
        version = f"NCCL {torch.cuda.nccl.version()}" if has_gpu else "gloo, a rehearsal"
        print(
            f"WORKS: {version}, {size} ranks; an all-reduce of 4 kB takes {1e3 * sorted(seconds)[10]:.2f} ms",
            flush=True,
        )
    os._exit(0)  # not in the destructors of groups


def query() -> None:
    x = torch.ones(9, device="cuda")
    torch.cuda._sleep(1)
    torch.cuda.synchronize()
    side, event = torch.cuda.Stream(), torch.cuda.Event(enable_timing=True)
    event.record()
    torch.cuda.synchronize()
    waits: dict[str, Callable[[], object]] = {
        "a kernel that is loaded": lambda: F.mish(x),
        "a stream's end": side.synchronize,
    }
    for name, wait in waits.items():
        with torch.cuda.stream(side):
            torch.cuda._sleep(8 * 10**9)  # some seconds
        taken, ticks = list[float](), list[float]()

        def ask(taken: list[float] = taken) -> None:
            time.sleep(0.5)
            started = time.perf_counter()
            event.query()
            taken.append(time.perf_counter() - started)

        def tick(ticks: list[float] = ticks) -> None:
            for _ in range(40):
                ticks.append(time.perf_counter())
                time.sleep(0.05)

        threads = [threading.Thread(target=ask), threading.Thread(target=tick)]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        wait()
        took = time.perf_counter() - started
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        pause = max(later - earlier for earlier, later in pairwise(ticks))
        print(f"the main thread waits {took:.2f} s for {name}: query() in another thread takes {taken[0]:.4f} s")
        print(f"  and a third thread of Python stands still for {pause:.2f} s")


def loading() -> None:
    code = """
import resource, time
started = time.time()
import torch
imported = time.time()
x = torch.ones(9, device="cuda")
x @ x
torch.cuda.synchronize()
free, total = torch.cuda.mem_get_info()
print(f"import {imported - started:.1f} s, CUDA {time.time() - imported:.1f} s")
print(f"{(total - free) / 1e6:,.0f} MB of the GPU")
print(f"{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:,.0f} MB of main memory")
"""
    for how in ("LAZY", "EAGER"):
        environment = {**os.environ, "CUDA_MODULE_LOADING": how}
        ended = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        print(how, " ".join(ended.stdout.split()) or ended.stderr[-300:])


def kernels(size: str, compiled: bool) -> None:
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
    gpu: Any = importlib.import_module("gpu")  # bench/gpu.py

    device, chosen = torch.device("cuda"), gpu.SIZES[size]
    step, _ = gpu.ours(chosen.build(device), compiled)
    [ids] = chosen.batches(device, 1, 0)
    for _ in range(3):
        step(ids)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step(ids)
        torch.cuda.synchronize()
    milliseconds: Counter[str] = Counter()
    for row in profile.key_averages():
        name = row.key.lower()
        kind = next((kind for kind, parts in KINDS.items() if any(part in name for part in parts)), "other passes")
        milliseconds[kind] += row.self_device_time_total / 1e3
    print(
        f"{size}{', compiled' * compiled}, ms of a step: "
        + ", ".join(f"{kind} {ms:.1f}" for kind, ms in milliseconds.most_common())
    )


def main(settings: Settings) -> None:
    questions: dict[str, Callable[[], None]] = {
        "sharing": lambda: sharing(settings.ranks),
        "query": query,
        "loading": loading,
        "kernels": lambda: kernels(settings.size, settings.compiled),
    }
    questions[settings.question]()


if __name__ == "__main__":
    if sys.argv[1:2] == ["as_rank"]:
        as_rank(*map(int, sys.argv[2:]))
    command_line.run(main, Settings, __doc__)
