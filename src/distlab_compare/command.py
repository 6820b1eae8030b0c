"""Compare two runs of the same training: the first step, parameter, rank and factor at which they diverge.

    distlab compare RUN_A RUN_B
    distlab compare RUN_A --with-one-process

Both runs may have any layout. They are compared by the gradients and weights that --record-gradients has recorded, else
by their checkpoints. RUN_B counts as right. The exit status is 0 if the runs are equal, 1 if they diverge.
"""

import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import tyro

from distlab.axes.layout import layout_flags, replicas_in
from distlab.checkpoints import LLAMA
from distlab.launching.command import lab_command
from distlab.reports.records import read_steps
from distlab.run.commands import LAB
from distlab.run.steps import STOP_AFTER
from distlab.settings.common import RunSettings, as_flag, as_json, shown_as
from distlab.settings.experts import ExpertSettings
from distlab.settings.folders import is_run
from distlab.settings.recorded import read_config
from distlab.settings.resume_policy import OF_TRAINING, marked
from distlab.settings.scripts import read_script
from distlab.settings.training import TrainSettings, moments_of
from distlab_compare.mistakes import TOLERANCE
from distlab_compare.records import Recordings
from distlab_compare.runs import Pair
from distlab_compare.saved import Saved, by_step, first_divergence
from simplellm import command_line
from simplellm.errors import require

TOLERANCES = {"float32": TOLERANCE, "bfloat16": 2e-2}  # by `--dtype`
RECORD = "--record-gradients 3"  # to suggest
ONE_PROCESS = "one-process"  # folder, in that of the run
AXES = "world_size", "dp", "pp", "cp", "ep", "tp"


@dataclass
class Request:
    """The runs to compare."""

    run_a: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="RUN_A")]
    """folder of the run to judge"""
    run_b: Annotated[tyro.conf.Positional[Path | None], shown_as("RUN_B", "or --with-one-process")] = None
    """folder of the run that counts as right"""
    with_one_process: bool = False
    """run the training of RUN_A again as one process, on the same batches, and compare with that"""
    script: Annotated[Path | None, shown_as("FILE", "default: primer/intro.py, or RUN_A's for other models")] = None
    """script of that process"""
    tolerance: Annotated[float | None, shown_as("FLOAT", "default: 1e-4; 2e-2 with bfloat16")] = None
    """relative error up to which two tensors count as equal"""


class RecordedRun:
    """A run's folder, and what it has kept of its training."""

    def __init__(self, folder: Path) -> None:
        there = f"{folder}: there is no such folder" if not folder.exists() else f"{folder}: is not the folder of a run"
        require(is_run(folder), f"{there}; give the folder that a run's last lines name")
        self.folder, self.config = folder, read_config(folder)
        self.settings: dict[str, Any] = self.config["settings"]
        self.records = Recordings(folder, self.config)

    @property
    def layout(self) -> str:
        return layout_flags(self.config["layout"])

    @property
    def batch(self) -> int:
        """The sequences of a step, of all replicas; 0 if the script does not count them."""
        if "batch_size" in self.settings:
            return int(self.settings["batch_size"]) * replicas_in(self.config["layout"])
        return int(self.settings.get("bsz", 0))  # counts those of all replicas, as in sentiment

    @property
    def losses(self) -> dict[int, float]:
        """The losses by step."""
        records = read_steps(self.folder, "step", "loss")
        return {record["step"]: record["loss"] for record in records if record["loss"] is not None}

    @property
    def tolerance(self) -> float:
        return TOLERANCES.get(self.settings.get("dtype", "float32"), max(TOLERANCES.values()))


def compare(request: Request) -> int:
    """Print the first difference of two runs, and return the exit status: 0 if there is none."""
    tolerance = request.tolerance
    require(tolerance is None or 0 < tolerance < 1, f"--tolerance {tolerance}: give a number between 0 and 1")
    has_one = (request.run_b is None) == request.with_one_process
    require(has_one, "compare needs a second run: give RUN_B or --with-one-process, and not both")
    has_script = request.script is None or request.with_one_process
    require(has_script, f"--script {request.script} is for --with-one-process; leave it out")
    own = RecordedRun(request.run_a)
    right = RecordedRun(request.run_b) if request.run_b else run_as_one_process(own, request.script)
    require_same_training(own, right)
    have_recordings = own.records.steps and right.records.steps
    compare_kept = _compare_recordings if have_recordings else _compare_checkpoints
    status, lines = compare_kept(own, right, tolerance or max(own.tolerance, right.tolerance))
    print("\n".join(lines))
    return status


