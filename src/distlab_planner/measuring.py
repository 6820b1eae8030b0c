"""Measures the numbers of a machine's file, on all ranks of a process group together; needs torch."""

import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.axes.layout import equal_parts
from distlab.comm.context import Group, Options
from distlab.comm.group import empty, open_queues, shares
from distlab.comm.link import Link
from distlab.comm.names import CONTROL, named
from distlab.pipeline.actions import ACTION_KINDS
from distlab.pipeline.activations import MicroBatch, Stage
from distlab.pipeline.rehearsal import now, rehearse
from distlab_planner.collective_probes import seconds_in_turn
from distlab_planner.machine import AllReduce, Measured, MeasuredTransport, PassSeconds, Waking
from distlab_planner.model import PARTS, ModelPart, Sizes
from simplellm.blocks import Attention
from simplellm.compiler import Compiler
from simplellm.experts import equal_loads
from simplellm.layers import MLP
from simplellm.llama import LLama, LLamaFirstStage, LLamaLastStage, LLamaPart, LLamaStage
from simplellm.losses import causalLLMLoss

BLOCKS = 2  # of the stage whose passes are measured
NETS: tuple[tuple[ModelPart, type[LLamaPart], int], ...] = (
    ("embedding", LLamaFirstStage, 0),
    ("block", LLamaStage, BLOCKS),
    ("head", LLamaLastStage, 0),
)
AT_A_TIME = 4  # micro-batches
LEAST_TURNS = 2
TURNS_TOGETHER = 9
MESSAGE_BYTES = 4, 1_000_000
GLOO_BYTES = 4, 65_536, 1_048_576, 4_194_304
SHARED_BYTES = 4_096, 262_144, 4_194_304, 16_777_216
ROUNDS = 8
IN_A_ROW = 4  # collectives
PRODUCTS = 2  # of matrices before each, some milliseconds
PAUSE = 2e-3  # seconds
PAUSES = 0.0, 2e-3, 8e-3, 24e-3  # before passes
TURNS_WITH_PAUSES = 15
BYTES_OF_OTHERS = 4_000_000  # used by messages, other stages and other ranks between two passes; more than an L2 cache
MATRIX_ROWS = 256


class Passes:
    """A stage's passes over a made-up micro-batch, timed on this rank; compiled if there is a compiler."""

    def __init__(
        self, net: LLamaPart, sizes: Sizes, rows: int, vocab_size: int, compiler: Compiler | None = None
    ) -> None:
        device = next(net.parameters()).device
        loss = partial(causalLLMLoss, vocab_size=vocab_size) if net.has_head else None
        self._index = 0 if net.has_embedding else 1
        self._net, self._stage, self._device = net, Stage(net, loss, None), device
        self._compiling = compiler.applied if compiler else contextlib.nullcontext
        ids = torch.zeros(rows, sizes.seq_len, dtype=torch.int64, device=device)
        self._ids, self._width, self._stages = ids, sizes.dmodel, self._index + (1 if net.has_head else 2)

    def run(self, letters: str, before: Callable[[], object] = lambda: None, micro_batches: int = 1) -> list[float]:
        """Return the mean seconds of each of the actions "FB" or "FIW", one after another on all micro-batches.

        `before` is called before each of them, and not timed.
        """
        parts = [MicroBatch(self._stage, self._ids) for _ in range(micro_batches)]
        actions = [ACTION_KINDS[letter](self._index, number) for letter in letters for number in range(micro_batches)]
        rehearsal = rehearse(actions, lambda action: parts[action.micro_batch], self._stages, self._width)
        seconds = dict.fromkeys(letters, 0.0)
        before()
        with self._compiling():
            for action, taken in rehearsal:
                seconds[action.letter] += taken / micro_batches
                before()
        return [*seconds.values()]

    def turn(self) -> dict[str, float]:
        """Return the seconds of each kind of pass; as "again", the additional ones of one with recomputation.

        Gradients are accumulated, as with several micro-batches. Several micro-batches are in progress, as in a run:
        other passes have overwritten the data that a pass left in the caches.
        """
        forward, backward = self.run("FB", micro_batches=AT_A_TIME)
        other, of_input, of_weights = self.run("FIW", micro_batches=AT_A_TIME)
        seconds = {"F": (forward + other) / 2, "B": backward, "I": of_input, "W": of_weights}
        if self._net.model.layers:
            self._net.recompute = "blocks"
            _, recomputing = self.run("FB")
            self._net.recompute = "none"
            seconds["again"] = max(0.0, recomputing - backward)
        return seconds


