"""A GPU: how fast the lab trains on it, beside transformers and beside the GPU's peak, and what memory that takes.

    python bench/gpu.py                                   models of 10 M, 100 M and 1 B parameters
    python bench/gpu.py --sizes 10M 100M --turns 4        fewer and shorter
    python bench/gpu.py --device cpu                      a rehearsal with a tiny model: does it run?

Prints tables in Markdown, of which --tables chooses some:

    speed      the training step of primer/intro.py with --dtype bfloat16 beside the same step of transformers'
               LlamaForCausalLM, with the same weights, batches and Adam, some steps of each in turn; ratios by turns
    compiled   the same with both compiled
    runs       primer/intro.py itself, with its loader, checks and log
    memory     the peak of PyTorch's allocator beside what the lab's own table counts
    sharing    a step of DP/gradient_aggr/intro_DP_GA.py by several ranks on one GPU, over gloo, beside one rank
"""

import gc
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Annotated, Literal, get_args

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpu_models import SIZES, VOCAB_SIZE, Size, Step, ours, peak_tflops, theirs, training_step
from ranks import join
from torch import Tensor
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.comm.context import context_of
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.machine.processes import leave
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.reports.memory import MEMORY_KINDS, MemoryReport
from distlab.settings.common import require_positive, shown_as
from simplellm import command_line
from simplellm.errors import require
from simplellm.losses import causalLLMLoss

WARM_UP_TURNS, STEPS_PER_TURN = 1, 3
PRIMER = Path(__file__).resolve().parents[1] / "primer" / "intro.py"
Table = Literal["speed", "compiled", "runs", "memory", "sharing"]

TOO_LARGE_TO_SHARE = ("1B",)  # its gradients, 4 GB, would go through main memory in each step


