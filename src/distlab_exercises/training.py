"""Tries a training script on several ranks, and one process beside it."""

import functools
import json
import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.axes.grid import Grid
from distlab.axes.placement import placement_of
from distlab.comm.context import context_of
from distlab.comm.pending import Pending
from distlab.machine.torch_patches import running_backward_pass
from distlab.parallel.sharded import ShardedDP
from distlab.run.training import TrainingRun
from distlab.settings.experts import ExpertSettings
from distlab.settings.training import TrainSettings
from distlab_exercises.catalogue import USUAL, Exercise, OneProcess, Trial
from distlab_exercises.comparison import Comparison
from distlab_exercises.loading import load, settings_for
from distlab_exercises.ranks import Facts, Report, Submission, raise_trouble
from distlab_exercises.verdict import Verdict, Wrong, expect
from simplellm.dataloaders import TinyStories
from simplellm.documents import document_ids
from simplellm.errors import require
from simplellm.llama import CausalLLama, LLama, LLamaPart
from simplellm.losses import next_token_loss
from simplellm.tokenizers import SPTokenizer

STEPS, LR = 3, 0.5
ONE_PROCESS = "one_process.safetensors"
MODEL = {"dmodel": 16, "num_heads": 4, "n_layers": 2, "seq_len": 16, "device": "cpu"}
TRAINING = {"steps": STEPS, "optimizer": "sgd", "lr": LR, "data": "sample", "timeout": 60}


class TensorKeeper:
    """Keeps the weights and the gradients of every step of a run, in the file of its rank."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, nn.Parameter] = {}
        self.wrapped: list[nn.Module] = []
        self.updates, self.updated = 0, 0  # number of updates, and of updated weights
        self.sent: list[dict[str, int]] = []  # bytes by kind, in all steps before each update
        self.collectives: list[Pending] = []
        self.messages: list[Pending] = []  # sent in this step
        self.overlaps = False  # whether it starts to average gradients before a backward pass has ended
        self.tokens: list[list[list[int]]] = []  # the batch of each step

    def observe(self, pending: Pending) -> None:
        """Keep a message that starts, to find out later whether it was waited for."""
        if pending.name.way == "collective":
            self.overlaps |= running_backward_pass() is not None
            self.collectives.append(pending)
        elif pending.name.way == "send":
            self.messages.append(pending)

    def watch(self, model: nn.Module | Mapping[int, nn.Module], optimizer: Optimizer) -> None:
        """Record before each update of `optimizer`; `model` is the script's argument to `run.track`."""
        parts = model.values() if isinstance(model, Mapping) else [model]
        for part in parts:
            self.wrapped.append(part)
            inner = next((module for module in part.modules() if isinstance(module, LLamaPart)), part)
            self.parameters |= dict(inner.named_parameters())
        self.updated = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        for name, parameter in self.parameters.items():
            self.tensors[f"start|0|{name}"] = parameter.detach().clone().contiguous()
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def before_update(self) -> None:
        for name, parameter in self.parameters.items():
            gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
            self.tensors[f"gradient|{self.updates}|{name}"] = gradient.detach().clone().contiguous()
        self.keep_weights()
        self.sent.append(dict(context_of().ledger.sent_bytes))
        self.updates += 1

    def keep_weights(self) -> None:
        for name, parameter in self.parameters.items():
            self.tensors[f"weights|{self.updates}|{name}"] = parameter.detach().clone().contiguous()