def build(kind: type[LLamaPart], sizes: Sizes, n_layers: int, tp: int, device: torch.device) -> LLamaPart:
    """Build a part of the model as on one of `tp` ranks, without collectives."""
    vocab_size = equal_parts(sizes.vocab_size, tp)[0]
    names = "dmodel", "num_heads", "num_kv_heads", "hidden_dim"
    options = {name: getattr(sizes, name) for name in names} | {"ctx_size": sizes.seq_len, "device": device}
    options["dtype"] = getattr(torch, sizes.dtype)
    if sizes.experts:
        options |= {name: getattr(sizes, name) for name in ("experts", "experts_per_token", "qk_norm")}
        options["shared_expert"] = bool(sizes.shared_experts)
    net = LLama(kind, vocab_size, n_layers=n_layers, first_layer=0, **options)
    sliced = (Attention,) if sizes.experts else (Attention, MLP)  # slices of a layer compute whole experts
    for module in net.modules() if tp > 1 else ():
        if isinstance(module, sliced):
            for name, linear in module.named_children():
                if not isinstance(linear, nn.Linear):  # norms of queries and keys, which are whole
                    continue
                dim = int(name in ("o_proj", "down_proj"))  # the second of a pair is split by its inputs
                linear.weight = nn.Parameter(linear.weight.detach().tensor_split(tp, dim)[0].clone())
    return net


@dataclass(frozen=True)
class Slicing:
    """The setting of a measurement: one of `tp` slices, and a number of threads."""

    tp: int
    threads: int


PassesKey = tuple[Slicing, ModelPart, int]  # the last one is the sequences of a micro-batch


def measure_passes(
    sizes: Sizes, kinds: Sequence[Slicing], rows: Sequence[int], device: torch.device, seconds: float
) -> list[Measured]:
    """Measure the parts of a model on this rank alone, for about `seconds` seconds.

    The result for a pass is the median of its turns.
    """
    compiler = Compiler() if sizes.compiled else None
    nets = {(kind, part): build(net, sizes, blocks, kind.tp, device) for kind in kinds for part, net, blocks in NETS}
    passes: dict[PassesKey, Passes] = {}
    for ((kind, part), net), count in itertools.product(nets.items(), rows):
        vocab_size = equal_parts(sizes.vocab_size, kind.tp)[0]
        passes[kind, part, count] = Passes(net, sizes, count, vocab_size, compiler)
    with equal_loads(nets.values()):
        turns = take_turns(passes, seconds)

    def times_of(kind: Slicing, part: ModelPart, letter: str) -> tuple[float, ...]:
        medians = [statistics.median(turn[letter] for turn in turns[kind, part, count]) for count in rows]
        return ascending([median / (BLOCKS if part == "block" else 1) for median in medians])

    def measured(kind: Slicing) -> Measured:
        embedding, block, head = (PassSeconds(*(times_of(kind, part, letter) for letter in "FBIW")) for part in PARTS)
        again = times_of(kind, "block", "again")
        return Measured(sizes, kind.tp, kind.threads, tuple(rows), embedding, block, head, again)

    return list(map(measured, kinds))


def take_turns(passes: Mapping[PassesKey, Passes], seconds: float) -> dict[PassesKey, list[dict[str, float]]]:
    """Measure all passes in turns, so that a temporary disturbance does not spoil a single one.

    Each is measured for about the same time, so short passes have more turns than long ones.
    """
    usual_threads = torch.get_num_threads()
    turns: dict[PassesKey, list[dict[str, float]]] = {key: [] for key in passes}
    begun, spent = time.perf_counter(), dict.fromkeys(passes, 0.0)
    for one in passes.values():
        one.run("FB", micro_batches=AT_A_TIME)  # the first loads and allocates
    while (elapsed := time.perf_counter() - begun) < seconds or min(map(len, turns.values())) < LEAST_TURNS:
        for key, one in passes.items():
            if len(turns[key]) >= LEAST_TURNS and spent[key] > elapsed / len(passes):
                continue
            torch.set_num_threads(key[0].threads)
            started = time.perf_counter()
            turns[key].append(one.turn())
            spent[key] += time.perf_counter() - started
    torch.set_num_threads(usual_threads)
    return turns


