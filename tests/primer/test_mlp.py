"""The MLP exercises: in one process, with torch's wrapper, with ours."""

import contextlib
import functools
import io
import re
import sys
import time
from collections.abc import Callable, Iterable
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from support.chapters import load, records
from support.processes import LAB, free_port, run, run_ranks
from support.terminals import fork_python, terminals
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.data import TensorDataset

from distlab.run.run import Run
from distlab.settings.common import parse
from simplellm.samplers import BatchSampler

sys.path.append(str(LAB))
from primer.mlp import EVALUATED_BATCHES, MLP, ModelConfig, evaluate, gen_dataset, report

LINE = re.compile(r"step (\d+) \| train_loss (\d+\.\d{4}) \| test_loss (\d+\.\d{4}) \| step time \d+\.\d\dms")
SMALL = "--n-layers 2 --d-in 16 --n-classes 4 --d-hidden 8 --train-size 500 --niters 101".split()


def reports(out: str) -> list[tuple[str, float, float]]:
    """Step, train loss and test loss of each line."""
    lines = [line for line in out.splitlines() if not line.startswith("#")]
    matches = [LINE.fullmatch(line) for line in lines]
    assert all(matches), lines
    return [(match[1], float(match[2]), float(match[3])) for match in matches if match]


def test_learns_and_prints_the_exercises_line(tmp_path: Path) -> None:
    ended = fork_python("primer/mlp.py", "--niters", "301", "--out", tmp_path).finish()
    assert ended.status == 0, ended.err
    steps = reports(ended.out)
    assert [step for step, _, _ in steps] == ["0", "100", "200", "300"]
    assert steps[0][1] > 2
    assert steps[-1][1] < 0.3
    assert steps[-1][2] < 0.4
    assert all(train != test for _, train, test in steps), "the test loss is that of other data"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Any]:
    """The reports of one process, by the size of its batch."""
    folder = tmp_path_factory.mktemp("alone")

    @functools.cache
    def run_of(batch_size: int) -> Any:
        flags = [*SMALL, "--batch-size", str(batch_size), "--out", folder / str(batch_size)]
        return reports(fork_python("primer/mlp.py", *flags).finish().out)

    return run_of


@pytest.mark.parametrize("script", ["DP/ddp/mlp_ddp.py", "DP/mydp/mlp_mydp.py"])
@pytest.mark.parametrize("world_size", [1, 3])
def test_is_the_run_of_one_process_at_the_same_global_batch(
    script: str, world_size: int, alone: Callable[[int], Any], tmp_path: Path
) -> None:
    flags = [*SMALL, "--batch-size", "7", "--world-size", str(world_size)]
    with terminals(script, world_size, tmp_path, *flags) as ranks:
        ended = [rank.finish(60) for rank in ranks]
    assert [end.status for end in ended] == [0] * world_size, [end.err for end in ended]
    steps = records(tmp_path / "run")
    assert [step["inputs"] for step in steps] == [7 * world_size * (number + 1) for number in range(101)]
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.3
    assert all(step["sent_bytes"].get("gradients", 0) > 0 for step in steps) == (world_size > 1)
    assert "inputs/s" in ended[0].out
    assert "rank 0 computed for" in ended[0].out
    own = reports(ended[0].out)
    assert own[-1][1] < own[0][1] - 0.3
    for (step, *losses), (expected_step, *expected) in zip(own, alone(7 * world_size), strict=True):
        assert step == expected_step
        assert losses == pytest.approx(expected, abs=2e-4)


SCRIPTS = ["primer/mlp.py", "DP/ddp/mlp_ddp.py", "DP/mydp/mlp_mydp.py"]


def loaded(script: str, flags: list[str]) -> tuple[ModuleType, Run[Any]]:
    """A script as a module, and its run of one rank."""
    module, ports = load(script), ["--world-size", "1", "--master-port", str(free_port())] if "DP" in script else []
    return module, Run(parse(module.DEFAULTS, "", ["0", *SMALL, *flags, *ports]), LAB / script)


