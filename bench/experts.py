"""Experts: shared by ranks beside one process with all cores; beside transformers; and their loss beside a dense model.

    python bench/experts.py                   speed and bytes
    python bench/experts.py --losses 400      losses over 400 steps, at equal work for each token
    python bench/experts.py --counts 1000     rows that are sent, computed and returned in 1,000 steps of a small model
    python bench/experts.py --machine FILE    the time of an exchange of rows, beside the planner's prediction

In the first comparison all ranks together have the tokens of one process, and the model is the same. The second is one
process beside a Mixtral of transformers with the same weights, whose experts are computed in a loop ("eager") or in one
grouped product.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import tyro
from ranks import join
from torch import Tensor, nn
from torch.optim import Adam
from turns import quartiles_of_ratios, seconds_in_turn

from distlab.axes.grid import Grid, all_ranks
from distlab.comm.context import context_of
from distlab.comm.group import empty
from distlab.machine.heap import set_up_heap
from distlab.machine.processes import leave
from distlab.parallel.data import views_of
from distlab.parallel.expert_parallel import LoadBalance, mixtures_in, own_experts, share_experts
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import read_machine
from distlab_planner.traffic import RanksOnHosts
from simplellm.dataloaders import TinyStories
from simplellm.export import export
from simplellm.feed_forward import Passage
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import causalLLMLoss
from simplellm.saved_model import SavedModel
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

VOCAB_SIZE, DMODEL, SEQ_LEN = SPTokenizer().vocab_size, 288, 256
ALONE = "one process"
Step = Callable[[Tensor], object]  # token ids (batch, seq)
Compute = Callable[[Tensor, Sequence[int]], Tensor]  # rows, and the rows of each expert


@dataclass
class Settings:
    """What to measure."""

    ranks: int = 2
    """ranks that share the experts, each with one thread; one process has as many threads"""
    experts: int = 8
    """of each of the six layers"""
    experts_per_token: int = 2
    """that the router chooses"""
    hidden_dim: int = 576
    """width of an expert"""
    batch_size: int = 4
    """sequences of 256 tokens, of all ranks together; with --counts, of 16 tokens, of each rank"""
    rounds: int = 8
    """measured steps of each variant"""
    counts: int = 0
    """instead, take that many steps and count rows; the first in which one is lost ends them"""
    machine: Path | None = None
    """instead, time exchanges of rows, and predict them by this file of distlab.calibrate"""
    losses: int = 0
    """instead, train an expert and a dense model for that many steps, and compare their losses"""
    port: int = 29569
    """where rank 0 listens"""


def build(settings: Settings, dense: bool = False, n_layers: int = 6, **options: object) -> CausalLLama:
    """The model; a dense one is as wide as the experts of a token are together."""
    width, k = settings.hidden_dim, settings.experts_per_token
    kind = {"hidden_dim": k * width} if dense else {"hidden_dim": width, "experts": settings.experts}
    sizes = {"experts_per_token": k, "ctx_size": SEQ_LEN, "dmodel": DMODEL, "n_layers": n_layers}
    return LLama(CausalLLama, VOCAB_SIZE, **sizes, **kind, **options)


def update(net: nn.Module) -> Adam:
    return Adam([parameter for parameter in net.parameters() if parameter.requires_grad], lr=8e-4)


def alone(settings: Settings, rank: int) -> Step:
    """The step of one process, which rank 0 takes while the others wait."""
    net = build(settings)
    optimizer = update(net)

    def step(ids: Tensor) -> None:
        if rank == 0:
            torch.set_num_threads(settings.ranks)
            optimizer.zero_grad()
            causalLLMLoss(net(ids), ids, VOCAB_SIZE).backward()
            optimizer.step()
            torch.set_num_threads(1)

    return step


def shared(settings: Settings) -> Step:
    """A step of all ranks: each has its sequences, and the weights that are no experts' are averaged."""
    axis = all_ranks("ep")
    net = build(settings, own_experts=own_experts(settings.experts, axis))
    share_experts([net], axis)
    optimizer = update(net)
    dense = [parameter for name, parameter in net.named_parameters() if "experts" not in name and "bias" not in name]
    flat = empty(sum(parameter.numel() for parameter in dense), dense[0].detach())
    views = views_of(flat, dense)

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        flat.zero_()
        for parameter, view in zip(dense, views, strict=True):
            parameter.grad = view
        own = ids.chunk(axis.size)[axis.rank]
        causalLLMLoss(net(own), own, VOCAB_SIZE).backward()
        dist.all_reduce(flat, dist.ReduceOp.AVG)
        optimizer.step()

    return step


def tokens(settings: Settings, turn: int) -> Tensor:
    shape = settings.batch_size, SEQ_LEN
    return torch.randint(VOCAB_SIZE, shape, generator=torch.Generator().manual_seed(turn))


