"""The sentiment classifier's whole run: the same whatever shares it, and it learns."""

import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from support.chapters import losses, records
from support.processes import free_port, run_ranks
from support.sentiment_ranks import in_a_fork, load, split_dim
from support.terminals import fork_launcher
from torch import Tensor, nn

from distlab.run.run import Run
from distlab.settings.common import parse
from simplellm.tokenizers import SPTokenizer

SAMPLE = "--samples 64 --layers 2 --dim 16 --heads 4 --epochs 2 --bsz 16 --device cpu".split()
SAYS_ACCURACY = re.compile(r"# epoch \d: validation accuracy 0\.\d+ \((\d+) of \d+ reviews\)")


Trained = tuple[list[float], list[dict[str, Tensor]], list[int]]


def train(out: Path, world_size: int, tp: int, *flags: str, deadline: float = 60) -> Trained:
    """The script's own `train` on several ranks.

    Returns:
        The losses, each rank's gradients of the last step, and how many of the validation reviews are told right after
        each epoch, as the run says; after the last, the trained model was asked once more, with all of them at once.
    """
    port = str(free_port())

    def rank_work(rank: int) -> tuple[dict[str, Tensor], int, float]:
        script = load("tp_tensor_parallel")
        built: list[nn.Module] = []
        build = script.Transformer

        def build_and_keep(*args: Any, **options: Any) -> nn.Module:
            built.append(build(*args, **options))
            return built[-1]

        script.Transformer = build_and_keep
        layout = ["--world-size", str(world_size), "--tp", str(tp), "--master-port", port, "--out", str(out)]
        settings = parse(script.DEFAULTS, "", [str(rank), *SAMPLE, *layout, *flags])
        current: Run[Any] = Run(settings, Path(script.__file__))
        script.train(current)
        (net,) = built
        gradients = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
        reviews = script.Reviews("sample", "validation", settings.samples // 4, SPTokenizer(), settings.seq_len)
        batch = reviews.batch(torch.arange(len(reviews)))
        right = (net.eval()(batch.tokens, batch.is_padding).argmax(-1) == batch.labels).sum().item()
        current.close()
        return gradients, right, torch.rand(()).item()

    ended = run_ranks(world_size, rank_work, deadline=deadline)
    drawn = [number for *_, number in ended]  # where dropout would draw next: alike in a group, not in another replica
    assert drawn == [number for number in dict.fromkeys(drawn) for _ in range(tp)]
    said = [int(right) for right in SAYS_ACCURACY.findall((out / "rank0.log").read_text())]
    assert [right for _, right, _ in ended] == [said[-1]] * world_size
    return losses(out), [gradients for gradients, *_ in ended], said


SGD = "--optimizer sgd --lr 0.1 --bsz 14 --samples 36".split()  # 14 rows and 9 to validate do not divide by 4


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    return {more: train(tmp_path_factory.mktemp("one"), 1, 1, *SGD, *more.split()) for more in ("", "--dropout 0.2")}


@pytest.mark.quick
@pytest.mark.parametrize(("world_size", "tp", "more"), [(2, 2, "--dropout 0.2"), (4, 2, ""), (4, 1, "")])
def test_is_the_run_of_one_process_at_the_same_global_batch(
    world_size: int, tp: int, more: str, alone: dict[str, Trained], tmp_path: Path
) -> None:
    expected_losses, [expected], expected_right = alone[more]
    assert (expected_losses == alone[""][0]) == (not more)
    losses, gradients, right = train(tmp_path, world_size, tp, *SGD, *more.split())
    assert right == expected_right
    assert len(losses) == 2 * (36 // 14)
    assert max(expected_losses) - min(expected_losses) > 1e-3
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    for rank, own in enumerate(gradients):
        for name, whole in expected.items():
            name_of_twin = name.replace("mod.", "")
            dim = split_dim(name_of_twin)
            part = whole if dim is None else whole.chunk(tp, dim)[rank % tp]
            assert whole.abs().max() > 0, name
            torch.testing.assert_close(own[name], part, rtol=1e-4, atol=1e-6, msg=f"{name}: {{}}".format)


def test_learns(tmp_path: Path) -> None:
    """In one process: that ranks compute the same is shown above."""
    flags = "--samples 512 --layers 1 --dim 32 --epochs 4 --bsz 32 --lr 1e-2".split()
    assert train(tmp_path, 1, 1, *flags)[-1][-1] / 128 > 0.85


def test_the_time_of_validation_is_no_steps_and_training_goes_on_as_before(tmp_path: Path) -> None:
    def work() -> tuple[list[float], set[tuple[bool, torch.dtype]], list[bool]]:
        script, clock, spent, drops = load("tp_tensor_parallel"), time.perf_counter, list[float](), list[bool]()
        while_validating = set[tuple[bool, torch.dtype]]()
        time.perf_counter = lambda: clock() + sum(spent)  # only in this fork
        validate = script.validate

        def validate_slowly(run: Run[Any], net: nn.Module, *others: Any) -> None:
            with net.register_forward_hook(lambda _, __, y: while_validating.add((net.training, y.dtype))):
                validate(run, net, *others)
            drops.append(net.training)
            spent.append(1000)

        script.validate = validate_slowly
        flags = [*SAMPLE, *"--world-size 1 --tp 1 --dtype bfloat16 --out".split(), str(tmp_path)]
        flags += ["--master-port", str(free_port())]
        current: Run[Any] = Run(parse(script.DEFAULTS, "", ["0", *flags]), Path(script.__file__))
        script.train(current)
        return [record["seconds"] for record in records(tmp_path)], while_validating, drops

    seconds, while_validating, drops = in_a_fork(work)()
    assert len(seconds) == 8
    assert max(seconds) < 1000
    assert (while_validating, drops) == ({(False, torch.bfloat16)}, [True, True])


def test_launch_prints_losses_and_accuracy(tmp_path: Path) -> None:
    flags = [*SAMPLE, "--world-size", "4", "--tp", "2", "--dropout", "0.1", "--dtype", "bfloat16"]
    ended = fork_launcher("sentiment", *flags, "--out", tmp_path).finish()
    assert ended.status == 0, ended.err
    steps = [line.split() for line in ended.out.splitlines() if not line.startswith("#")]
    assert [int(step) for step, _ in steps] == list(range(8))
    accuracies = re.findall(r"# epoch (\d): validation accuracy (\d\.\d+) \((\d+) of 16 reviews\)", ended.out)
    assert [(epoch, share) for epoch, share, _ in accuracies] == [
        (str(epoch), f"{int(right) / 16:.4f}") for epoch, (_, _, right) in enumerate(accuracies, start=1)
    ]
    assert len(accuracies) == 2
    sent = records(tmp_path)[0]["sent_bytes"]
    assert {"tp activations", "tp gradients", "gradients"} <= sent.keys()
