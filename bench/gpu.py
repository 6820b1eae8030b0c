"""A GPU: how fast the lab trains on it, beside transformers and beside the GPU's peak, and what memory that takes.

    python bench/gpu.py                                   models of 10 M, 100 M and 1 B parameters
    python bench/gpu.py --sizes 10M 100M --turns 4        fewer and shorter
    python bench/gpu.py --device cpu                      a rehearsal with a tiny model: does it run?

Prints three tables in Markdown. Speed: the training step of primer/intro.py with --dtype bfloat16 beside the same step
of transformers' LlamaForCausalLM, with the same weights, batches and Adam, a few steps of each in turn; ratios are
taken turn by turn. Memory: the peak of PyTorch's allocator beside what the lab's own table counts. Sharing: a step of
DP/gradient_aggr/intro_DP_GA.py by several ranks on one GPU, over gloo, beside one rank with the whole batch.
"""

import gc
import importlib.util
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.queues import SimpleQueue
from typing import Annotated, Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import join
from torch import Tensor, nn
from torch.optim import Optimizer
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.comm.context import context_of
from distlab.comm.names import named
from distlab.comm.pending import Pending
from distlab.machine.processes import leave
from distlab.parallel.data import Bucket, GradientBuckets
from distlab.reports.memory import KINDS, MemoryReport
from distlab.run.model import build_optimizer
from distlab.settings.common import require_positive, shown_as
from simplellm import command_line
from simplellm.errors import require
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss

VOCAB_SIZE = 4096
WARM_UP_TURNS, STEPS_PER_TURN = 1, 3

# Dense bfloat16 products summed in float32, in TFLOP/s, by the name that CUDA gives the device, without "NVIDIA" and
# "GeForce". From NVIDIA's data sheets; a figure given with sparsity is halved. GeForce: white papers on Ada (4090) and
# RTX Blackwell (3090, 5090). A part of a GPU (MIG) has another peak.
PEAK_TFLOPS = {
    r"A40": 149.7,
    r"A100[- ].*": 312.0,
    r"H100 80GB HBM3": 989.0,
    r"H100 PCIe": 756.0,
    r"H100 NVL": 835.0,
    r"H200": 989.0,
    r"B200": 2250.0,
    r"L4": 121.0,
    r"L40": 181.0,
    r"L40S": 362.0,
    r"RTX 3090": 71.2,
    r"RTX 4090": 165.2,
    r"RTX 5090": 209.5,
}


@dataclass(frozen=True)
class Size:
    """A model, and the batch that it is measured with."""

    dmodel: int
    num_heads: int
    n_layers: int
    hidden_dim: int
    seq_len: int
    batch_size: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch_size * self.seq_len

    @property
    def matrix_parameters(self) -> int:
        """Parameters that each token is multiplied by: all but the embeddings, which are looked up, and the gains."""
        layer = 4 * self.dmodel**2 + 3 * self.dmodel * self.hidden_dim
        return self.n_layers * layer + VOCAB_SIZE * self.dmodel

    @property
    def parameters(self) -> int:
        return self.matrix_parameters + (VOCAB_SIZE + 2 * self.n_layers + 1) * self.dmodel

    @property
    def flops_per_token(self) -> int:
        """Floating-point operations that a training step needs for each token: 6 N + 6 L T d.

        For each of N parameters, 2 in the forward and 4 in the backward pass (Kaplan et al., arXiv 2001.08361). For
        attention in L layers of width d over T tokens, half of the 12 L T d in appendix B of PaLM (Chowdhery et al.,
        arXiv 2204.02311): a causal model needs half of the scores.
        """
        return 6 * self.matrix_parameters + 6 * self.n_layers * self.seq_len * self.dmodel

    def build(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> CausalLLama:
        names = "dmodel", "num_heads", "n_layers", "hidden_dim"
        options: dict[str, Any] = {name: getattr(self, name) for name in names}
        options |= {"ctx_size": self.seq_len, "device": device, "dtype": dtype}
        return LLama(CausalLLama, VOCAB_SIZE, **options)

    def batches(self, device: torch.device, count: int, seed: int) -> Tensor:
        """Token ids (count, batch, seq), the same on all ranks."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randint(VOCAB_SIZE, (count, self.batch_size, self.seq_len), generator=generator).to(device)


SIZES = {
    "tiny": Size(dmodel=32, num_heads=2, n_layers=2, hidden_dim=96, seq_len=64, batch_size=6),
    "10M": Size(dmodel=288, num_heads=6, n_layers=6, hidden_dim=1152, seq_len=1024, batch_size=48),  # the lab's default
    "100M": Size(dmodel=768, num_heads=12, n_layers=10, hidden_dim=3072, seq_len=2048, batch_size=12),
    "1B": Size(dmodel=2048, num_heads=16, n_layers=20, hidden_dim=5504, seq_len=2048, batch_size=6),
}
TOO_LARGE_TO_SHARE = ("1B",)  # its gradients, 4 GB, would go through main memory in each step


@dataclass
class Settings:
    """What to measure."""

    device: Literal["cuda", "cpu"] = "cuda"
    """cpu: a rehearsal"""
    sizes: Annotated[tuple[str, ...], shown_as("tiny|10M|100M|1B ...", "default: all but tiny; on the CPU, tiny")] = ()
    """models to measure, by their number of parameters"""
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


Step = Callable[[Tensor], float]  # trains on one batch (batch, seq), and returns its loss


def training_step(
    net: nn.Module, loss_of: Callable[[Tensor], Tensor], finish: Callable[[], None] = lambda: None
) -> tuple[Step, Optimizer]:
    """The step of primer/intro.py; `finish` completes the gradients."""
    optimizer = build_optimizer("adam", net.parameters(), lr=1e-4)

    def step(ids: Tensor) -> float:
        optimizer.zero_grad()
        loss = loss_of(ids)
        loss.backward()
        finish()
        value = loss.item()
        optimizer.step()
        return value

    return step, optimizer


def ours(net: CausalLLama) -> tuple[Step, Optimizer]:
    return training_step(net, lambda ids: causalLLMLoss(net(ids), ids, VOCAB_SIZE))


def theirs(size: Size, net: CausalLLama, dtype: torch.dtype, device: torch.device) -> Step:
    """The same model in transformers: parameters of this dtype, products in bfloat16."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings: dict[str, Any] = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": size.dmodel,
        "intermediate_size": size.hidden_dim,
        "num_hidden_layers": size.n_layers,
        "num_attention_heads": size.num_heads,
        "max_position_embeddings": size.seq_len,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "attn_implementation": "sdpa",
    }
    with device:
        model: nn.Module = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(net.state_dict())
    for parameter in model.parameters():  # not the rotary frequencies
        parameter.data = parameter.detach().to(dtype)

    def loss_of(ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.float32):
            loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    return training_step(model, loss_of)[0]


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