@dataclass
class Settings:
    """What to measure."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: a rehearsal"""
    sizes: Annotated[tuple[str, ...], shown_as("tiny|10M|100M|1B ...", "default: all but tiny; on the CPU, tiny")] = ()
    """models to measure, by their number of parameters"""
    tables: tuple[Table, ...] = get_args(Table)
    """what to print; see above"""
    residual: Literal["float32", "bfloat16"] = "float32"
    """the residual stream of the lab's model; transformers' is float32 unless its parameters are bfloat16"""
    batch_size: Annotated[int | None, shown_as("INT", "default: by the model")] = None
    """sequences per step"""
    turns: int = 8
    """number of turns of 3 steps for each"""
    ranks: int = 3
    """ranks that share the GPU"""
    peak_tflops: Annotated[float | None, shown_as("FLOAT", "default: by the GPU's name")] = None
    """the GPU's dense bfloat16 peak, in TFLOP/s"""
    port: int = 29559
    """where rank 0 listens"""

    def chosen(self) -> dict[str, Size]:
        """The models to measure, by name; `InputError` for what cannot work."""
        require_positive(self, "batch_size", "peak_tflops", "port")
        for flag, value in (("turns", self.turns), ("ranks", self.ranks)):
            require(value >= 2, f"--{flag} {value}: give at least 2")
        missing = "--device cuda: torch sees no CUDA device here; --device cpu rehearses with a tiny model"
        require(self.device == "cpu" or torch.cuda.is_available(), missing)
        advice = "the comparison is with transformers: pip install transformers"
        require(importlib.util.find_spec("transformers") is not None, advice)
        chosen = {}
        for name in self.sizes or (("tiny",) if self.device == "cpu" else ("10M", "100M", "1B")):
            require(name in SIZES, f"--sizes {name}: give one of {', '.join(SIZES)}")
            chosen[name] = replace(SIZES[name], batch_size=self.batch_size or SIZES[name].batch_size)
            rows, sentence = chosen[name].batch_size, f"the batch must divide among --ranks {self.ranks}"
            require(rows % self.ranks == 0, f"--batch-size {rows}: {sentence}")
        return chosen


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_of_a_step(
    steps: dict[str, Step], size: Size, turns: int, device: torch.device, meet: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Seconds of a step in each turn, by name; `meet` waits for other ranks."""

    def several(step: Step) -> Callable[[Tensor], object]:
        return lambda batches: [step(ids) for ids in batches]

    def finish_and_meet() -> None:
        synchronize(device)
        meet()

    in_a_row = {name: several(step) for name, step in steps.items()}
    batches_of = partial(size.batches, device, STEPS_PER_TURN)
    seconds: dict[str, list[float]] = seconds_in_turn(in_a_row, batches_of, turns, WARM_UP_TURNS, finish_and_meet)
    return {name: [of_turn / STEPS_PER_TURN for of_turn in of_one] for name, of_one in seconds.items()}


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def head(*cells: str) -> str:
    return f"{row(*cells)}\n{'|---' * len(cells)}|"


def ratio(reference: Sequence[float], own: Sequence[float]) -> str:
    """How many times as fast as the reference, turn by turn: the median and the quartiles."""
    low, middle, high = quartiles_of_ratios(reference, own)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


def speed_rows(name: str, size: Size, seconds: dict[str, list[float]], peak: float | None) -> list[str]:
    """A line for each variant, the lab's own first."""
    lines, own = [], next(iter(seconds.values()))
    for variant, of_one in seconds.items():
        median = statistics.median(of_one)
        cells = [name, variant, f"{1e3 * median:.1f}", f"{size.tokens / median:,.0f}"]
        cells += [share_of_peak(size, median, peak), "" if of_one is own else ratio(of_one, own)]
        lines.append(row(*cells))
    return lines


def share_of_peak(size: Size, seconds: float, peak: float | None) -> str:
    """The floating-point operations of a step, to those that the device could have done; empty if that is not known."""
    return f"{100 * size.tokens / seconds * size.flops_per_token / (peak * 1e12):.1f} %" if peak else ""


def compare_speed(compiled: bool, name: str, size: Size, settings: Settings, peak: float | None) -> list[str]:
    device = torch.device(settings.device)
    net = size.build(device, residual=getattr(torch, settings.residual))
    mark = ", compiled" if compiled else ""
    steps = {f"ours{mark}": ours(net, compiled)[0]}
    steps[f"transformers, autocast{mark}"] = theirs(size, net, torch.float32, device, compiled)
    if not compiled:
        steps["transformers, parameters in bfloat16 too"] = theirs(size, net, torch.bfloat16, device)
    [ids] = size.batches(device, 1, seed=0)
    losses = {variant: step(ids) for variant, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 0.05:
        raise RuntimeError(f"these do not compute the same loss: {losses}")
    return speed_rows(name, size, seconds_of_a_step(steps, size, settings.turns, device), peak)


def whole_runs(name: str, size: Size, settings: Settings, peak: float | None) -> list[str]:
    """A line for primer/intro.py with each of some flags; the first steps, in which it warms up, are left out."""
    sizes = {"dmodel": size.dmodel, "num-heads": size.num_heads, "n-layers": size.n_layers}
    sizes |= {"hidden-dim": size.hidden_dim, "seq-len": size.seq_len, "batch-size": size.batch_size}
    flags = [word for flag, value in sizes.items() for word in (f"--{flag}", str(value))]
    warm_up, steps = WARM_UP_TURNS * STEPS_PER_TURN, (WARM_UP_TURNS + settings.turns) * STEPS_PER_TURN
    flags += ["--steps", str(steps), "--data", "sample", "--dtype", "bfloat16", "--device", settings.device]
    lines = []
    flags += ["--residual", settings.residual]
    for more in ([], ["--compile"]):
        with tempfile.TemporaryDirectory() as out:
            command = [sys.executable, str(PRIMER), *flags, *more, "--out", out]
            ended = subprocess.run(command, capture_output=True, text=True, check=False)
            if ended.returncode != 0:
                lines.append(row(name, " ".join(more), ended.stderr.splitlines()[-1], "", ""))
                continue
            records = (Path(out) / "metrics.jsonl").read_text().splitlines()[warm_up:]
        median = statistics.median(json.loads(record)["seconds"] for record in records)
        cells = name, " ".join(more), f"{1e3 * median:.1f}", f"{size.tokens / median:,.0f}"
        lines.append(row(*cells, share_of_peak(size, median, peak)))
    return lines


def memory_row(name: str, counts: Sequence[int], peak_bytes: int | None) -> str:
    """What a run's table counts, by kind, and the allocator's peak; None where there is no such allocator."""
    cells = [f"{count / 1e9:.2f}" for count in (*counts, sum(counts))]
    measured = ["", ""] if peak_bytes is None else [f"{peak_bytes / 1e9:.2f}", f"{peak_bytes / sum(counts):.2f}"]
    return row(name, *cells, *measured)


def compare_memory(name: str, size: Size, settings: Settings) -> list[str]:
    device = torch.device(settings.device)
    [ids] = size.batches(device, 1, seed=0)
    step, optimizer = ours(size.build(device, residual=getattr(torch, settings.residual)))
    report = MemoryReport(optimizer)
    with report.counting():
        step(ids)
    counted = report.counts(context_of().recorder)
    counts = [counted[kind] for kind in MEMORY_KINDS]
    if device.type == "cpu":
        return [memory_row(name, counts, None)]
    torch.cuda.reset_peak_memory_stats(device)
    step(ids)
    return [memory_row(name, counts, torch.cuda.max_memory_allocated(device))]


def measure_sharing(rank: int, size: Size, settings: Settings, results: "SimpleQueue[list[list[float]]]") -> None:
    """One of the ranks that share a device; the first puts the seconds of a step alone and together into `results`."""
    join(rank, settings.ranks, settings.port)
    device = torch.device(settings.device)
    net = size.build(device)

    def add_up(bucket: Bucket) -> Pending:
        with named(str(bucket), "gradients"):
            return dist.all_reduce(bucket.flat, async_op=True)

    def share_of_loss(ids: Tensor) -> Tensor:
        return causalLLMLoss(net(ids), ids, VOCAB_SIZE) / settings.ranks

    buckets = GradientBuckets(net.parameters(), on_full=add_up)
    together, _ = training_step(net, share_of_loss, buckets.finish)
    alone = ours(size.build(device))[0] if rank == 0 else lambda _: 0.0
    own_rows = slice(rank, None, settings.ranks)
    steps: dict[str, Step] = {"alone": alone, "together": lambda ids: together(ids[own_rows])}
    seconds = seconds_of_a_step(steps, size, settings.turns, device, meet=dist.barrier)
    if rank == 0:
        results.put([*seconds.values()])
    leave(0)  # without the process group's destructor, which can hang: see distlab.run.run.Run.close


def sharing_rows(name: str, size: Size, ranks: int, alone: Sequence[float], together: Sequence[float]) -> list[str]:
    lines = []
    for count, seconds in ((1, alone), (ranks, together)):
        median = statistics.median(seconds)
        cells = name, str(count), f"{1e3 * median:.1f}", f"{size.tokens / median:,.0f}"
        lines.append(row(*cells, "" if seconds is alone else ratio(alone, seconds)))
    return lines


def compare_sharing(name: str, size: Size, settings: Settings) -> list[str]:
    results: SimpleQueue[list[list[float]]] = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(measure_sharing, args=(size, settings, results), nprocs=settings.ranks)
    except mp.ProcessRaisedException as error:
        if torch.OutOfMemoryError.__name__ in str(error):
            raise torch.OutOfMemoryError from error
        raise
    return sharing_rows(name, size, settings.ranks, *results.get())


def measure(settings: Settings) -> None:
    """Print the tables, line by line."""
    chosen = settings.chosen()
    import transformers

    dist.init_process_group("lab", store=dist.HashStore(), rank=0, world_size=1)

    on_gpu = settings.device == "cuda"
    device = torch.cuda.get_device_name() if on_gpu else "CPU: a rehearsal, not a measurement"
    peak = settings.peak_tflops or (peak_tflops(device) if on_gpu else None)
    known = f"peak {peak:g} TFLOP/s" if peak else "peak not known, so no share of it (--peak-tflops gives it)"
    print(f"{device}, bfloat16, {known}; torch {torch.__version__}, transformers {transformers.__version__}\n")
    print(head("model", "parameters", "dmodel", "heads", "layers", "hidden", "sequences of tokens"))
    for name, size in chosen.items():
        widths = size.dmodel, size.num_heads, size.n_layers, size.hidden_dim
        print(row(name, f"{size.parameters:,}", *map(str, widths), f"{size.batch_size} of {size.seq_len:,}"))

    def table(heads: Sequence[str], lines_of: Callable[[str, Size], list[str]], names: Sequence[str]) -> None:
        print(f"\n{head(*heads)}", flush=True)
        for name in names:
            try:
                lines = lines_of(name, chosen[name])
            except torch.OutOfMemoryError:
                lines = [row(name, *["out of memory"] * (len(heads) - 1))]
            gc.collect()
            if on_gpu:
                torch.cuda.empty_cache()
            print("\n".join(lines), flush=True)

    quotient, step = "median (quartiles)", ("ms a step", "tokens/s")
    variants = ["model", "variant", *step, "share of the peak", f"speed of ours to this one: {quotient}"]
    counted = [f"{kind}, GB" for kind in MEMORY_KINDS]
    memory = ["model", *counted, "counted together, GB", "peak allocated, GB", "peak to counted"]
    ranks = ["model", "ranks", *step, f"speed of {settings.ranks} ranks to one: {quotient}"]
    shared = [name for name in chosen if name not in TOO_LARGE_TO_SHARE]
    tables: dict[Table, Callable[[], None]] = {
        "speed": lambda: table(
            variants, lambda name, size: compare_speed(False, name, size, settings, peak), [*chosen]
        ),
        "compiled": lambda: table(
            variants, lambda name, size: compare_speed(True, name, size, settings, peak), [*chosen]
        ),
        "runs": lambda: table(variants[:-1], lambda name, size: whole_runs(name, size, settings, peak), [*chosen]),
        "memory": lambda: table(memory, lambda name, size: compare_memory(name, size, settings), [*chosen]),
        "sharing": lambda: table(ranks, lambda name, size: compare_sharing(name, size, settings), shared),
    }
    for name in settings.tables:
        tables[name]()


if __name__ == "__main__":
    command_line.run(measure, Settings, __doc__)