def _compare_recordings(own: RecordedRun, right: RecordedRun, tolerance: float) -> tuple[int, list[str]]:
    """Return the exit status, and lines about the first difference of recorded gradients and weights."""
    names = _names(own, right)
    has_moments = moments_of(own.settings.get("optimizer", "sgd")) > 0
    micro_batches = int(own.settings.get("micro_batches", 1))
    pair = Pair(own.records, right.records, tolerance, (own.losses, right.losses), micro_batches, has_moments)
    both = f"{own.folder} has recorded {_shown(own.records.steps)}, {right.folder} {_shown(right.records.steps)}"
    require(bool(pair.steps), f"{both}: there is no step that both have; record them again from the same step")
    require_same_parameters(own, right, pair.steps[0])
    if within := Pair(right.records, right.records, tolerance).first_divergence():
        told = f"the ranks of {right.folder}, which counts as right, part among each other:"
        return 1, [told, *within.sentences]
    if divergence := pair.first_divergence():
        return 1, [f"{names} diverge in step {divergence.step}:", *divergence.sentences]
    equal = f"{names} are equal: losses, gradients and weights of {_shown(pair.steps)}"
    last = pair.steps[-1]
    has_weights = all(last + 1 in run.records.steps for run in (own, right))  # after the last step
    loosest = pair.tolerance_at(last + has_weights)
    later = f"; {loosest:g} for gradients and weights after the first update" * (loosest > tolerance)
    return 0, [equal, f"largest relative difference: {pair.largest:.1g} (tolerance {tolerance:g}{later})"]


def _compare_checkpoints(own: RecordedRun, right: RecordedRun, tolerance: float) -> tuple[int, list[str]]:
    """Return the exit status, and lines about the first difference of weights in checkpoints."""
    saved = by_step(own.folder), by_step(right.folder)
    for run, checkpoints in zip((own, right), saved, strict=True):
        require_something_kept(run, checkpoints)
    for run, other, checkpoints in ((own, right, saved[0]), (right, own, saved[1])):
        told = f"{run.folder} has recorded gradients and no checkpoints, {other.folder} only checkpoints"
        require(bool(checkpoints), f"{told}; run the second again with {RECORD}")
    steps = [step for step in saved[0] if step in saved[1]]
    kept = ", ".join(f"{run.folder} {_shown([*each])}" for run, each in zip((own, right), saved, strict=True))
    require(bool(steps), f"no two checkpoints are of the same step ({kept}); give both the same --save-every")
    sentences = first_divergence(*saved, steps, tolerance)
    told = "part:" if sentences else f"are equal: weights in the checkpoints of {_shown(steps)}"
    return int(bool(sentences)), [f"{_names(own, right)} {told}", *sentences]


def _names(own: RecordedRun, right: RecordedRun) -> str:
    """Return the folders of both runs, with their layouts."""
    return f"{own.folder} ({own.layout}) and {right.folder} ({right.layout})"


def _shown(steps: Sequence[int]) -> str:
    return f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"


def require_something_kept(run: RecordedRun, checkpoints: Mapping[int, Saved]) -> None:
    """Raise `InputError` if a run has kept neither recordings nor checkpoints."""
    has_any = bool(checkpoints or run.records.steps)
    require(has_any, f"{run.folder}: has neither gradients nor checkpoints to compare; run it with {RECORD}")


def require_same_training(own: RecordedRun, right: RecordedRun) -> None:
    """Raise `InputError` unless two runs should be equal: the same model, data, seed, global batch and recipe."""
    names = dict.fromkeys(name for some in (TrainSettings(), ExpertSettings()) for name in marked(some, *OF_TRAINING))
    told = [
        f"{as_flag(name)} {own.settings[name]} and {right.settings[name]}"
        for name in names
        if name in own.settings and name in right.settings and name not in ("dtype", "tokenizer")
        if own.settings[name] != right.settings[name]
        if None not in (own.settings[name], right.settings[name])  # None follows other flags; shapes are compared below
    ]
    told += [f"a global batch of {own.batch} and {right.batch}"] * (own.batch != right.batch)
    data = [run.config.get("data_identity") or run.settings.get("data") for run in (own, right)]
    told += ["different data"] * (data[0] != data[1])
    told += ["different tokenizers"] * (own.settings.get("tokenizer") != right.settings.get("tokenizer"))
    if own.settings.get("lr_schedule", "constant") != "constant" and own.settings["steps"] != right.settings["steps"]:
        told.append(
            f"--steps {own.settings['steps']} and {right.settings['steps']}, on which the learning rate depends"
        )
    advice = "two layouts of one training have the same"
    require(not told, f"{own.folder} and {right.folder} are different trainings: {'; '.join(told)}; {advice}")


