"""This machine's file for the planner, with the passes of the models that a benchmark runs, measured several times."""

import itertools
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from turns import each

from distlab.settings.common import parse
from distlab.settings.hybrid import HybridSettings
from distlab_planner.machine import Machine, read_machine, write_machine
from distlab_planner.model import Sizes
from simplellm.errors import require

CALIBRATIONS = 3  # how slow the computer is at the moment is in one minute's measurements


def sizes_of(flags: str) -> Sizes:
    """The sizes of a model, given by its flags."""
    return Sizes.of(parse(HybridSettings(batch_size=3), "", flags.split()))


def machine_of(path: Path, models: Mapping[str, str], calibrations: int = CALIBRATIONS) -> Machine:
    """The machine's file, with the passes of some models, given by their flags.

    What is not there is measured, several times in turns; the medians count.
    """
    known = {entry.sizes for entry in read_machine(path).measured} if path.exists() else set()
    missing = {model: flags for model, flags in models.items() if sizes_of(flags) not in known}
    if missing:
        path.parent.mkdir(exist_ok=True, parents=True)
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder, f"{number}.json") for number in range(calibrations)]
            for file in files if path.exists() else ():
                shutil.copy(path, file)  # so that it keeps the models that it has
            for file, model in each(list(itertools.product(files, missing)), "measurements of the machine"):
                calibrate(file, missing[model])
            path.write_text(json.dumps(medians([json.loads(file.read_text()) for file in files])))
        write_machine(read_machine(path), path)
    return read_machine(path)


def calibrate(file: Path, flags: str) -> None:
    """Measure this machine for the model of these flags."""
    sizes = re.sub(r"--n-layers \d+", "", flags).split()
    command = [sys.executable, "-m", "distlab.calibrate", str(file), *sizes, "--device", "cpu"]
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    require(done.returncode == 0, f"{file}: measuring has failed: {done.stderr.strip()[-300:]}")


def medians(values: Sequence[Any]) -> Any:
    """Several measurements of one machine, as in its file, as one: every number is the median of theirs."""
    first = values[0]
    if isinstance(first, dict):
        return {key: medians([value[key] for value in values]) for key in first}
    if isinstance(first, list):
        return [medians(of_one) for of_one in zip(*values, strict=True)]
    return statistics.median(values) if isinstance(first, float) else first