def measure_slowdown(sizes: Sizes, rank: int, ranks: int, device: torch.device, seconds: float) -> tuple[float, ...]:
    """Return the times of passes while 1, 2, … ranks of this host compute, in multiples of one's alone; on all ranks.

    Each number of ranks computes for `seconds` per turn; the results are medians.
    """
    passes = Passes(build(LLamaStage, sizes, BLOCKS, 1, device), sizes, 1, sizes.vocab_size)
    passes.run("FB")
    rates: list[list[float]] = [[] for _ in range(ranks)]  # passes a second, of all that are busy
    for busy in [*range(1, ranks + 1)] * TURNS_TOGETHER:
        meet("ranks to compute at the same time", device)
        own = passes_per_second(passes, seconds) if rank < busy else 0.0
        rate = torch.tensor(own, dtype=torch.float64, device=device)
        with named("the speed of all ranks", CONTROL):
            dist.all_reduce(rate)
        rates[busy - 1].append(rate.item())
    alone, *_ = usual_rates = [statistics.median(turns) for turns in rates]
    return tuple(max(1.0, busy * alone / rate) for busy, rate in enumerate(usual_rates, start=1))


def passes_per_second(passes: Passes, seconds: float) -> float:
    """Count passes for `seconds`; then compute for a while longer, until others have counted theirs."""
    started, ends = time.perf_counter(), list[float]()
    while not ends or ends[-1] < 1.5 * seconds:
        passes.run("FB")
        ends.append(time.perf_counter() - started)
    before = [end for end in ends if end <= seconds]
    last, following = before[-1] if before else 0.0, ends[len(before)]
    return (len(before) + (seconds - last) / (following - last)) / seconds