def peak_tflops(name: str) -> float | None:
    """The dense bfloat16 peak of a device that CUDA calls so; None if it is not known."""
    bare = name.removeprefix("NVIDIA ").removeprefix("GeForce ")
    known = (peak for pattern, peak in PEAK_TFLOPS.items() if re.fullmatch(pattern, bare))
    return None if " MIG " in name else next(known, None)


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
        share = size.tokens / median * size.flops_per_token / (peak * 1e12) if peak else None
        cells = [name, variant, f"{1e3 * median:.1f}", f"{size.tokens / median:,.0f}"]
        cells += ["" if share is None else f"{100 * share:.1f} %", "" if of_one is own else ratio(of_one, own)]
        lines.append(row(*cells))
    return lines


def compare_speed(name: str, size: Size, settings: Settings, peak: float | None) -> list[str]:
    device = torch.device(settings.device)
    net = size.build(device)
    steps = {"ours": ours(net)[0]}
    steps["transformers, autocast"] = theirs(size, net, torch.float32, device)
    steps["transformers, parameters in bfloat16 too"] = theirs(size, net, torch.bfloat16, device)
    [ids] = size.batches(device, 1, seed=0)
    losses = {variant: step(ids) for variant, step in steps.items()}
    if max(losses.values()) - min(losses.values()) > 0.05:
        raise RuntimeError(f"these do not compute the same loss: {losses}")
    return speed_rows(name, size, seconds_of_a_step(steps, size, settings.turns, device), peak)


def memory_row(name: str, counts: Sequence[int], peak_bytes: int | None) -> str:
    """What a run's table counts, by kind, and the allocator's peak; None where there is no such allocator."""
    cells = [f"{count / 1e9:.2f}" for count in (*counts, sum(counts))]
    measured = ["", ""] if peak_bytes is None else [f"{peak_bytes / 1e9:.2f}", f"{peak_bytes / sum(counts):.2f}"]
    return row(name, *cells, *measured)


def compare_memory(name: str, size: Size, settings: Settings) -> list[str]:
    device = torch.device(settings.device)
    [ids] = size.batches(device, 1, seed=0)
    step, optimizer = ours(size.build(device))
    report = MemoryReport(optimizer)
    with report.counting():
        step(ids)
    counts = report.collect(context_of())[0][: len(KINDS)]
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
    heads = ["model", "variant", *step, "share of the peak", f"speed of ours to this one: {quotient}"]
    table(heads, lambda name, size: compare_speed(name, size, settings, peak), [*chosen])
    counted = [f"{kind}, GB" for kind in KINDS]
    heads = ["model", *counted, "counted together, GB", "peak allocated, GB", "peak to counted"]
    table(heads, lambda name, size: compare_memory(name, size, settings), [*chosen])
    heads = ["model", "ranks", *step, f"speed of {settings.ranks} ranks to one: {quotient}"]
    shared = [name for name in chosen if name not in TOO_LARGE_TO_SHARE]
    table(heads, lambda name, size: compare_sharing(name, size, settings), shared)


if __name__ == "__main__":
    command_line.run(measure, Settings, __doc__)
