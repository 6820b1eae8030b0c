"""Tries a training script on several ranks, and compares every step with one process: losses, gradients, weights."""

import functools
import importlib.util
import json
import math
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.comm.grid import Grid
from distlab.comm.traffic import traffic
from distlab.exercises import shares
from distlab.exercises.catalogue import Trial
from distlab.exercises.ranks import Facts, Patience, Report, free_port, run_ranks, trouble
from distlab.exercises.shares import Mistake
from distlab.exercises.verdict import Verdict
from distlab.run.settings import parse
from distlab.run.train_settings import TrainSettings
from distlab.run.training import TrainingRun
from simplellm.dataloaders import TinyStories
from simplellm.errors import InputError, require
from simplellm.llama import CausalLLama, LLama, LLamaPart
from simplellm.losses import causalLLMLoss
from simplellm.tokenizers import SPTokenizer

STEPS, LR = 3, 0.5
MODEL = "--dmodel 16 --num-heads 4 --n-layers 2 --seq-len 16 --device cpu".split()
TRAINING = f"--steps {STEPS} --optimizer sgd --lr {LR} --data sample --timeout 60".split()


def load(script: Path) -> ModuleType:
    """A student's file as a module."""
    sys.path.insert(0, str(script.parent))
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    sys.argv = [str(script)]
    spec.loader.exec_module(module)
    return module


