"""Tries a mended exhibit on several ranks, and one process beside it: data, initial weights, gradients, parameters."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from distlab.axes.grid import Grid
from distlab_compare import shares
from distlab_exercises.comparison import Comparison
from distlab_exercises.exhibits import Exhibit
from distlab_exercises.ranks import Report, Submission, raise_trouble
from distlab_exercises.training import LR, STEPS, expected_of, train
from distlab_exercises.verdict import Verdict, Wrong

ALIKE = 0.99  # absolute cosine from which on two slices are copies, whatever their scale


def try_exhibit(verdict: Verdict, submission: Submission, exhibit: Exhibit) -> None:
    """Run an exhibit's script, whose ranks have different seeds, and one process beside it, and compare them."""
    trial, how = exhibit.trial, exhibit.one_process
    describe = Grid(0, trial.layout).describe
    reports, losses = run_exhibit(submission, exhibit)
    start = _initial_weights(reports, submission.folder, describe) if exhibit.own_start else None
    expected = expected_of(trial.batch_size, trial.replicas, trial.micro_batches, how, start)
    compare = Comparison(trial, *expected, LR, reports, submission.folder, describe)
    compare.expect_right_data()
    compare.expect_one_process(losses, exhibit.weights_only)
    kinds = "data, losses, weights" if exhibit.weights_only else "data, losses, gradients, weights"
    verdict.sentences = [f"the run of one process: {kinds} of {STEPS} steps"]


def run_exhibit(submission: Submission, exhibit: Exhibit, **others: Any) -> tuple[list[Report], list[float]]:
    """Run the ranks of an exhibit; return their reports and the losses. `others` are flags that differ from a check's.

    A run that is stopped and resumed is one run: its tensors and reports are put together.
    """
    trial, folder = exhibit.trial, submission.folder
    values: dict[str, Any] = {**trial.settings, **dict(exhibit.one_process.settings), **others}
    values |= {"batch_size": trial.batch_size, "micro_batches": trial.micro_batches}
    stops = exhibit.stops_after
    jobs: list[dict[str, Any]] = [{"out": folder / "run"}]
    if stops:
        jobs = [{"out": folder / "first", "steps": stops, "save_every": stops}]
        jobs += [{"out": folder / "run", "resume": folder / "first"}]
    reports: list[Report] = []
    losses: list[float] = []
    for job in jobs:
        again = replace(submission, port=submission.port + len(losses))
        ran = again.run_ranks(math.prod(trial.layout.values()), train, values | job | {"master_port": again.port})
        raise_trouble(ran, Grid(0, trial.layout).describe)
        for report in ran:
            _join(folder / f"rank{report.rank}.safetensors", folder / f"joined{report.rank}.safetensors")
        for before, report in zip(reports, ran, strict=False):
            for kind in ("logged", "tokens"):
                report.facts[kind] = before.facts[kind] + report.facts[kind]
        reports = ran
        losses += [json.loads(line)["loss"] for line in (job["out"] / "metrics.jsonl").read_text().splitlines()]
    return reports, losses


def _join(now: Path, joined: Path) -> None:
    """Give a rank's file also the tensors of an earlier job, which are in `joined` afterwards."""
    tensors = (load_file(joined) if joined.exists() else {}) | load_file(now)
    save_file(tensors, now)
    save_file(tensors, joined)


def _initial_weights(reports: list[Report], folder: Path, describe: Any) -> Path:
    """Return a file with the weights of the whole model at the start, put together from the ranks' slices.

    Raises:
        Wrong: copies of a parameter differ, or slices that should be independent are alike.
    """
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
