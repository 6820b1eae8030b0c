"""Tries a mended exhibit on several ranks, and one process beside it: data, initial weights, gradients, parameters."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distlab.axes.grid import Grid
from distlab_compare import shares
from distlab_exercises.catalogue import Trial
from distlab_exercises.comparison import Comparison
from distlab_exercises.exhibits import Exhibit
from distlab_exercises.ranks import Report, Submission
from distlab_exercises.training import LR, STEPS, expected_of, run_script
from distlab_exercises.verdict import Verdict, Wrong

ALIKE = 0.99  # absolute cosine from which on two slices are copies, whatever their scale


def try_exhibit(verdict: Verdict, submission: Submission, exhibit: Exhibit) -> None:
    """Run an exhibit's script, whose ranks have different seeds, and one process beside it, and compare them."""
    trial = exhibit.trial
    reports, losses = run_exhibit(submission, exhibit)
    start = _initial_weights(trial, reports, submission.folder) if exhibit.own_start else None
    expected = expected_of(trial.batch_size, trial.replicas, trial.micro_batches, exhibit.one_process, start)
    compare = Comparison(trial, *expected, LR, reports, submission.folder)
    compare.expect_right_data()
    compare.expect_one_process(losses, exhibit.weights_only)
    kinds = "data, losses, weights" if exhibit.weights_only else "data, losses, gradients, weights"
    verdict.sentences = [f"the run of one process: {kinds} of {STEPS} steps"]


def run_exhibit(submission: Submission, exhibit: Exhibit, **others: Any) -> tuple[list[Report], list[float]]:
    """Run the ranks of an exhibit; return their reports and the losses. `others` are flags that differ from a check's.

    A run that is stopped and resumed is one run: its tensors and reports are put together.
    """
    folder, stops = submission.folder, exhibit.stops_after
    values: dict[str, Any] = {**dict(exhibit.one_process.settings), **others}
    jobs: list[dict[str, Any]] = [{}]
    if stops:
        jobs = [{"out": folder / "first", "steps": stops, "save_every": stops}, {"resume": folder / "first"}]
    reports: list[Report] = []
    losses: list[float] = []
    for job in jobs:
        again = replace(submission, port=submission.port + len(losses))
        ran, its_losses = run_script(again, exhibit.trial, values | job)
        for report in ran:
            _join(folder / f"rank{report.rank}.safetensors", folder / f"joined{report.rank}.safetensors")
        for before, report in zip(reports, ran, strict=False):
            for kind in ("logged", "tokens"):
                report.facts[kind] = before.facts[kind] + report.facts[kind]
        reports = ran
        losses += its_losses
    return reports, losses


def _join(now: Path, joined: Path) -> None:
    """Give a rank's file also the tensors of an earlier job, which are in `joined` afterwards."""
    tensors = (load_file(joined) if joined.exists() else {}) | load_file(now)
    save_file(tensors, now)
    save_file(tensors, joined)


def _initial_weights(trial: Trial, reports: list[Report], folder: Path) -> Path:
    """Return a file with the weights of the whole model at the start, put together from the ranks' slices.

    Raises:
        Wrong: copies of a parameter differ, or slices that should be independent are alike.
    """
    describe = Grid(0, trial.layout).describe
    ranks = [load_file(folder / f"rank{report.rank}.safetensors") for report in reports]
    whole: dict[str, Tensor] = {}
    for name in [key.split("|")[2] for key in ranks[0] if key.startswith("start|")]:
        parts = [tensors[f"start|0|{name}"] for tensors in ranks]
        slices = reports[0].facts["slices"].get(name)
        for rank, part in enumerate(parts[1:], 1):
            if slices is None and shares.differs(part, parts[0]):
                told = f"the copies of {name} on {describe(0)} and {describe(rank)} differ"
                raise Wrong("copies-differ", f"before step 0: {told}; no rank has a part of its own of this parameter")
            for other, earlier in enumerate(parts[:rank] if slices else []):
                if abs(float(torch.cosine_similarity(part.flatten(), earlier.flatten(), dim=0))) > ALIKE:
                    same = "equal" if torch.equal(part, earlier) else "the same but for their scale"
                    told = f"the slices of {name} on {describe(other)} and {describe(rank)} are {same}"
                    raise Wrong("equal-slices", f"before step 0: {told}: the model has one of them twice")
        whole[name] = torch.cat(parts, slices[0]) if slices else parts[0]
    path = folder / "start.safetensors"
    save_file(whole, path)
    return path
