"""Tries a corrected exhibit on several ranks, beside one process: data, initial weights, gradients, parameters."""

import itertools
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from distlab.settings.folders import RECORDED
from distlab_compare import mistakes
from distlab_compare.records import Recordings
from distlab_exercises.comparison import Comparison
from distlab_exercises.exhibits import Exhibit
from distlab_exercises.ranks import Report, Submission
from distlab_exercises.training import LR, STEPS, expected_of, recorded, run_script
from distlab_exercises.verdict import Verdict, Wrong, expect

ALIKE = 0.99  # absolute cosine from which on two slices are copies, whatever their scale


def try_exhibit(verdict: Verdict, submission: Submission, exhibit: Exhibit) -> None:
    """Run an exhibit's script, whose ranks have different seeds, and one process beside it, and compare them."""
    reports, losses = run_exhibit(submission, exhibit)
    records = recorded(submission, exhibit.trial)
    start = initial_weights(records, submission.folder) if exhibit.own_start else None
    compare = Comparison(exhibit.trial, records, *expected_of(exhibit.trial, exhibit.one_process, start), LR, reports)
    compare.expect_right_data()
    equal = compare.expect_one_process(losses, exhibit.weights_only)
    verdict.sentences = [f"the run of one process: data, {equal}"]


def run_exhibit(submission: Submission, exhibit: Exhibit, **others: Any) -> tuple[list[Report], list[float]]:
    """Run the ranks of an exhibit; return their reports and the losses. `others` are flags that differ from a check's.

    A run that is stopped and resumed is one run: its records and reports are put together.
    """
    folder, stops = submission.folder, exhibit.stops_after
    values: dict[str, Any] = {**dict(exhibit.one_process.settings), **others}
    if not stops:
        return run_script(submission, exhibit.trial, values)
    first, whole = folder / "first", folder / "run"
    until = values | {"out": first, "steps": stops, "save_every": stops}
    before, losses = run_script(submission, exhibit.trial, until)
    rest = values | {"resume": first, "record_gradients": STEPS - stops}
    reports, later_losses = run_script(submission, exhibit.trial, rest)
    shutil.copytree(first / RECORDED, whole / RECORDED, dirs_exist_ok=True)
    for earlier, report in zip(before, reports, strict=True):
        for kind in ("logged", "tokens"):
            report.facts[kind] = earlier.facts[kind] + report.facts[kind]
        report.facts["changed_early"] = earlier.facts["changed_early"]
    return reports, losses + later_losses


def initial_weights(records: Recordings, folder: Path) -> Path:
    """Return a file with the weights of the whole model at the start, put together from the ranks' slices.

    Raises:
        Wrong: copies of a parameter differ, or slices that should be independent are alike.
    """
    describe, whole = records.describe, {}
    for name in records.names(0, "weights"):
        for (other, earlier), (rank, part) in itertools.combinations(records.parts(0, "weights", name), 2):
            ranks = f"of {name} on {describe(other)} and {describe(rank)}"
            if part.is_whole:
                told = f"the copies {ranks} differ; no rank has a part of its own of this parameter"
                expect(not mistakes.differs(part.flat, earlier.flat), "copies-differ", f"before step 0: {told}")
            elif abs(float(torch.cosine_similarity(part.flat, earlier.flat, dim=0))) > ALIKE:
                same = "equal" if torch.equal(part.flat, earlier.flat) else "the same but for their scale"
                told = f"the slices {ranks} are {same}: the model has one of them twice"
                raise Wrong("equal-slices", f"before step 0: {told}")
        whole[name] = records.whole(0, "weights", name)
    path = folder / "start.safetensors"
    save_file(whole, path)
    return path
