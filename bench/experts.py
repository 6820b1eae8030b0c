"""Experts: shared by ranks beside one process with all cores; beside transformers; and their loss beside a dense model.

    python bench/experts.py                   speed and bytes
    python bench/experts.py --losses 400      losses over 400 steps, at equal work for each token
    python bench/experts.py --machine FILE    the time of an exchange of rows, beside the planner's prediction

In the first comparison all ranks together have the tokens of one process, and the model is the same. The second is one
process beside a Mixtral of transformers with the same weights, whose experts are computed in a loop ("eager") or in one
grouped product.
"""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
import torch.distributed as dist
from ranks import on_rank_0, run_ranks
from tables import milliseconds, print_head, print_row
from torch import Tensor, nn
from torch.optim import Adam
from training import VOCAB_SIZE, Step, loss_of, tokens, training_step
from turns import quartiles_of_ratios, require_quartiles, seconds_in_turn

from distlab.axes.grid import Grid, all_ranks
from distlab.comm.context import context_of
from distlab.comm.group import empty
from distlab.machine.heap import set_up_heap
from distlab.parallel.expert_parallel import LoadBalance, own_experts, share_experts
from distlab.parallel.flat import views_of
from distlab_planner.communication_seconds import RanksOnHosts
from distlab_planner.layouts import RunLayout
from distlab_planner.machine import Machine, read_machine
from simplellm import command_line
from simplellm.dataloaders import TinyStories
from simplellm.experts import mixtures_in
from simplellm.export import export
from simplellm.llama import CausalLLama, LLama
from simplellm.saved_model import SavedModel
from simplellm.tokenizers import SHIPPED_MODEL, SPTokenizer

DMODEL, SEQ_LEN = 288, 256
ALONE = "one process"


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
    """sequences of 256 tokens, of all ranks together"""
    rounds: int = 8
    """measured steps of each variant"""
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


def alone(settings: Settings) -> Step:
    """The step of one process."""
    net = build(settings)
    return training_step(loss_of(net), update(net))


def shared(settings: Settings) -> Step:
    """A step of all ranks: each has its sequences, and the weights that are no experts' are averaged."""
    axis = all_ranks("ep")
    net = build(settings, own_experts=own_experts(settings.experts, axis))
    share_experts([net], axis)
    optimizer = update(net)
    dense = [parameter for name, parameter in net.named_parameters() if "experts" not in name and "bias" not in name]
    flat = empty(sum(parameter.numel() for parameter in dense), dense[0].detach())
    views = views_of(flat, dense)

    def loss(ids: Tensor) -> Tensor:
        flat.zero_()
        for parameter, view in zip(dense, views, strict=True):
            parameter.grad = view
        return loss_of(net)(ids.chunk(axis.size)[axis.rank])

    return training_step(loss, optimizer, lambda: dist.all_reduce(flat, dist.ReduceOp.AVG))


def batches(settings: Settings) -> Callable[[int], Tensor]:
    return partial(tokens, batch_size=settings.batch_size, seq_len=SEQ_LEN)