def with_late_losses(_: int, script: str, flags: list[str]) -> str:
    """What a script prints where each loss takes 50 ms to arrive, as that of a step which is queued on a GPU does."""
    module, run = loaded(script, flags)
    global_loss = run.global_loss

    def late(step: int, losses: Iterable[Tensor]) -> float:
        time.sleep(0.05)
        return global_loss(step, losses)

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as out:
        patch.setattr(run, "global_loss", late)
        module.train(run)
    return out.getvalue()


@pytest.mark.parametrize("script", SCRIPTS)
def test_a_step_lasts_until_its_loss_is_there(script: str, tmp_path: Path) -> None:
    [out] = run_ranks(1, with_late_losses, script, ["--niters", "3", "--out", str(tmp_path)])
    assert [step for step, _, _ in reports(out)] == ["0"]
    assert 50 <= float(re.findall(r"step time (.+)ms", out)[0]) < 1000


def last_batch(_: int, script: str, flags: list[str]) -> tuple[Tensor, Tensor]:
    """The points and labels of a script's last step."""
    module, run = loaded(script, flags)
    batches: list[tuple[Tensor, Tensor]] = []

    def keep(model: torch.nn.Module, given: tuple[Tensor, Tensor]) -> None:
        if isinstance(model, module.MLP) and torch.is_grad_enabled():
            batches.append(given)

    hook = register_module_forward_pre_hook(keep)
    module.train(run)
    hook.remove()
    return batches[-1]


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize("seed", [0, 5])
def test_the_seed_is_that_of_the_points_and_of_their_order(script: str, seed: int, tmp_path: Path) -> None:
    flags = ["--niters", "2", "--seed", str(seed), "--out", str(tmp_path)]
    [(points, labels)] = run_ranks(1, last_batch, script, flags)
    train_set, _ = gen_dataset(ModelConfig(d_in=16, n_classes=4, train_size=500), seed)
    _, rows = islice(BatchSampler(500, 64, seed), 2)
    assert torch.equal(labels, train_set[rows][1])
    assert torch.allclose(points, train_set[rows][0], atol=1e-5)  # products of matrices, with as many threads or not


def test_logits_and_loss() -> None:
    config = ModelConfig(n_layers=3, d_in=5, n_classes=4, d_hidden=6)
    model = MLP(config)
    assert [tuple(p.shape) for p in model.parameters()] == [(6, 5), (6, 6), (4, 6)]
    data, targets = torch.randn(8, 5), torch.arange(8) % 4
    logits, loss = model(data)
    assert logits.shape == (8, 4)
    assert loss is None
    logits, loss = model(data, targets)
    a, b, c = model.parameters()
    assert torch.allclose(logits, torch.tanh(torch.tanh(data @ a.T) @ b.T) @ c.T, atol=1e-6)
    assert loss.item() == pytest.approx(-logits.log_softmax(-1)[range(8), targets].mean().item())


def test_a_report_takes_a_few_batches_of_each_set(capsys: pytest.CaptureFixture[str]) -> None:
    config = ModelConfig(n_layers=1, d_in=5, n_classes=3, train_size=10_000)
    sets, model = gen_dataset(config), MLP(config)
    report(0, model, *sets, 0.1)
    [(_, *shown)] = reports(capsys.readouterr().out)
    firsts = [TensorDataset(*whole[: 50 * EVALUATED_BATCHES]) for whole in sets]
    assert shown == pytest.approx([evaluate(model, first) for first in firsts], abs=1e-4)


def test_evaluate_weighs_every_sample_alike() -> None:
    train_set, test_set = gen_dataset(ModelConfig(d_in=5, n_classes=3, train_size=103))
    assert len(test_set) == 20
    model = MLP(ModelConfig(n_layers=1, d_in=5, n_classes=3))
    points, labels = train_set.tensors
    assert evaluate(model, train_set, batch_size=50) == pytest.approx(model(points, labels)[1].item(), rel=1e-5)
    first_two = model(points[:20], labels[:20])[1].item()
    assert evaluate(model, train_set, batch_size=10, max_batches=2) == pytest.approx(first_two, rel=1e-5)


def test_a_run_says_that_its_reader_has_exited() -> None:
    command = f"{sys.executable} {LAB / 'primer/mlp.py'} --niters 2"
    ended = run("bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}", PYTHONPATH=str(LAB / "src"))
    assert (ended.status, ended.err) == (141, "# the reader of the output has exited\n")