def measure_waking(sizes: Sizes) -> tuple[Waking, ...]:
    """Measure how much longer a pass takes after a message: its core was idle, and its caches hold other data."""
    passes = Passes(build(LLamaStage, sizes, BLOCKS, 1, torch.device("cpu")), sizes, 1, sizes.vocab_size)
    others = torch.zeros(BYTES_OF_OTHERS // 4)

    def wait(pause: float) -> None:
        others.add_(1)
        time.sleep(pause)

    at_once, after = list[float](), {pause: list[float]() for pause in PAUSES}
    for _ in range(TURNS_WITH_PAUSES):
        passes.run("FB")
        at_once.append(statistics.fmean(passes.run("FB")))
        for pause, times in after.items():
            times.append(statistics.fmean(passes.run("FB", partial(wait, pause))))
    usual = statistics.median(at_once)
    seconds = ascending([max(0.0, statistics.median(times) - usual) for times in after.values()])
    return tuple(map(Waking, PAUSES, seconds))


@dataclass(frozen=True)
class Messages:
    """The costs of messages between two ranks."""

    link: Link
    own_seconds: float  # of the latency: the call that sends; the time to copy large messages is neglected


def measure_messages(rank: int, pairs: Sequence[tuple[int, int]], device: torch.device) -> Messages:
    """Measure messages between the ranks of all pairs at once; all ranks call this, and get the first pair's result.

    A rank pauses before it sends, so that the other is asleep when the message arrives, like any waiting rank.
    """
    told = torch.zeros(3, dtype=torch.float64, device=device)
    meet("ranks to send messages", device)
    for peers in (pair for pair in pairs if rank in pair):
        tensors = [torch.zeros(size_bytes // 4, device=device) for size_bytes in MESSAGE_BYTES]
        open_queues([*peers, peers[0]], tensors[-1].nbytes, tensors[-1])
        times, calls = zip(*(_exchange(rank, peers, tensors) for _ in range(2 * ROUNDS)), strict=True)
        told[:2] = torch.tensor([statistics.median(column) for column in zip(*times, strict=True)])
        told[2] = statistics.median(calls)
    with named("the times of messages", CONTROL):
        dist.broadcast(told, pairs[0][0])
    latency, whole, own = told.tolist()
    return Messages(Link(latency, MESSAGE_BYTES[1] / max(1e-9, whole - latency)), min(own, latency))


def _exchange(rank: int, peers: tuple[int, int], tensors: Sequence[Tensor]) -> tuple[list[float], float]:
    """Return the seconds of a message of each tensor between two ranks, one way, and of the first call that sends."""
    times, calls = [], []
    other = peers[1 - peers.index(rank)]
    for tensor in tensors:
        started = now(tensor.device)
        for sender in peers:
            if rank == sender:
                time.sleep(PAUSE)
                called = time.perf_counter()
                with named("a message of the calibration", CONTROL):
                    work = dist.isend(tensor, other)
                calls.append(time.perf_counter() - called)
                assert work is not None
                work.wait()
            else:
                with named("a message of the calibration", CONTROL):
                    dist.recv(tensor, other)
        times.append((now(tensor.device) - started) / 2 - PAUSE)
    return times, calls[0]


def measure_all_reduces(rank: int, ranks: int, device: torch.device) -> tuple[AllReduce, ...]:
    """Measure all-reduces among the first 2, 3, … ranks of this host, over the process group and in shared memory.

    Before each of them, the ranks compute for a while, as in a run, where they begin a collective one after another
    and cores have other work. The time of this computation alone is subtracted.
    """
    works: dict[str, Callable[[], object]] = {}
    keys: dict[tuple[int, MeasuredTransport], dict[int, str]] = {}  # by ranks and transport: by size, the work's name
    kinds: tuple[tuple[MeasuredTransport, Sequence[int]], ...] = (("gloo", GLOO_BYTES), ("shared", SHARED_BYTES))
    matrix = torch.ones(MATRIX_ROWS, MATRIX_ROWS, device=device)

    def compute() -> None:
        for _ in range(PRODUCTS):
            matrix.mm(matrix)

    for size in range(2, ranks + 1):
        takes_part = rank < size
        works[f"{size}"] = compute if takes_part else lambda: None
        for transport, sizes in kinds:
            group = dist.new_group(range(size), backend="lab", pg_options=Options(transport=transport))
            for size_bytes in sizes:
                tensor = torch.zeros(size_bytes // 4, device=device)
                if transport == "shared":
                    tensor = empty(size_bytes // 4, tensor, group) if takes_part else tensor
                    if not is_shared_on_all(tensor, group, takes_part, device):
                        continue
                name = f"{size} {transport} {size_bytes}"
                works[name] = partial(combine, tensor, group, compute) if takes_part else lambda: None
                keys.setdefault((size, transport), {})[size_bytes] = name
    times = seconds_in_turn(works, ROUNDS, in_a_row=IN_A_ROW)
    typical = {name: statistics.median(of_one) for name, of_one in times.items()}
    return tuple(
        AllReduce(
            size,
            transport,
            tuple(map(float, names)),
            ascending([max(0.0, typical[name] - typical[f"{size}"]) for name in names.values()]),
        )
        for (size, transport), names in keys.items()
    )


def combine(tensor: Tensor, group: Group, before: Callable[[], object]) -> None:
    before()
    with named("a tensor of the calibration", CONTROL):
        dist.all_reduce(tensor, dist.ReduceOp.AVG, group)


def is_shared_on_all(tensor: Tensor, group: Group, takes_part: bool, device: torch.device) -> bool:
    """Return whether the ranks of a group share the memory of a tensor; the same on all ranks."""
    is_not = torch.tensor(int(takes_part and not shares(tensor, group)), device=device)
    with named("the memory of all ranks", CONTROL):
        dist.all_reduce(is_not, dist.ReduceOp.MAX)
    return not is_not.item()


def measure_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> float:
    """Return the seconds to update one weight, on this rank alone."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    times = []
    for _ in range(1 + ROUNDS):
        started = now(device)
        optimizer.step()
        times.append(now(device) - started)
    return lower_quartile(times[1:]) / sum(parameter.numel() for parameter in parameters)


def lower_quartile(times: Sequence[float]) -> float:
    """Return the lower quartile, which other load on the computer changes less than the median."""
    return statistics.quantiles(times, method="inclusive")[0]


def ascending(times: Sequence[float]) -> tuple[float, ...]:
    """Return the times of inputs of growing size, none above a larger input's: such a measurement was disturbed."""
    return tuple(min(times[place:]) for place in range(len(times)))


def meet(what: str, device: torch.device) -> None:
    """Wait for all ranks."""
    with named(what, CONTROL):
        dist.all_reduce(torch.zeros(1, device=device))
