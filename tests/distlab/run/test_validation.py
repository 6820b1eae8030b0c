"""The loss of stories that are not trained on is the same number in every layout, and costs the training nothing.

More layouts validate in test_clipping.py and hybrid/test_layouts.py.
"""

import functools
import re
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.chapters import LAYOUTS, STEPS, records, train_on, validation_losses
from torch import Tensor, nn

from distlab.axes.grid import Grid
from distlab.axes.shards import ReplicaShards
from distlab.comm.context import context_of
from distlab.comm.transports.queues import Queues
from distlab.comm.transports.transport import Carried
from distlab.run.model import ModelParts
from distlab.run.validation import Validator, perplexity
from simplellm.dataloaders import TinyStories
from simplellm.llama import CausalLLama, LLama, LLamaFirstStage, LLamaLastStage
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

FLAGS = "--steps 4 --num-heads 2 --n-layers 2 --optimizer sgd --lr 0.5".split()


def validate(layout: str, out: Path, *flags: str) -> list[float]:
    ranks, script, own = LAYOUTS[layout]
    train_on(ranks, script, out, *FLAGS, *own.split(), "--eval-every", "2", "--eval-sequences", "7", *flags)
    assert ["validation_loss" in record for record in records(out)] == [False, True, False, True]
    said = [line for line in (out / "rank0.log").read_text().splitlines() if "perplexity" in line]
    assert said == [
        f"# validation after {steps} steps: loss {loss:.6f}, perplexity {perplexity(loss):,.2f}"
        for steps, loss in zip((2, 4), validation_losses(out), strict=True)
    ]
    return validation_losses(out)


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    return validate("primer", tmp_path_factory.mktemp("one"))


def test_is_the_same_number_where_replicas_share_weights(expected: list[float], tmp_path: Path) -> None:
    """The first has two batches, the others one."""
    assert expected[1] < expected[0]
    assert validate("dp-fsdp", tmp_path) == pytest.approx(expected, rel=1e-6)


def test_in_bfloat16_too(expected: list[float], tmp_path: Path) -> None:
    """On four ranks: `test_in_bfloat16` in test_clipping.py."""
    own = validate("primer", tmp_path, "--dtype", "bfloat16")
    assert own == pytest.approx(expected, rel=1e-2)
    assert own != expected


def test_more_replicas_than_sequences(tmp_path: Path) -> None:
    many, found = "--world-size 3 --batch-size 1", list[list[float]]()
    for ranks, script, flags in (
        (1, "primer/intro.py", "--batch-size 3"),
        (3, "DP/gradient_aggr/intro_DP_GA.py", many),
        (3, "DP/fsdp/intro_DP_FSDP.py", f"{many} --shard gradients"),
    ):
        out = tmp_path / str(len(found))
        train_on(ranks, script, out, *FLAGS, *flags.split(), *"--eval-every 2 --eval-sequences 2".split())
        found.append([record["validation_loss"] for record in records(out)[1::2]])
    assert found[1:] == [pytest.approx(found[0], rel=1e-6)] * 2


def test_is_the_mean_over_other_stories_than_those_trained_on(tmp_path: Path) -> None:
    tokenizer = SPTokenizer()
    net = LLama(CausalLLama, tokenizer.vocab_size, dmodel=32, num_heads=2, n_layers=1)
    of_split = functools.partial(TinyStories, tokenizer, 5, 24, data="sample")
    sequences, trained_on = next(of_split(split="validation")), next(of_split(split="train"))
    assert not torch.equal(sequences, trained_on)
    loss_of = functools.partial(causalLLMLoss, vocab_size=tokenizer.vocab_size)
    own = Validator(ModelParts.of(net, Grid(0, {})), sequences, rows=2).loss(0)
    with torch.no_grad():
        assert own == pytest.approx(loss_of(net(sequences), sequences).item(), rel=1e-6)
    assert all(parameter.grad is None for parameter in net.parameters())
    assert perplexity(0) == 1
    assert perplexity(1e9) > 1e300