class Recorder:
    """Keeps the weights and the gradients of every step of a run, in the file of its rank."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.updates = 0

    def watch(self, model: nn.Module | Mapping[int, nn.Module], optimizer: Optimizer) -> None:
        """Record before each update of `optimizer`; `model` is what the script gives to `run.track`."""
        parts = model.values() if isinstance(model, Mapping) else [model]
        for part in parts:
            inner = next((module for module in part.modules() if isinstance(module, LLamaPart)), part)
            self.parameters |= dict(inner.named_parameters())
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def before_update(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.tensors[f"gradient|{self.updates}|{name}"] = gradient.detach().clone().contiguous()
        self.keep_weights()
        self.updates += 1

    def keep_weights(self) -> None:
        for name, parameter in self.parameters.items():
            self.tensors[f"weights|{self.updates}|{name}"] = parameter.detach().clone().contiguous()


def train(rank: int, script: Path, folder: Path, flags: list[str], start_apart: bool = False) -> Facts:
    """A rank of a student's script; with `start_apart`, its model has other weights than rank 0's at first."""
    module = load(script)
    if start_apart and rank > 0:
        module.LLama = _with_other_weights  # type: ignore[attr-defined]
    defaults, work = getattr(module, "DEFAULTS", None), getattr(module, "train", None)
    require(isinstance(defaults, TrainSettings) and callable(work), "the file needs DEFAULTS and a function train(run)")
    assert defaults is not None
    assert work is not None
    settings = parse(defaults, "", [str(rank), *MODEL, *TRAINING, *flags])
    run: TrainingRun[Any] = TrainingRun(settings, script)
    recorder, track = Recorder(), run.track

    def track_and_watch(model: Any, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        recorder.watch(model, optimizer)
        track(model, optimizer, *args, **options)

    run.track = track_and_watch  # type: ignore[method-assign]
    work(run)
    run.close()
    require(bool(recorder.parameters), "the script must call run.track(model, optimizer), as its chapter does")
    recorder.keep_weights()
    save_file(recorder.tensors, folder / f"rank{rank}.safetensors")
    specs = {name: p.shard_spec for name, p in recorder.parameters.items() if hasattr(p, "shard_spec")}
    return {"updates": recorder.updates, "sent": dict(traffic.ledger.sent_bytes), "slices": specs}


@torch.no_grad()
def _with_other_weights(*args: Any, **options: Any) -> nn.Module:
    net = LLama(*args, **options)
    for parameter in net.parameters():
        parameter += 0.1 * torch.randn_like(parameter)  # each rank's generator has another seed
    return net


@functools.cache
def expected_of(batch_size: int, replicas: int, micro_batches: int) -> tuple[dict[str, Tensor], Facts]:
    """What `one_process` keeps, and its losses; computed once for all files that are checked."""
    with tempfile.TemporaryDirectory(prefix="lab-check-") as name:
        file, folder = Path(name, "one_process.safetensors"), Path(name)
        sizes = batch_size, replicas, micro_batches
        [report] = run_ranks(1, one_process, file, *sizes, script=Path(__file__), folder=folder, patience=Patience())
        if report.state != "ended":
            raise RuntimeError(f"one process failed: {report.sentence} {report.line}")
        return load_file(file), report.facts


def one_process(rank: int, file: Path, batch_size: int, n: int, m: int) -> Facts:
    """The run of one process with the global batch of `n` replicas of `batch_size` sequences, `m` micro-batches each.

    It keeps its weights and, for each replica and micro-batch, its share of every gradient: the gradients of the mean
    loss over its sequences.
    """
    del rank
    args = parse(TrainSettings(), "", [*MODEL, *TRAINING])
    tokenizer = SPTokenizer(args.tokenizer)
    sizes = {name: getattr(args, name) for name in "dmodel num_heads num_kv_heads hidden_dim n_layers seed".split()}
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, ctx_size=args.seq_len, **sizes)
    data: dict[str, Any] = {"batch_size": batch_size, "seq_l": args.seq_len, "data": "sample", "seed": args.seed}
    stories = [TinyStories(tokenizer, **data, rank=replica, num_replicas=n) for replica in range(n)]
    names, parameters = zip(*net.named_parameters(), strict=True)
    kept: dict[str, Tensor] = {}
    losses: list[float] = []
    for step in range(STEPS):
        total = 0.0
        for name, parameter in zip(names, parameters, strict=True):
            kept[f"weights|{step}|{name}"] = parameter.detach().clone()
            parameter.grad = torch.zeros_like(parameter)
        for replica, batches in enumerate(stories):
            for part, x in enumerate(next(batches).chunk(m)):
                loss = causalLLMLoss(net(x), x, tokenizer.vocab_size)
                total += loss.item() / (n * m)
                gradients = torch.autograd.grad(loss, parameters)
                for name, parameter, gradient in zip(names, parameters, gradients, strict=True):
                    kept[f"share|{step}|{name}|{replica}|{part}"] = gradient
                    parameter.grad += gradient / (n * m)
        losses.append(total)
        with torch.no_grad():
            for parameter in parameters:
                assert parameter.grad is not None
                parameter -= LR * parameter.grad
    for name, parameter in zip(names, parameters, strict=True):
        kept[f"weights|{STEPS}|{name}"] = parameter.detach().clone()
    save_file(kept, file)
    return {"losses": losses, "names": list(names)}


@dataclass(frozen=True)
class Difference:
    """A tensor that differs from that of one process."""

    step: int
    rank: int
    name: str
    mistake: Mistake


def try_layout(
    script: Path, trial: Trial, folder: Path, patience: Patience, weights_only: bool = False, start_apart: bool = False
) -> Verdict:
    """Run a script in a layout and one process beside it, and compare them.

    Args:
        weights_only: ranks have gradients of their own, and average their weights.
        start_apart: ranks have other weights than rank 0 until the script makes them equal.
    """
    folder.mkdir()
    world = 1
    for size in trial.layout.values():
        world *= size
    describe = Grid.of(0, trial.layout).describe
    flags = [*trial.flags.split(), "--batch-size", str(trial.batch_size), "--micro-batches", str(trial.micro_batches)]
    flags += ["--out", str(folder / "run"), "--master-port", str(free_port())]
    reports = run_ranks(
        world, train, script, folder, flags, start_apart, script=script, folder=folder, patience=patience
    )
    verdict = Verdict(f"train: {trial}")
    if found := trouble(reports, describe):
        return verdict.fails(*found, printed=reports)
    records = (folder / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in records]
    compare = Comparison(trial, *expected_of(trial.batch_size, trial.replicas, trial.micro_batches), reports, folder)
    found = compare.first_difference(losses, weights_only, describe)
    if found:
        return verdict.fails(*found, printed=reports)
    verdict.passes(f"the run of one process: losses, {'' if weights_only else 'gradients, '}weights of {STEPS} steps")
    verdict.remarks += compare.remarks()
    return verdict


class Comparison:
    """All ranks' tensors beside those of one process."""

    def __init__(self, trial: Trial, one: dict[str, Tensor], facts: Facts, reports: list[Report], folder: Path) -> None:
        self.trial, self.one, self.facts, self.reports = trial, one, facts, reports
        self.ranks = [load_file(folder / f"rank{report.rank}.safetensors") for report in reports]
        self.member = "rank" if len(reports) == trial.replicas else "pipeline"

    def first_difference(
        self, losses: list[float], weights_only: bool, describe: Callable[[int], str]
    ) -> tuple[str, list[str]] | None:
        """The first step in which something differs: the mistake's name, and what to say about it."""
        n, m = self.trial.replicas, self.trial.micro_batches
        if missing := self._missing(describe):
            return "parameters", [missing]
        for name in self.facts["names"]:
            for rank, tensors in enumerate(self.ranks):
                own = tensors.get(f"weights|0|{name}")
                if own is not None and self._is_wrong_at_start(rank, name, own):
                    told = f"before step 0: the weights {name} on {describe(rank)} are not those of one process"
                    others = f"{told}; all ranks must start from rank 0's"
                    return "not-broadcast" if self.trial.replicas > 1 else "wrong-start", [others if n > 1 else told]
        for step in range(STEPS):
            expected = self.facts["losses"][step]
            if step >= len(losses):
                return "steps", [f"the run ended after {len(losses)} of {STEPS} steps"]
            if abs(losses[step] - expected) > 1e-4 * abs(expected):
                mistake = shares.name_loss(losses[step], expected, n, m)
                told = f"{losses[step]:.6f} instead of {expected:.6f}"
                return mistake.name, [f"the loss of step {step} {mistake.sentence} ({told})"]
            kinds = [] if weights_only else [("gradient", self._gradient_mistake)]
            for kind, name_mistake in [*kinds, ("weights", self._weights_mistake)]:
                if found := self._differences(kind, step, name_mistake):
                    return found[0].mistake.name, self._tell(kind, step, found, describe)
        return None

    def _missing(self, describe: Callable[[int], str]) -> str:
        held = {name.split("|")[2] for tensors in self.ranks for name in tensors}
        lost = [name for name in self.facts["names"] if name not in held]
        if lost:
            return f"no rank holds the parameter {lost[0]}"
        steps = {report.rank: report.facts["updates"] for report in self.reports}
        wrong = [rank for rank, updates in steps.items() if updates != STEPS]
        return f"{describe(wrong[0])} updated its weights {steps[wrong[0]]} times in {STEPS} steps" if wrong else ""

    def _own(self, rank: int, name: str, whole: Tensor) -> Tensor:
        """What a rank should hold of a tensor: the slice that its parameter is, or all."""
        if (spec := self.reports[rank].facts["slices"].get(name)) is None:
            return whole
        dim, start, _ = spec
        return whole.narrow(dim, start, self.ranks[rank][f"weights|0|{name}"].shape[dim])

    def _is_wrong_at_start(self, rank: int, name: str, own: Tensor) -> bool:
        right = self._own(rank, name, self.one[f"weights|0|{name}"])
        return own.shape != right.shape or shares.differs(own, right)

    def _shares(self, rank: int, step: int, name: str) -> list[list[Tensor]]:
        key = f"share|{step}|{name}|{{}}|{{}}".format
        n, m = self.trial.replicas, self.trial.micro_batches
        return [[self._own(rank, name, self.one[key(r, k)]) for k in range(m)] for r in range(n)]

    def _gradient(self, rank: int, step: int, name: str) -> Tensor:
        rows = self._shares(rank, step, name)
        return torch.stack([share for row in rows for share in row]).mean(0)

    def _replica(self, rank: int, key: str) -> int:
        """The number of a rank's replica; -1 if all replicas have the same tensor."""
        replica = Grid.of(rank, self.trial.layout).replica
        own, ranks_each = self.ranks[rank][key], len(self.ranks) // self.trial.replicas
        alike = self.ranks[rank % ranks_each :: ranks_each]  # the ranks that hold the same parameters
        same = all(not shares.differs(tensors.get(key, own), own) for tensors in alike)
        return -1 if same and self.trial.replicas > 1 else replica

    def _differences(
        self, kind: str, step: int, name_mistake: Callable[[int, int, str, Tensor], Mistake]
    ) -> list[Difference]:
        found = []
        for rank, tensors in enumerate(self.ranks):
            at = step if kind == "gradient" else step + 1
            for name in (key.split("|")[2] for key in tensors if key.startswith(f"{kind}|{at}|")):
                own = tensors[f"{kind}|{at}|{name}"]
                right = (
                    self._gradient(rank, step, name)
                    if kind == "gradient"
                    else self._own(rank, name, self.one[f"weights|{at}|{name}"])
                )
                if own.shape != right.shape:
                    mistake = Mistake("shape", f"is {tuple(own.shape)}, and should be {tuple(right.shape)}")
                    found.append(Difference(step, rank, name, mistake))
                elif shares.differs(own, right):
                    found.append(Difference(step, rank, name, name_mistake(rank, step, name, own)))
        order = {name: index for index, name in enumerate(self.facts["names"])}
        if kind == "gradient" and found and (same := self._mistake_of_slices(step, found)):
            found = [replace(difference, mistake=same) for difference in found]
        return sorted(found, key=lambda difference: (difference.rank, order[difference.name]))

    def _gradient_mistake(self, rank: int, step: int, name: str, own: Tensor) -> Mistake:
        before = self._gradient(rank, step - 1, name) if step else None
        replica = self._replica(rank, f"gradient|{step}|{name}")
        return shares.name_gradient(own, self._shares(rank, step, name), before, replica, self.member)

    def _mistake_of_slices(self, step: int, found: list[Difference]) -> Mistake | None:
        """The mistake of a tensor-parallel run, if the gradients show which of f and g is at fault."""
        slices = self.trial.layout.get("tp", 1)
        if slices == 1:
            return None
        for name in self.facts["names"]:
            key = f"gradient|{step}|{name}"
            held_whole = all(name not in report.facts["slices"] for report in self.reports)
            if held_whole and any(shares.differs(tensors[key], self.ranks[0][key]) for tensors in self.ranks[1:]):
                why = f"the ranks have different gradients of {name}, which all hold whole"
                return Mistake("f-missing", f"is wrong: {why}; so what came back from the slices was not added up (f)")
        for mistake in (difference.mistake for difference in found):
            if mistake.factor is not None and math.isclose(mistake.factor, slices, rel_tol=0.02):
                why = f"gradients that {slices} ranks have alike were added up; the gradient of a sum is passed on (g)"
                return Mistake("g-adds-again", f"is wrong: {why}")
        return None

    def _weights_mistake(self, rank: int, step: int, name: str, own: Tensor) -> Mistake:
        before = self._own(rank, name, self.one[f"weights|{step}|{name}"])
        rows = self._shares(rank, step, name)
        replica = self._replica(rank, f"weights|{step + 1}|{name}")
        return shares.name_weights(own, before, rows, LR, replica, self.member)

    def _tell(self, kind: str, step: int, found: list[Difference], describe: Callable[[int], str]) -> list[str]:
        """One sentence for each kind of mistake, the most frequent first; the first tensor of each is named."""
        what = "the gradient of" if kind == "gradient" else "the weights"
        when = f"step {step}" if kind == "gradient" else f"after step {step}"
        by_sentence: dict[str, list[Difference]] = {}
        for difference in found:
            by_sentence.setdefault(difference.mistake.sentence, []).append(difference)
        sentences = []
        for sentence, same in sorted(by_sentence.items(), key=lambda item: -len(item[1]))[:2]:
            first, ranks = same[0], sorted({difference.rank for difference in same})
            names = {difference.name for difference in same}
            held = {key.split("|")[2] for rank in ranks for key in self.ranks[rank]}
            others = f" and {len(names) - 1} other parameter{'s' * (len(names) > 2)}" if len(names) > 1 else ""
            if names == held:
                others = ", like every other parameter," if len(names) > 1 else ""
            on = "on all ranks" if len(ranks) == len(self.ranks) > 1 else f"on {' and '.join(map(describe, ranks))}"
            sentences.append(f"{when}: {what} {first.name}{others} {on} {sentence}")
        right = sorted(set(range(len(self.ranks))) - {difference.rank for difference in found})
        if right:
            sentences.append(f"{' and '.join(map(describe, right))}: right")
        return sentences

    def remarks(self) -> list[str]:
        """What a right solution could do better: bytes of gradients and weights that it sends, beside those needed."""
        n = self.trial.replicas
        if n == 1 or len(self.reports) != n:
            return []
        size = sum(tensor.nbytes for key, tensor in self.one.items() if key.startswith("weights|0|"))
        needed = STEPS * 2 * (n - 1) / n * size
        sent = max(
            sum(count for kind, count in report.facts["sent"].items() if kind not in ("loss", "control", "check"))
            for report in self.reports
        )
        if sent < 1.05 * needed:
            return []
        return [f"each rank sends {sent / needed:.1f} times the bytes that an all-reduce of all gradients needs"]


def check_flags() -> None:
    """Parse the flags once, so that forks need not read the generator's stories again."""
    try:
        parse(TrainSettings(), "", [*MODEL, *TRAINING])
    except InputError as error:
        raise AssertionError(error) from error
