"""The benchmark of a GPU, as far as a CPU can tell: what it counts, what it prints, what it refuses."""

import json
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import ModuleType

import pytest
import torch
from support.chapters import load
from support.processes import LAB, free_port
from support.terminals import fork_python
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from simplellm.errors import InputError
from simplellm.losses import causalLLMLoss


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    sys.path.append(str(LAB / "bench"))
    return load("bench/gpu.py")


def test_the_formula_counts_what_torch_counts(bench: ModuleType) -> None:
    size = bench.SIZES["tiny"]
    net = size.build(torch.device("cpu"), torch.float32)
    ids = size.batches(torch.device("cpu"), 1, seed=0)[0]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        causalLLMLoss(net(ids), ids, bench.VOCAB_SIZE).backward()
    scores_not_needed = 6 * size.n_layers * size.seq_len * size.dmodel  # torch counts those above the diagonal, too
    assert counter.get_total_flops() == size.tokens * (size.flops_per_token + scores_not_needed)


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989),
        ("NVIDIA H100 PCIe", 756),
        ("NVIDIA A100-SXM4-80GB", 312),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA L40S", 362),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
    ],
)
def test_peak_of_a_device(bench: ModuleType, device: str, peak: float | None) -> None:
    assert bench.peak_tflops(device) == peak


def test_a_line_of_the_table(bench: ModuleType) -> None:
    size = bench.SIZES["1B"]
    seconds = {"ours": [0.5, 0.4, 0.5], "another": [1.0, 1.2, 1.0]}
    first, second = bench.speed_rows("1B", size, seconds, peak=1000.0)
    flops = 6 * 2048 * (6 * (20 * (4 * 2048**2 + 3 * 2048 * 5504) + 4096 * 2048) + 6 * 20 * 2048 * 2048)
    assert first == f"| 1B | ours | 500.0 | 24,576 | {flops / 0.5 / 1e15:.1%} |  |".replace("%", " %")
    assert second.endswith("| 12,288 | 8.1 % | 2.00 (2.00 to 2.50) |")
    assert bench.speed_rows("1B", size, seconds, peak=None)[0] == "| 1B | ours | 500.0 | 24,576 |  |  |"
    assert bench.memory_row("1B", [1 * 10**9, 10**9, 2 * 10**9, 10**9], 6 * 10**9) == (
        "| 1B | 1.00 | 1.00 | 2.00 | 1.00 | 5.00 | 6.00 | 1.20 |"
    )


def test_the_rehearsal_on_a_cpu_prints_the_tables() -> None:
    flags = ["--device", "cpu", "--turns", "2", "--ranks", "2", "--port", str(free_port())]
    flags += ["--tables", "speed", "memory", "sharing"]  # the others compile
    ended = fork_python("bench/gpu.py", *flags).finish(180)
    assert ended.status == 0, ended.err
    assert ended.out.startswith("CPU: a rehearsal, not a measurement, bfloat16, peak not known")
    tables = [table.splitlines() for table in ended.out.strip().split("\n\n")[1:]]
    assert [len(table) for table in tables] == [3, 5, 3, 4]
    for table in tables:
        assert all(line.count("|") == following.count("|") for line, following in pairwise(table)), table
    _, speed, memory, sharing = tables
    assert [line.split(" | ")[1] for line in speed[2:]] == [
        "ours",
        "transformers, autocast",
        "transformers, parameters in bfloat16 too",
    ]
    for line in speed[3:] + sharing[3:]:
        assert re.search(r"\| \d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\) \|$", line), line
    assert memory[2].startswith("| tiny | 0.00 |")


def test_whole_runs_are_those_of_the_command(
    bench: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run, without a compiler, fails in one line; of the first, the first steps are left out."""
    started: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        started.append(command)
        records = [{"seconds": seconds} for seconds in (9.0, 9.0, 9.0, 0.5, 0.25, 0.5, 0.5, 0.25, 0.5)]
        (Path(command[-1]) / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
        return subprocess.CompletedProcess(command, len(started) == 2, "", "# a remark\n# no compiler\n")

    monkeypatch.setattr(bench.subprocess, "run", run)
    size, settings = bench.SIZES["tiny"], bench.Settings(device="cpu", turns=2)
    measured, failed = bench.whole_runs("tiny", size, settings, None)
    assert measured == "| tiny |  | 500.0 | 768 |  |"
    assert failed == "| tiny | --compile | # no compiler |  |  |"
    flags = [*started[0][2:-1], str(tmp_path), "--steps", "1"]
    assert fork_python("primer/intro.py", *flags).finish(60).status == 0, "the script takes these flags"


@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure the GPU")
def test_without_a_gpu_it_ends_with_a_sentence() -> None:
    ended = fork_python("bench/gpu.py").finish()
    assert ended.status == 2
    assert ended.out == ""
    assert ended.err == "# --device cuda: torch sees no CUDA device here; --device cpu rehearses with a tiny model\n"


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"sizes": ("2B",)}, "--sizes 2B: give one of tiny, 10M, 100M, 1B"),
        ({"turns": 1}, "--turns 1: give at least 2"),
        ({"batch_size": 0}, "--batch-size 0: must be greater than 0"),
        ({"batch_size": 4}, "--batch-size 4: the batch must divide among --ranks 3"),
    ],
)
def test_what_it_refuses(bench: ModuleType, settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(InputError, match=f"^{re.escape(sentence)}"):
        bench.Settings(device="cpu", **settings).chosen()