def require_same_parameters(own: RecordedRun, right: RecordedRun, step: int) -> None:
    """Raise `InputError` unless two runs have parameters of the same names and shapes."""
    named = [run.records.names(step, "weights") for run in (own, right)]
    for run, mine, others in ((own, named[0], named[1]), (right, named[1], named[0])):
        only = [name for name in mine if name not in others]
        told = f"{own.folder} and {right.folder} have different models: only {run.folder} has {''.join(only[:1])}"
        require(not only, told)
    for name in named[0]:
        shapes = [next(run.records.parts(step, "weights", name))[1].whole for run in (own, right)]
        told = f"{own.folder} and {right.folder} have different models: {name} is {shapes[0]} and {shapes[1]}"
        require(shapes[0] == shapes[1], told)


def run_as_one_process(own: RecordedRun, script: Path | None) -> RecordedRun:
    """Run the training of a run again as one process, on the same batches, for as many steps as it has kept."""
    has_records, saved = bool(own.records.steps), by_step(own.folder)
    require_something_kept(own, saved)
    first = (own.records.steps or [0])[0]
    steps = [step for step in own.records.steps if own.records.names(step, "gradient")] or [*saved]
    until = steps[-1] + 1 if has_records else steps[-1]
    flags = one_process_flags(own, script)
    keep = ["--record-gradients", str(until - first)]
    if not has_records:
        keep = ["--save-every", str(own.settings["save_every"]), "--keep", str(len(saved) + 1)]
    out = own.folder / ONE_PROCESS
    command = lab_command(*flags, *keep, "--out", str(out))
    print(f"# one process runs {_shown(range(first, until))}: {' '.join(flags)}", flush=True)
    with tempfile.TemporaryFile("w+") as output:
        environment = {**os.environ, STOP_AFTER: str(until)}
        ended = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
        output.seek(0)
        last = next((line.strip("# \n") for line in reversed(output.readlines()) if line.strip()), "it said nothing")
    require(ended.returncode == 0, f"{flags[0]} does not run as one process: {last}; give another --script")
    return RecordedRun(out)


def one_process_flags(own: RecordedRun, script: Path | None) -> list[str]:
    """Return a script and the flags with which it runs the training of a run as one process.

    Each micro-batch of each replica is a micro-batch of its own, in the same order.
    """
    path = Path(own.config.get("script", ""))
    require(script is not None or path.is_file(), f"{own.folder}: its script {path} is not there; give --script")
    own_path = script or path
    require(own_path.is_file(), f"--script {own_path}: there is no such file; give a script of the same model")
    read = read_script(own_path)
    if script is None and getattr(read.defaults, "architecture", "") == LLAMA:
        own_path = LAB / ("hybrid/intro_5d.py" if own.settings.get("experts") else "primer/intro.py")
        read = read_script(own_path)
    values = _training_values(own, read.defaults)
    replicas = replicas_in(own.config["layout"])
    values |= {name: 1 for name in AXES}
    values |= {name: own.settings.get(name, 1) * replicas for name in ("batch_size", "micro_batches")}
    if own.config.get("resume"):
        values["resume"] = own.config["resume"]
    if own.config.get("data"):
        values["data"] = own.config["data"]
    flags = [str(own_path)]
    for name, value in values.items():
        if not hasattr(read.defaults, name) or value is None:
            continue
        flag = as_flag(f"no_{name}" if value is False else name)
        given = [] if isinstance(value, bool) else map(str, value) if isinstance(value, list) else [str(value)]
        flags += [flag, *given]
    return flags


def _training_values(own: RecordedRun, defaults: RunSettings) -> dict[str, Any]:
    """Return the settings of a run that decide its training: those of the lab, and those of a user's own script."""
    names = [*marked(defaults, *OF_TRAINING), "steps", "data", "tokenizer", "device", "timeout"]
    for kind in type(defaults).__mro__:
        if not kind.__module__.startswith(("distlab.", "builtins")):
            names += getattr(kind, "__annotations__", {})
    values = {name: own.settings[name] for name in names if name in own.settings and name not in AXES}
    known = {field.name for field in fields(defaults)}
    usual = as_json(defaults)
    return {name: value for name, value in values.items() if name in known and value != usual[name]}


command = command_line.as_command(compare, Request, __doc__)

if __name__ == "__main__":
    command_line.run(compare, Request, __doc__)