def train(rank: int, submission: Submission, values: dict[str, Any], start_apart: bool = False) -> Facts:
    """Run a rank of a student's script; with `start_apart`, its initial weights differ from rank 0's."""
    module = load(submission.script)
    if start_apart and rank > 0:
        module.LLama = _with_other_weights  # type: ignore[attr-defined]
    settings = settings_for(rank, getattr(module, "DEFAULTS", None), TrainSettings, MODEL | TRAINING | values)
    work = getattr(module, "train", None)
    require(callable(work), "the file needs a function train(run), as in its chapter")
    assert work is not None
    run: TrainingRun[Any] = TrainingRun(settings, submission.script)
    recorder, track, log, steps = TensorKeeper(), run.track, run.log, run.steps
    recorder.updates = run.first_step
    logged: list[int] = []  # losses in each step

    def track_and_watch(model: Any, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        recorder.watch(model, optimizer)
        track(model, optimizer, *args, **options)

    def log_and_count(step: int, losses: Any, *args: Any, **options: Any) -> None:
        hasty = sum(not pending.was_waited_for() for pending in recorder.messages)
        told = f"rank {rank} did not wait for {hasty} of its messages: call .wait() on what dist.isend returns"
        expect(hasty == 0, "not-waited-for", told)
        recorder.messages.clear()
        logged.append(len(losses))
        log(step, losses, *args, **options)

    def keep_tokens(stories: Any) -> Iterator[tuple[int, Tensor]]:
        for step, batch in steps(stories):
            recorder.tokens.append(batch.tolist())
            yield step, batch

    run.track, run.log, run.steps = track_and_watch, log_and_count, keep_tokens  # type: ignore[method-assign]
    context_of().observers.append(recorder.observe)
    work(run)
    sent_at_end = dict(context_of().ledger.sent_bytes)
    for part in recorder.wrapped:
        if isinstance(part, ShardedDP):
            part.wait_for_weights()
    run.close()
    require(bool(recorder.parameters), "the script must call run.track(model, optimizer), as its chapter does")
    recorder.keep_weights()
    save_file(recorder.tensors, submission.folder / f"rank{rank}.safetensors")
    slices = {name: one for name, p in recorder.parameters.items() for one in placement_of(p).slices}  # one, if any
    return {
        "updates": recorder.updates,
        "updated": recorder.updated,
        "logged": logged,
        "not_waited_for": sum(not pending.was_waited_for() for pending in recorder.collectives),
        "sent": [*recorder.sent, sent_at_end],
        "slices": slices,
        "overlaps": recorder.overlaps,
        "tokens": recorder.tokens,
    }


@torch.no_grad()
def _with_other_weights(*args: Any, **options: Any) -> nn.Module:
    net = LLama(*args, **options)
    for parameter in net.parameters():
        parameter += 0.1 * torch.randn_like(parameter)  # each rank's generator has another seed
    return net


@functools.cache
def expected_of(
    batch_size: int, replicas: int, micro_batches: int, how: OneProcess = USUAL, start: Path | None = None
) -> tuple[dict[str, Tensor], Facts]:
    """Return the tensors and losses of `one_process`; computed once for all files that are checked."""
    with tempfile.TemporaryDirectory(prefix="lab-check-") as name:
        submission = Submission(Path(__file__), Path(name))
        [report] = submission.run_ranks(1, one_process, batch_size, replicas, micro_batches, how, start)
        if report.state != "ended":
            raise RuntimeError(f"one process failed: {report.sentences} {report.line}")
        return load_file(Path(name, ONE_PROCESS)), report.facts


def one_process(
    rank: int, submission: Submission, batch_size: int, n: int, m: int, how: OneProcess, start: Path | None
) -> Facts:
    """Run one process with the global batch of `n` replicas of `batch_size` sequences, `m` micro-batches each.

    It keeps its weights and, for each replica and micro-batch, its share of every gradient: the gradients of its part
    of the loss, so that their mean is the gradient of the global batch.

    Args:
        how: what is unusual about the model or the loss.
        start: a file with the initial weights, instead of those that follow from the seed.
    """
    args = settings_for(rank, TrainSettings(), TrainSettings, MODEL | TRAINING | dict(how.settings))
    tokenizer = SPTokenizer(args.tokenizer)
    sizes = {name: getattr(args, name) for name in "dmodel num_heads num_kv_heads hidden_dim n_layers seed".split()}
    if how.mixture:
        sizes |= ExpertSettings(experts=4).mixture_options()
    if how.masks_documents:
        sizes |= {"document_end": tokenizer.eos_id}
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, ctx_size=args.seq_len, **sizes)
    for name, other in how.shared:
        net.set_submodule(name, net.get_submodule(other))
    if start is not None:
        net.load_state_dict(load_file(start))
    data: dict[str, Any] = {"batch_size": batch_size, "seq_l": args.seq_len, "data": "sample", "seed": args.seed}
    stories = [TinyStories(tokenizer, **data, rank=replica, num_replicas=n) for replica in range(n)]
    parameters = dict(net.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    kept: dict[str, Tensor] = {}
    losses: list[float] = []
    tokens: list[list[list[list[int]]]] = []

    def keep_weights(step: int) -> None:
        for name, parameter in parameters.items():
            kept[f"weights|{step}|{name}"] = parameter.detach().clone()

    for step in range(STEPS):
        keep_weights(step)
        batches = [next(replica) for replica in stories]
        tokens.append([batch.tolist() for batch in batches])
        ignored = [_ignored(batch, tokenizer, how) for batch in batches]
        predictions = sum(int((~each).sum()) for each in ignored) / (n * m)  # of a mean share
        total, gradients = 0.0, {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
        for replica, (batch, without) in enumerate(zip(batches, ignored, strict=True)):
            for part, (x, mask) in enumerate(zip(batch.chunk(m), without.chunk(m), strict=True)):
                loss = next_token_loss(net(x), x.roll(-1, dims=1), mask, predictions)
                total += loss.item() / (n * m)
                shares = {name: torch.zeros_like(parameter) for name, parameter in parameters.items()}
                shares |= dict(zip(trained, torch.autograd.grad(loss, list(trained.values())), strict=True))
                for name, share in shares.items():
                    kept[f"share|{step}|{name}|{replica}|{part}"] = share
                    gradients[name] += share / (n * m)
        losses.append(total)
        norm = float(torch.stack([gradient.norm() for gradient in gradients.values()]).norm())
        factor = min(1.0, how.clip_norm / norm)
        for key in (key for key in kept if key.startswith(f"share|{step}|") and factor < 1):
            kept[key] *= factor
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.sub_(LR * factor * gradients[name])
    keep_weights(STEPS)
    save_file(kept, submission.folder / ONE_PROCESS)
    sequence_bytes = args.seq_len * args.dmodel * 4  # of the activations of a sequence between two blocks
    facts = {"seq_len": args.seq_len, "sequence_bytes": sequence_bytes, "blocks": args.n_layers}
    return {"losses": losses, "names": list(parameters), "tokens": tokens, **facts}


def _ignored(ids: Tensor, tokenizer: SPTokenizer, how: OneProcess) -> Tensor:
    """Return the positions of token ids (batch, seq) that predict nothing: the last ones, and after first sentences."""
    ignored = torch.zeros_like(ids, dtype=torch.bool)
    if how.first_sentences:
        ignored[:, :-1] = document_ids(ids, tokenizer.encode(".")[-1])[:, 1:] > 0
    ignored[:, -1] = True
    return ignored


def run_script(
    submission: Submission, trial: Trial, values: dict[str, Any], start_apart: bool = False
) -> tuple[list[Report], list[float]]:
    """Run the ranks of a script in a layout; return their reports, and the losses. `values` are further settings."""
    values = {**trial.flags, "out": submission.folder / "run", "master_port": submission.port, **values}
    reports = submission.run_ranks(math.prod(trial.layout.values()), train, values, start_apart)
    raise_trouble(reports, Grid(0, trial.layout).describe)
    metrics = values["out"] / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return reports, [json.loads(line)["loss"] for line in lines]


def try_layout(verdict: Verdict, submission: Submission, exercise: Exercise, trial: Trial) -> None:
    """Run a script in a layout and one process beside it, and compare them."""
    reports, losses = run_script(submission, trial, {}, exercise.ranks_start_apart)
    expected = expected_of(trial.batch_size, trial.replicas, trial.micro_batches)
    compare = Comparison(trial, *expected, LR, reports, submission.folder)
    try:
        if trial.sync_every > 1:  # the ranks differ from one process in between
            compare.expect_average_when_due(STEPS)
            verdict.sentences = [f"weights are averaged after every {trial.sync_every} steps, and after the last one"]
        else:
            compare.expect_one_process(losses, exercise.weights_only)
            kinds = "losses, weights" if exercise.weights_only else "losses, gradients, weights"
            verdict.sentences = [f"the run of one process: {kinds} of {STEPS} steps"]
        if exercise.shares_out:
            compare.expect_shared_out()
        if exercise.loss_numbers:
            compare.expect_no_logits_sent(exercise.loss_numbers)
    except Wrong as wrong:
        hasty = next((report for report in reports if report.facts["not_waited_for"]), None)
        if hasty is None:
            raise
        told = f"{compare.describe(hasty.rank)} did not wait for {hasty.facts['not_waited_for']} of its collectives"
        returned = "what dist.all_reduce(…, async_op=True) returns"
        way = f"call .wait() on {returned}, or finish() of the GradientBuckets that began it"
        raise Wrong("not-waited-for", f"{told}: {way}") from wrong
    verdict.sent = compare.sent()
    verdict.remarks = compare.remarks(verdict.sent)


def prepare() -> None:
    """Read the generator's stories once, so that forks need not do it again."""
    settings_for(0, TrainSettings(), TrainSettings, MODEL | TRAINING)
