"""Tries a training script on several ranks, and one process beside it."""

import functools
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import Optimizer

from distlab.axes.grid import Grid
from distlab.comm.context import context_of
from distlab.comm.pending import Pending
from distlab.machine.torch_patches import running_backward_pass
from distlab.run.main import training_run
from distlab.run.recording import Recording
from distlab.run.training import TrainingRun
from distlab.settings.experts import ExpertSettings
from distlab.settings.training import TrainSettings
from distlab_compare.records import Recordings
from distlab_exercises.catalogue import USUAL, Exercise, OneProcess, Trial
from distlab_exercises.comparison import Comparison
from distlab_exercises.loading import load, settings_for
from distlab_exercises.ranks import Facts, Report, Submission, raise_trouble
from distlab_exercises.verdict import Verdict, Wrong, expect
from simplellm.dataloaders import TinyStories
from simplellm.documents import document_ids
from simplellm.errors import require
from simplellm.llama import CausalLLama, LLama
from simplellm.losses import next_token_loss
from simplellm.sources import open_source
from simplellm.tokenizers import SPTokenizer

STEPS, LR = 3, 0.5
MODEL = {"dmodel": 16, "num_heads": 4, "n_layers": 2, "seq_len": 16, "device": "cpu"}
TRAINING = {"steps": STEPS, "record_gradients": STEPS, "optimizer": "sgd", "lr": LR, "data": "sample", "timeout": 60}


class Watch:
    """Notes what a rank of a script does in a run, beyond the tensors that `--record-gradients` keeps."""

    def __init__(self, run: TrainingRun[Any]) -> None:
        self.updates, self.updated = run.first_step, 0  # number of updates, and of updated weights
        self.held: Mapping[str, nn.Parameter] = {}  # the parameters that the script gives to `run.track`
        self.start: dict[str, Tensor] = {}  # their values then
        self.changed_early: list[str] = []  # those that have changed since then, before the first update
        self.logged: list[int] = []  # losses in each step
        self.tokens: list[list[list[int]]] = []  # the batch of each step
        self.sent: list[dict[str, int]] = []  # bytes by kind, in all steps before each update
        self.collectives: list[Pending] = []
        self.messages: list[Pending] = []  # sent in this step
        self.overlaps = False  # whether it starts to average gradients before a backward pass has ended
        self._run, self._track, self._log, self._steps = run, run.track, run.log, run.steps
        run.track, run.log, run.steps = self.track, self.log, self.steps  # type: ignore[method-assign]
        context_of().observers.append(self.observe)

    def observe(self, pending: Pending) -> None:
        """Keep a message that starts, to find out later whether it was waited for."""
        if pending.name.way == "collective":
            self.overlaps |= running_backward_pass() is not None
            self.collectives.append(pending)
        elif pending.name.way == "send":
            self.messages.append(pending)

    def track(self, model: Any, optimizer: Optimizer, *args: Any, **options: Any) -> None:
        self._track(model, optimizer, *args, **options)
        self.updated = sum(parameter.numel() for group in optimizer.param_groups for parameter in group["params"])
        assert self._run.recording is not None  # `record_gradients` is set
        self.held = self._run.recording.held
        self.start = {name: parameter.detach().clone() for name, parameter in self.held.items()}
        optimizer.register_step_pre_hook(lambda *_: self.before_update())

    def before_update(self) -> None:
        if not self.sent:
            self.changed_early = [name for name, start in self.start.items() if not start.equal(self.held[name])]
        self.sent.append(dict(context_of().ledger.sent_bytes))
        self.updates += 1

    def log(self, step: int, losses: Any, *args: Any, **options: Any) -> None:
        hasty = sum(not pending.was_waited_for() for pending in self.messages)
        told = f"rank {self._run.rank} did not wait for {hasty} of its messages"
        expect(hasty == 0, "not-waited-for", f"{told}: call .wait() on what dist.isend returns")
        self.messages.clear()
        self.logged.append(len(losses))
        self._log(step, losses, *args, **options)

    def steps(self, stories: Any) -> Iterator[tuple[int, Tensor]]:
        for step, batch in self._steps(stories):
            self.tokens.append(batch.tolist())
            yield step, batch

    def facts(self) -> Facts:
        not_waited_for = sum(not pending.was_waited_for() for pending in self.collectives)
        names = "updates", "updated", "changed_early", "logged", "tokens", "sent", "overlaps"
        return {**{name: getattr(self, name) for name in names}, "not_waited_for": not_waited_for}


def train(rank: int, submission: Submission, values: dict[str, Any], start_apart: bool = False) -> Facts:
    """Run a rank of a student's script; with `start_apart`, its initial weights differ from rank 0's."""
    module = load(submission.script)
    if start_apart and rank > 0:
        module.LLama = _with_other_weights  # type: ignore[attr-defined]
    settings = settings_for(rank, getattr(module, "DEFAULTS", None), TrainSettings, MODEL | TRAINING | values)
    work = getattr(module, "train", None)
    require(callable(work), "the file needs a function train(run), as in its chapter")
    assert work is not None
    run: TrainingRun[Any] = training_run(settings, submission.script)
    watch = Watch(run)
    work(run)
    watch.sent.append(dict(context_of().ledger.sent_bytes))
    run.close()
    require(run.recording is not None, "the script must call run.track(model, optimizer), as its chapter does")
    return watch.facts()


@torch.no_grad()
def _with_other_weights(*args: Any, **options: Any) -> nn.Module:
    net = LLama(*args, **options)
    for parameter in net.parameters():
        parameter += 0.1 * torch.randn_like(parameter)  # each rank's generator has another seed
    return net