def measure(settings: Settings) -> None:
    """One rank: both variants in turn, and the bytes of rows; rank 0 prints the tables."""
    steps = {ALONE: on_rank_0(alone(settings)), f"ep {settings.ranks}": shared(settings)}
    seconds = seconds_in_turn(steps, batches(settings), settings.rounds, warm_up=1, meet=dist.barrier)
    sent = torch.tensor(context_of().ledger.sent_bytes["rows of experts"] / (1 + settings.rounds))
    dist.all_reduce(sent, dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        print()
        print_head("variant", "ms a step (median)", f"speed to {ALONE} (median)", "quartiles")
        for name, taken in seconds.items():
            print_row(name, milliseconds(taken), *quartiles_of_ratios(seconds[ALONE], taken).cells(2))
        n, k = settings.ranks, settings.experts_per_token
        own = settings.batch_size * SEQ_LEN // n
        expected = 4 * 6 * own * k * DMODEL * 4 * (n - 1) / n
        print()
        print_head("ranks", "bytes of rows, MB a step and rank", "formula, equal loads, MB", "ratio")
        print_row(n, f"{float(sent) / 1e6:.2f}", f"{expected / 1e6:.2f}", f"{float(sent) / expected:.3f}")


def time_exchanges(settings: Settings, machine: Machine) -> None:
    """One rank: exchange the rows of different numbers of sequences, each after some computation."""
    layout = RunLayout({"ep": settings.ranks}, 1, 1, "naive", "none", "none", (1,))
    on_hosts = RanksOnHosts(machine, layout)
    matrix = torch.ones(DMODEL, DMODEL)
    works: dict[int, Callable[[Tensor], object]] = {0: lambda _: matrix.mm(matrix)}
    for sequences in (1, 2, 4, 8):
        numbers = sequences * SEQ_LEN * settings.experts_per_token * DMODEL // settings.ranks * settings.ranks
        rows, arrived = torch.zeros(numbers), torch.zeros(numbers)

        def exchange(_: Tensor, rows: Tensor = rows, arrived: Tensor = arrived) -> None:
            matrix.mm(matrix)
            dist.all_to_all_single(arrived, rows)

        works[rows.nbytes] = exchange
    taken = seconds_in_turn(works, batches(settings), 5 * settings.rounds, warm_up=2, meet=dist.barrier)
    if dist.get_rank() == 0:
        print_head("rows of a rank, MB", "predicted, ms", "measured, ms (median)", "ratio")
        for size_bytes in [*works][1:]:
            predicted = on_hosts.all_to_all(("ep",), size_bytes).seconds
            measured = median(taken[size_bytes]) - median(taken[0])
            times = f"{predicted * 1e3:.2f}", f"{measured * 1e3:.2f}"
            print_row(f"{size_bytes / 1e6:.1f}", *times, f"{measured / predicted:.2f}")


def beside_transformers(settings: Settings) -> None:
    """One process with one thread: forward and backward pass beside those of a Mixtral with the same weights."""
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)
    set_up_heap()
    net = build(settings)
    parameters = {name: parameter.detach() for name, parameter in net.named_parameters()}
    steps = {"ours": training_step(loss_of(net), update(net))}
    with tempfile.TemporaryDirectory() as folder:
        export(SavedModel(net.options, parameters, SHIPPED_MODEL), Path(folder))
        for way in ("eager", "grouped_mm"):
            model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation=way).train()
            steps[f"transformers, {way}"] = training_step(partial(loss_of_transformers, model), update(model))
    first = {name: step(batches(settings)(0)).item() for name, step in steps.items()}
    if max(first.values()) - min(first.values()) > 1e-3:
        raise RuntimeError(f"these do not compute the same loss: {first}")
    seconds = seconds_in_turn(steps, batches(settings), settings.rounds, warm_up=1)
    print()
    print_head("model", "ms a step (median)", "speed of ours to this one (median)", "quartiles")
    for name, own in seconds.items():
        print_row(name, milliseconds(own), *quartiles_of_ratios(own, seconds["ours"]).cells(2))


def loss_of_transformers(model: nn.Module, ids: Tensor) -> Tensor:
    loss: Tensor = model(ids, labels=ids, use_cache=False).loss
    return loss


def compare_losses(settings: Settings) -> None:
    """Train both kinds of model on the generator's stories."""
    torch.set_num_threads(1)
    set_up_heap()
    last_steps = settings.losses // 10
    print_head("model", "parameters, million", "multiplied for a token, million", f"loss, last {last_steps} steps")
    for dense in (True, False):
        net = build(settings, dense, n_layers=2)
        train, losses = training_step(loss_of(net), update(net)), list[float]()
        balance = LoadBalance([net], 0.003, Grid(0, {}).axis("ep"))
        stories = TinyStories(SPTokenizer(), batch_size=settings.batch_size, seq_l=SEQ_LEN, data="sample", seed=0)
        for _ in range(settings.losses):
            losses.append(train(next(stories)).item())
            balance.step()
        number = sum(parameter.numel() for parameter in net.parameters())
        unused = settings.experts - settings.experts_per_token
        idle = len(mixtures_in([net])) * unused * 3 * DMODEL * settings.hidden_dim
        name = "dense" if dense else f"{settings.experts} experts, {settings.experts_per_token} for a token"
        millions = (f"{count / 1e6:.2f}" for count in (number, number - idle))
        print_row(name, *millions, f"{fmean(losses[-last_steps:]):.3f}")


def main(settings: Settings) -> None:
    require_quartiles("--rounds", settings.rounds)
    if settings.losses:
        compare_losses(settings)
    elif settings.machine:
        machine = read_machine(settings.machine).with_room_for(settings.ranks, f"{settings.machine}")
        run_ranks(time_exchanges, settings.ranks, settings.port, settings, machine)
    else:
        run_ranks(measure, settings.ranks, settings.port, settings)
        beside_transformers(settings)


if __name__ == "__main__":
    command_line.run(main, Settings, __doc__)