class Around(nn.Module):
    """A wrapper of one's own."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net


def test_the_names_of_parameters_are_those_of_the_model_inside_of_wrappers() -> None:
    net = LLama(CausalLLama, 8, dmodel=16, num_heads=2, n_layers=1)
    assert ModelParts.of(Around(Around(net)), Grid(0, {})).parameters() == dict(net.named_parameters())


@pytest.mark.parametrize("shard", ["optimizer", "gradients", "weights"])
def test_a_rank_computes_with_shards_only_of_weights_that_replicas_share_out(shard: str) -> None:
    net, own = LLama(CausalLLama, 8, dmodel=16, num_heads=2, n_layers=1), {"a": nn.Parameter(torch.ones(1))}
    others = dict.fromkeys(ReplicaShards.__abstractmethods__)
    around: Any = type("InShards", (ReplicaShards,), others | {"shard": shard, "own_parameters": lambda _: own})()
    around.net = net
    parts = ModelParts.of(around, Grid(0, {}))
    assert parts.parameters() == own
    assert parts.held() == (own if shard == "weights" else dict(net.named_parameters()))


def test_later_stages_are_told_where_documents_end() -> None:
    ids = torch.randint(8, (2, 24), generator=torch.Generator().manual_seed(0))
    build = functools.partial(LLama, vocab_size=8, dmodel=16, num_heads=2, document_end=0)
    stages = {0: build(LLamaFirstStage, n_layers=1), 1: build(LLamaLastStage, n_layers=1, first_layer=1)}
    own = Validator(ModelParts.of(stages, Grid(0, {}), owners=[0, 0]), ids, rows=2).loss(0)
    with torch.no_grad():
        assert own == pytest.approx(causalLLMLoss(build(CausalLLama, n_layers=2)(ids), ids, 8).item(), rel=1e-6)


def test_a_run_validates_on_stories_that_it_is_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given, start = tmp_path / "sequences.pt", Validator.__init__

    def noted(validator: Validator, parts: ModelParts, sequences: Tensor, rows: int) -> None:
        torch.save((sequences, rows), given)
        start(validator, parts, sequences, rows)

    monkeypatch.setattr(Validator, "__init__", noted)
    flags = "--eval-every 2 --eval-sequences 5 --batch-size 6 --micro-batches 3".split()
    train_on(1, "primer/intro.py", tmp_path / "run", *FLAGS, *flags)
    sequences, rows = torch.load(given)
    stories = TinyStories(SPTokenizer(), 5, sequences.shape[1], data="sample", split="validation")
    assert torch.equal(sequences, next(stories))
    assert rows == 2, "as in a micro-batch, for no more memory than training"


def test_changes_nothing_and_is_counted_apart(tmp_path: Path) -> None:
    """What the layers of a tensor-parallel run send to validate is not taken for training."""
    ranks, script, flags = LAYOUTS["tp"]
    for name, every in (("with", "1"), ("without", "1000")):
        train_on(ranks, script, tmp_path / name, *FLAGS, *flags.split(), "--eval-sequences", "7", "--eval-every", every)
    ours, plain = records(tmp_path / "with"), records(tmp_path / "without")
    assert [record["loss"] for record in ours] == [record["loss"] for record in plain]
    for record, other in zip(ours, plain, strict=True):
        assert record["sent_bytes"].pop("validation") > 0
        assert record["sent_bytes"] == other["sent_bytes"]


@pytest.mark.parametrize(
    ("layout", "messages"),
    [("pp-1f1b", {"0": 2}), ("pp-zbv", {"0": 4, "1": 4})],  # 7 sequences, 6 or 2 at a time; in a V, there and back
)
def test_is_the_same_number_through_shared_memory(
    layout: str,
    messages: dict[str, int],
    expected: list[float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send, sent = Queues.send, tmp_path / "sent"

    def noted(queues: Queues, tensor: Tensor, to: int, tag: int) -> Carried | None:
        carried = send(queues, tensor, to, tag)
        if carried and context_of().counted_as == "validation" and tensor.dim() == 3:  # (batch, seq, dmodel)
            with sent.open("a") as file:
                file.write(f"{dist.get_rank()}\n")
        return carried

    monkeypatch.setattr(Queues, "send", noted)
    assert validate(layout, tmp_path / "run") == pytest.approx(expected, rel=1e-6)
    assert Counter(sent.read_text().splitlines()) == {who: len(expected) * each for who, each in messages.items()}


def test_and_saving_are_no_part_of_a_steps_seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, clock, spent = 1000.0, time.perf_counter, [0.0]

    def evaluate(*_: object) -> float:
        spent[0] += slow
        return 1.0

    def save(run: Path, *_: object) -> None:
        spent[0] += slow
        with (run / "saves").open("a") as file:
            file.write("saved\n")

    monkeypatch.setattr(time, "perf_counter", lambda: clock() + spent[0])
    monkeypatch.setattr(Validator, "loss", evaluate)
    monkeypatch.setattr("distlab.run.checkpointer.save", save)
    train_on(1, "primer/intro.py", tmp_path, "--eval-every", "1", "--save-every", "1")
    assert [record["validation_loss"] for record in records(tmp_path)] == [1.0] * STEPS, "the fake was called"
    assert (tmp_path / "saves").read_text() == "saved\n" * STEPS
    assert all(record["seconds"] < slow for record in records(tmp_path))
    told = re.findall(r"# (\w+) took ([\d.]+) s \(not counted in step times\)", (tmp_path / "rank0.log").read_text())
    of_both = pytest.approx(STEPS * slow, rel=0.01)
    assert {what: float(seconds) for what, seconds in told} == {"validation": of_both, "checkpoints": of_both}