def expected_of(trial: Trial, how: OneProcess = USUAL, start: Path | None = None) -> tuple[Recordings, Facts]:
    """Return what `one_process` records, and its report; computed once for all files that are checked."""
    return _expected_of(trial.batch_size, trial.replicas, trial.micro_batches, how, start)


@functools.cache
def _expected_of(
    batch_size: int, replicas: int, micro_batches: int, how: OneProcess, start: Path | None
) -> tuple[Recordings, Facts]:
    with tempfile.TemporaryDirectory(prefix="lab-check-") as name:
        submission = Submission(Path(__file__), Path(name))
        [report] = submission.run_ranks(1, one_process, batch_size, replicas, micro_batches, how, start)
        if report.state != "ended":
            raise RuntimeError(f"one process failed: {report.sentences} {report.line}")
        records = Recordings(Path(name), {"layout": {}, "world_size": 1})
        for step in records.steps:
            records.ranks(step)  # opens its file, which can then be read although its folder is gone
        return records, report.facts


def one_process(
    rank: int, submission: Submission, batch_size: int, n: int, m: int, how: OneProcess, start: Path | None
) -> Facts:
    """Run one process with the global batch of `n` replicas of `batch_size` sequences, `m` micro-batches each.

    It records weights and gradients, and the share of each replica and micro-batch in the gradients.

    Args:
        how: what is unusual about the model or the loss.
        start: a file with the initial weights, instead of those that follow from the seed.
    """
    args = settings_for(rank, TrainSettings(), TrainSettings, MODEL | TRAINING | dict(how.settings))
    tokenizer = SPTokenizer(args.tokenizer)
    net = _model(args, tokenizer, how)
    if start is not None:
        net.load_state_dict(load_file(start))
    data: dict[str, Any] = {"batch_size": batch_size, "seq_l": args.seq_len, "data": "sample", "seed": args.seed}
    stories = [TinyStories(tokenizer, **data, rank=replica, num_replicas=n) for replica in range(n)]
    optimizer, parameters = torch.optim.SGD(net.parameters(), lr=LR), dict(net.named_parameters())
    recording = Recording(submission.folder, rank, range(STEPS), parameters, parameters, optimizer, shares=n * m)
    losses: list[float] = []
    tokens: list[list[list[list[int]]]] = []
    for step in range(STEPS):
        recording.begin(step)
        batches = [next(replica) for replica in stories]
        tokens.append([batch.tolist() for batch in batches])
        ignored = [_ignored(batch, tokenizer, how) for batch in batches]
        predictions = sum(int((~each).sum()) for each in ignored) / (n * m)  # of a mean share
        losses.append(0.0)
        optimizer.zero_grad()
        for batch, without in zip(batches, ignored, strict=True):
            for x, mask in zip(batch.chunk(m), without.chunk(m), strict=True):
                loss = next_token_loss(net(x), x.roll(-1, dims=1), mask, predictions) / (n * m)
                loss.backward()
                losses[-1] += loss.item()
        nn.utils.clip_grad_norm_(net.parameters(), how.clip_norm)
        optimizer.step()
    recording.end()
    sequence_bytes = args.seq_len * args.dmodel * 4  # of the activations of a sequence between two blocks
    facts = {"seq_len": args.seq_len, "sequence_bytes": sequence_bytes, "blocks": args.n_layers}
    return {"losses": losses, "tokens": tokens, **facts}


def _model(args: TrainSettings, tokenizer: SPTokenizer, how: OneProcess) -> CausalLLama:
    options = {name: getattr(args, name) for name in "dmodel num_heads num_kv_heads hidden_dim n_layers seed".split()}
    if how.mixture:
        options |= ExpertSettings(experts=4).mixture_options()
    if how.masks_documents:
        options |= {"document_end": tokenizer.eos_id}
    net = LLama(CausalLLama, tokenizer.vocab_size, padding_idx=tokenizer.pad_id, ctx_size=args.seq_len, **options)
    for name, other in how.shared:
        net.set_submodule(name, net.get_submodule(other))
    return net


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
    reports = submission.run_ranks(trial.world_size, train, values, start_apart)
    raise_trouble(reports, Grid(0, trial.layout).describe)
    metrics = values["out"] / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return reports, [json.loads(line)["loss"] for line in lines]


def recorded(submission: Submission, trial: Trial) -> Recordings:
    """Return the gradients and weights of a script's ranks."""
    return Recordings(submission.folder / "run", {"layout": trial.layout, "world_size": trial.world_size})


def try_layout(verdict: Verdict, submission: Submission, exercise: Exercise, trial: Trial) -> None:
    """Run a script in a layout and one process beside it, and compare them."""
    reports, losses = run_script(submission, trial, {}, exercise.ranks_start_apart)
    compare = Comparison(trial, recorded(submission, trial), *expected_of(trial), LR, reports)
    try:
        if trial.sync_every > 1:  # the ranks differ from one process in between
            compare.expect_average_when_due(STEPS)
            verdict.sentences = [f"weights are averaged after every {trial.sync_every} steps, and after the last one"]
        else:
            equal = compare.expect_one_process(losses, exercise.weights_only)
            verdict.sentences = [f"the run of one process: {equal}"]
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
    """Read settings and the generator's stories once, so that forks need not do it again."""
    settings_for(0, TrainSettings(), TrainSettings, MODEL | TRAINING)
    next(open_source("sample", "train", 0).read(0))
