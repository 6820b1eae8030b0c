"""Every data-parallel chapter gives the training run of one process: losses, gradients, parameters, under plain SGD."""

import functools
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import LAB, free_port, run_ranks
from torch import Tensor, nn

from distlab.runtime import TrainingRun
from distlab.settings import parse
from simplellm.llama import CausalLLama, LLama
from simplellm.tokenizers import SPTokenizer

STEPS = 4
MODEL = "--dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --device cpu".split()
TRAINING = "--optimizer sgd --lr 0.5 --data sample".split()
GRADIENT_AGGREGATION = "DP/gradient_aggr/intro_DP_GA.py"
WEIGHT_AGGREGATION = "DP/weight_aggr/intro_DP_WA.py"
SCRIPTS = [GRADIENT_AGGREGATION, WEIGHT_AGGREGATION, "DP/ddp/intro_DP_DDP.py", "DP/mydp/intro_DP_MyDP.py"]

State = dict[str, Tensor]
OneProcess = Callable[[int], tuple[State, State, list[float]]]


def train(rank: int, script: str, flags: list[str]) -> tuple[State, State]:
    """Run a chapter's own `train` in this process.

    Returns:
        Its parameters, and its gradients of the last step.
    """
    path = LAB / script
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    built: list[nn.Module] = []

    def build_and_keep(*args: Any, **options: Any) -> nn.Module:
        built.append(LLama(*args, **options))
        return built[-1]

    module.LLama = build_and_keep
    settings = parse(module.DEFAULTS, "", [str(rank), *MODEL, *TRAINING, *flags])
    run: TrainingRun[Any] = TrainingRun(settings, path)
    module.train(run)
    run.close()
    (net,) = built
    gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    return {name: p.detach().clone() for name, p in net.named_parameters()}, gradients


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> OneProcess:
    """The run of `primer/intro.py` that the others have to equal, by the size of its batch."""

    @functools.cache
    def train_alone(batch_size: int) -> tuple[State, State, list[float]]:
        out = tmp_path_factory.mktemp("one")
        flags = ["--steps", str(STEPS), "--batch-size", str(batch_size), "--out", str(out)]
        [(parameters, gradients)] = run_ranks(1, train, "primer/intro.py", flags)
        for name, weight in initial_weights().items():
            assert (parameters[name] - weight).abs().max() > 1e-4, f"{name} was trained"
        return parameters, gradients, losses(out)

    return train_alone


def initial_weights() -> State:
    net = LLama(CausalLLama, SPTokenizer().vocab_size, dmodel=32, num_heads=2, n_layers=2, ctx_size=24, seed=0)
    return {name: weight.detach() for name, weight in net.named_parameters()}


def many_processes(
    script: str, out: Path, world_size: int, *flags: str
) -> tuple[list[State], list[State], list[float]]:
    arguments = ["--steps", str(STEPS), "--world-size", str(world_size), "--out", str(out), *flags]
    ended = run_ranks(world_size, train, script, [*arguments, "--master-port", str(free_port())])
    return [parameters for parameters, _ in ended], [gradients for _, gradients in ended], losses(out)


def assert_equal(own: State, expected: State) -> None:
    assert own.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(own[name], tensor, rtol=0, atol=1e-6, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("script", SCRIPTS)
def test_is_the_run_of_one_process(script: str, world_size: int, one_process: OneProcess, tmp_path: Path) -> None:
    batch_size = 2
    expected_parameters, expected_gradients, expected_losses = one_process(world_size * batch_size)
    parameters, gradients, own_losses = many_processes(script, tmp_path, world_size, "--batch-size", str(batch_size))

    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    for rank in range(world_size):
        assert_equal(parameters[rank], expected_parameters)
    if script == WEIGHT_AGGREGATION:  # each rank's gradient is its own; their mean is the one process's
        mean = {name: torch.stack([g[name] for g in gradients]).mean(0) for name in expected_gradients}
        assert_equal(mean, expected_gradients)
    else:
        for rank in range(world_size):
            assert_equal(gradients[rank], expected_gradients)


@pytest.mark.parametrize("script", SCRIPTS)
def test_micro_batches_change_nothing(script: str, one_process: OneProcess, tmp_path: Path) -> None:
    expected_parameters, _, expected_losses = one_process(6)
    parameters, _, own_losses = many_processes(
        script, tmp_path / "many", 2, "--batch-size", "3", "--micro-batches", "3"
    )
    assert own_losses == pytest.approx(expected_losses, rel=1e-6)
    assert_equal(parameters[0], expected_parameters)
    assert_equal(parameters[1], expected_parameters)


def test_weights_that_are_averaged_rarely_drift_and_meet_again(tmp_path: Path) -> None:
    every_step, _, _ = many_processes(WEIGHT_AGGREGATION, tmp_path / "h1", 3, "--sync-every", "1")
    rarely, _, _ = many_processes(WEIGHT_AGGREGATION, tmp_path / "h3", 3, "--sync-every", "3")
    for name, weight in rarely[0].items():
        for other in rarely[1:]:
            assert torch.equal(other[name], weight), f"{name}: the last average leaves all ranks with the same weights"
    assert any(not torch.allclose(every_step[0][name], weight, atol=1e-5) for name, weight in rarely[0].items())
    records = [json.loads(line) for line in (tmp_path / "h3" / "metrics.jsonl").read_text().splitlines()]
    synced = [record["step"] for record in records if record["sent_bytes"].get("weights")]
    assert synced == [2, STEPS - 1], "after every third step, and at the end"