def measure(rank: int, settings: Settings) -> None:
    """One rank: both variants in turn, and the bytes of rows."""
    join(rank, settings.ranks, settings.port)
    name = f"ep {settings.ranks}"
    steps = {ALONE: alone(settings, rank), name: shared(settings)}
    seconds = seconds_in_turn(steps, partial(tokens, settings), settings.rounds, warm_up=1, meet=dist.barrier)
    rows = context_of().ledger.sent_bytes["rows of experts"] / (1 + settings.rounds)
    sent = torch.tensor(rows)
    dist.all_reduce(sent, dist.ReduceOp.AVG)
    if rank == 0:
        print_ratios(seconds, f"speed to {ALONE} (median)", ALONE)
        n, k = settings.ranks, settings.experts_per_token
        own = settings.batch_size * SEQ_LEN // n
        expected = 4 * 6 * own * k * DMODEL * 4 * (n - 1) / n
        print(
            "\n| ranks | bytes of rows, MB a step and rank | formula, equal loads, MB | ratio |",
            "|---|---|---|---|",
            sep="\n",
        )
        print(f"| {n} | {float(sent) / 1e6:.2f} | {expected / 1e6:.2f} | {float(sent) / expected:.3f} |", flush=True)
    leave(0)


@dataclass
class Rows:
    """The rows of a rank in a step, in all layers."""

    sent: int = 0
    computed: int = 0  # by its own experts
    returned: int = 0

    def counted(self, passage: Passage) -> Passage:
        """Return a passage that counts its rows here."""

        def through(rows: Tensor, counts: Tensor, compute: Compute) -> Tensor:
            def computing(own: Tensor, of_experts: Sequence[int]) -> Tensor:
                self.computed += len(own)
                return compute(own, of_experts)

            outputs = passage(rows, counts, computing)
            self.sent, self.returned = self.sent + len(rows), self.returned + len(outputs)
            return outputs

        return through


def count_rows(rank: int, settings: Settings) -> None:
    """One rank: train a small model, and compare the rows of all ranks with those of their tokens in each step."""
    join(rank, settings.ranks, settings.port)
    axis, seq, layers = all_ranks("ep"), 16, 2
    sizes = {"dmodel": 16, "num_heads": 2, "hidden_dim": 24, "n_layers": layers, "ctx_size": seq}
    k, own = settings.experts_per_token, own_experts(settings.experts, axis)
    net = LLama(CausalLLama, VOCAB_SIZE, experts=settings.experts, experts_per_token=k, own_experts=own, **sizes)
    share_experts([net], axis)
    optimizer, balance = update(net), LoadBalance([net], 0.003, axis)
    passages = {mixture: mixture.passage for mixture in mixtures_in([net])}
    fullest = 0
    for step in range(settings.counts):
        rows = Rows()
        for mixture, passage in passages.items():
            mixture.passage = rows.counted(passage)
        ids = torch.randint(VOCAB_SIZE, (settings.batch_size, seq))
        optimizer.zero_grad()
        causalLLMLoss(net(ids), ids, VOCAB_SIZE).backward()
        optimizer.step()
        balance.step()
        fullest = max(fullest, rows.computed)
        found = torch.tensor([rows.sent, rows.computed, rows.returned])
        dist.all_reduce(found)
        expected = axis.size * layers * k * ids.numel()
        if found.tolist() != [expected] * 3:
            raise RuntimeError(f"step {step}: {expected} rows, but sent, computed and returned {found.tolist()}")
    most = torch.tensor(fullest)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        each = layers * k * settings.batch_size * seq
        print(f"{settings.counts:,} steps of {axis.size} ranks, {axis.size * each:,} rows each")
        print(f"all were sent, computed and returned; a rank computed at most {int(most):,} instead of {each:,}")
    leave(0)


def time_exchanges(rank: int, settings: Settings) -> None:
    """One rank: exchange the rows of different numbers of sequences, each after some computation."""
    join(rank, settings.ranks, settings.port)
    assert settings.machine is not None
    machine, axes = read_machine(settings.machine), {"ep": settings.ranks}
    layout = RunLayout(axes, 1, 1, "naive", "none", "none", (1,))
    on_hosts = RanksOnHosts(machine.with_room_for(settings.ranks, f"{settings.machine}"), layout)
    matrix = torch.ones(DMODEL, DMODEL)
    works: dict[int, Callable[[Tensor], object]] = {0: lambda _: matrix.mm(matrix)}
    for sequences in (1, 2, 4, 8):
        numbers = sequences * SEQ_LEN * settings.experts_per_token * DMODEL // settings.ranks * settings.ranks
        rows, arrived = torch.zeros(numbers), torch.zeros(numbers)

        def exchange(_: Tensor, rows: Tensor = rows, arrived: Tensor = arrived) -> None:
            matrix.mm(matrix)
            dist.all_to_all_single(arrived, rows)

        works[rows.nbytes] = exchange
    taken = seconds_in_turn(works, partial(tokens, settings), 5 * settings.rounds, warm_up=2, meet=dist.barrier)
    if rank == 0:
        print("| rows of a rank, MB | predicted, ms | measured, ms (median) | ratio |", "|---|---|---|---|", sep="\n")
        for size_bytes in [*works][1:]:
            predicted = on_hosts.all_to_all(on_hosts.sharing_experts, size_bytes).seconds
            measured = median(taken[size_bytes]) - median(taken[0])
            columns = f"{predicted * 1e3:.2f} | {measured * 1e3:.2f} | {measured / predicted:.2f}"
            print(f"| {size_bytes / 1e6:.1f} | {columns} |", flush=True)
    leave(0)


