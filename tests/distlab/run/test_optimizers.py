"""The optimizers are torch's; a run's optimizer, data and pipeline have the options that its flags give."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.chapters import assert_equal, train_on
from torch import nn
from torch.optim import lr_scheduler

from distlab.run.model import OPTIMIZERS, build_optimizer
from distlab.run.training import TrainingRun
from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab.settings.training import LRSchedule, TrainSettings, learning_rate
from simplellm.tokenizers import SPTokenizer

pytestmark = pytest.mark.quick


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_updates_as_torchs_own(name: str) -> None:
    ours, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(ours.state_dict())
    initial = ours.weight.detach().clone()
    not_decayed: Any = [{"params": [torchs.weight]}, {"params": [torchs.bias], "weight_decay": 0.0}]
    optimizers = [build_optimizer(name, ours.parameters(), 0.1), OPTIMIZERS[name](not_decayed, lr=0.1)]  # type: ignore[call-arg]
    for step in range(3):
        for model, optimizer in zip((ours, torchs), optimizers, strict=True):
            optimizer.zero_grad()
            model(torch.arange(5.0) + step).square().sum().backward()
            optimizer.step()
    assert not torch.allclose(ours.weight, initial)
    torch.testing.assert_close(ours.weight, torchs.weight)
    torch.testing.assert_close(ours.bias, torchs.bias)


@pytest.mark.parametrize(
    ("name", "options"), [("adam", {"betas": (0.8, 0.9)}), ("adamw", {"betas": (0.8, 0.9)}), ("sgd", {})]
)
def test_weight_decay_shrinks_matrices_only(name: str, options: dict[str, Any]) -> None:
    ours, torchs = nn.Linear(5, 3), nn.Linear(5, 3)
    torchs.load_state_dict(ours.state_dict())
    decayed: Any = [{"params": [torchs.weight], "weight_decay": 0.5}, {"params": [torchs.bias]}]
    optimizers = [
        build_optimizer(name, ours.parameters(), 0.1, weight_decay=0.5, **options),
        OPTIMIZERS[name](decayed, lr=0.1, **{"weight_decay": 0.0, **options}),  # type: ignore[call-arg]
    ]
    without = build_optimizer(name, (alone := nn.Linear(5, 3)).parameters(), 0.1, weight_decay=0.0, **options)
    alone.load_state_dict(ours.state_dict())
    assert {group["weight_decay"] for group in without.param_groups} == {0}, "and not torch's default"
    for step in range(3):
        for model, optimizer in zip((ours, torchs, alone), (*optimizers, without), strict=True):
            optimizer.zero_grad()
            model(torch.arange(5.0) + step).sum().backward()  # the gradients are the same whatever the weights
            optimizer.step()
    torch.testing.assert_close(ours.weight, torchs.weight)
    torch.testing.assert_close(ours.bias, torchs.bias)
    assert torch.equal(ours.bias, alone.bias)
    assert (ours.weight - alone.weight).abs().max() > 1e-3


def test_the_data_and_the_pipeline_of_a_run_are_those_of_its_flags() -> None:
    flags = "0 --seed 7 --batch-size 6 --seq-len 24 --dmodel 32 --num-heads 2 --dtype bfloat16 --run-on".split()
    settings = parse(HybridSettings(data="sample"), "", flags)
    decided = {"data": "tinystories", "data_revision": "abc"}
    run: Any = SimpleNamespace(settings=settings, decided=decided, dtype=torch.bfloat16, shared_cores=5)
    of_data = {"batch_size": 6, "seq_l": 24, "data": "tinystories", "seed": 7, "revision": "abc"}
    assert TrainingRun.data_options(run) == of_data
    costs = settings.pass_costs(SPTokenizer().vocab_size)
    of_pipeline = {"width": 32, "run_on": True, "dtype": torch.bfloat16, "cores": 5, "costs": costs}
    assert TrainingRun.pipeline_options(run) == of_pipeline


def test_the_optimizer_of_a_run_is_that_of_its_flags() -> None:
    run: Any = SimpleNamespace(settings=TrainSettings(optimizer="adamw", lr=0.3, betas=(0.5, 0.6), weight_decay=0.25))
    groups = TrainingRun.optimizer(run, nn.Linear(5, 3)).param_groups
    assert [(group["lr"], group["betas"], group["weight_decay"]) for group in groups] == [
        (0.3, (0.5, 0.6), 0.0), (0.3, (0.5, 0.6), 0.25)
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("schedule", "warmup"), [("constant", 5), ("cosine", 5), ("cosine", 0), ("linear", 5), ("linear", 0)]
)
def test_the_learning_rate_is_that_of_torchs_schedulers(schedule: LRSchedule, warmup: int) -> None:
    steps, lr, min_lr = 20, 0.3, 0.02
    optimizer = OPTIMIZERS["sgd"](nn.Linear(1, 1).parameters(), lr=lr)  # type: ignore[call-arg]
    falling: dict[str, lr_scheduler.LRScheduler] = {
        "constant": lr_scheduler.ConstantLR(optimizer, factor=1),
        "cosine": lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps - warmup, eta_min=min_lr),
        "linear": lr_scheduler.LinearLR(optimizer, 1, end_factor=min_lr / lr, total_iters=steps - warmup),
    }
    scheduler = falling[schedule]
    if warmup:
        rising = lr_scheduler.LinearLR(optimizer, start_factor=1 / warmup, total_iters=warmup - 1)
        scheduler = lr_scheduler.SequentialLR(optimizer, [rising, scheduler], milestones=[warmup])
    expected = []
    for _ in range(steps):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    own = [learning_rate(step, steps, lr, warmup, schedule, min_lr) for step in range(steps)]
    assert own == pytest.approx(expected, rel=1e-9)
    assert max(own) == lr
    assert learning_rate(steps, steps, lr, warmup, schedule, min_lr) == pytest.approx(
        lr if schedule == "constant" else min_lr
    )


def test_a_warm_up_as_long_as_the_run() -> None:
    assert [learning_rate(step, 4, 1.0, 4, "cosine") for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_what_decays_follows_the_schedule_too(tmp_path: Path) -> None:
    """A weight decay of almost nothing puts the matrices into a group of parameters of their own."""
    flags = "--batch-size 2 --warmup-steps 2 --lr-schedule linear --min-lr 0.1".split()
    decays = ("0", "1e-12")
    runs = [train_on(1, "primer/intro.py", tmp_path / d, *flags, "--weight-decay", d) for d in decays]
    ([one_group], _, losses), ([two_groups], _, same) = runs
    assert same == pytest.approx(losses, rel=1e-6)
    assert_equal(two_groups, one_group)
    log = (tmp_path / "0" / "rank0.log").read_text().splitlines()
    [told] = [line for line in log if line.startswith("#") and "learning rate" in line]
    rises, falls = re.split(r"\bfalls\b", told)
    assert [rises.count("rises"), *re.findall(r"[\d.]*\d", rises)] == [1, "0.5", "2"], "to --lr, over --warmup-steps"
    assert re.findall(r"[\d.]*\d", falls) == ["0.5", "0.1", "3"], "from --lr to --min-lr, until --steps"
    assert " line," in falls, "and not half a cosine"


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_weights_that_are_columns_of_a_matrix_are_trained_and_the_other_columns_left_alone(name: str) -> None:
    matrix = torch.arange(60.0).view(6, 10)
    columns, copied = nn.Parameter(matrix[:, 2:6]), nn.Parameter(matrix[:, 2:6].clone())
    for weight in (columns, copied):
        optimizer = build_optimizer(name, [nn.Parameter(torch.ones(2)), weight], 0.1)
        for _ in range(3):
            optimizer.zero_grad()
            weight.square().sum().backward()
            optimizer.step()
    torch.testing.assert_close(columns, copied)
    assert (copied[0, 0] != 2).all()
    matrix[:, 2:6] = torch.arange(60.0).view(6, 10)[:, 2:6]
    assert torch.equal(matrix, torch.arange(60.0).view(6, 10))