def print_ratios(seconds: dict[str, list[float]], heading: str, to: str) -> None:
    print(f"\n| variant | ms a step (median) | {heading} | quartiles |", "|---|---|---|---|", sep="\n")
    for name, own in seconds.items():
        low, middle, high = quartiles_of_ratios(seconds[to], own)
        print(f"| {name} | {median(own) * 1e3:,.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


def beside_transformers(settings: Settings) -> None:
    """One process with one thread: forward and backward pass beside those of a Mixtral with the same weights."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    set_up_heap()
    net = build(settings)
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    models: dict[str, nn.Module] = {}
    with tempfile.TemporaryDirectory() as folder:
        export(SavedModel(net.options, parameters, SHIPPED_MODEL), Path(folder))
        for way in ("eager", "grouped_mm"):
            kind = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=way)
            models[f"transformers, {way}"] = kind.train()
    optimizers = {name: update(model) for name, model in (models | {"ours": net}).items()}

    def ours(ids: Tensor) -> Tensor:
        return causalLLMLoss(net(ids), ids, VOCAB_SIZE)

    def loss_of(ids: Tensor, model: nn.Module) -> Tensor:
        loss: Tensor = model(ids, labels=ids, use_cache=False).loss
        return loss

    losses: dict[str, Callable[[Tensor], Tensor]] = {"ours": ours}
    for name, model in models.items():
        losses[name] = partial(loss_of, model=model)

    def step(ids: Tensor, name: str) -> float:
        optimizers[name].zero_grad()
        loss = losses[name](ids)
        loss.backward()
        optimizers[name].step()
        return loss.item()

    first = {name: step(tokens(settings, 0), name) for name in losses}
    if max(first.values()) - min(first.values()) > 1e-3:
        raise RuntimeError(f"these do not compute the same loss: {first}")
    steps = {name: partial(step, name=name) for name in losses}
    seconds = seconds_in_turn(steps, partial(tokens, settings), settings.rounds, warm_up=1)
    print(
        "\n| model | ms a step (median) | speed of ours to this one (median) | quartiles |",
        "|---|---|---|---|",
        sep="\n",
    )
    for name, own in seconds.items():
        low, middle, high = quartiles_of_ratios(own, seconds["ours"])
        print(f"| {name} | {median(own) * 1e3:,.0f} | {middle:.2f} | {low:.2f} to {high:.2f} |", flush=True)


def compare_losses(settings: Settings) -> None:
    """Train both kinds of model on the generator's stories."""
    torch.set_num_threads(1)
    set_up_heap()
    print(
        f"| model | parameters, million | multiplied for a token, million | loss, last {settings.losses // 10} steps |",
        "|---|---|---|---|",
        sep="\n",
    )
    for dense in (True, False):
        net = build(settings, dense, n_layers=2)
        optimizer, losses = update(net), list[float]()
        balance = LoadBalance([net], 0.003, Grid(0, {}).axis("ep"))
        stories = TinyStories(SPTokenizer(), batch_size=settings.batch_size, seq_l=SEQ_LEN, data="sample", seed=0)
        for _ in range(settings.losses):
            ids = next(stories)
            optimizer.zero_grad()
            loss = causalLLMLoss(net(ids), ids, VOCAB_SIZE)
            loss.backward()
            optimizer.step()
            balance.step()
            losses.append(loss.item())
        number = sum(parameter.numel() for parameter in net.parameters())
        unused = settings.experts - settings.experts_per_token
        idle = len(mixtures_in([net])) * unused * 3 * DMODEL * settings.hidden_dim
        name = "dense" if dense else f"{settings.experts} experts, {settings.experts_per_token} for a token"
        last = fmean(losses[-settings.losses // 10 :])
        print(f"| {name} | {number / 1e6:.2f} | {(number - idle) / 1e6:.2f} | {last:.3f} |", flush=True)


def main() -> None:
    settings = tyro.cli(Settings, description=__doc__)
    if settings.rounds < 2:
        raise SystemExit(f"--rounds {settings.rounds}: quartiles need at least 2")
    if settings.losses:
        compare_losses(settings)
        return
    if settings.counts or settings.machine:
        mp.spawn(count_rows if settings.counts else time_exchanges, args=(settings,), nprocs=settings.ranks)
        return
    mp.spawn(measure, args=(settings,), nprocs=settings.ranks)
    beside_transformers(settings)


if __name__ == "__main__":
    main()
