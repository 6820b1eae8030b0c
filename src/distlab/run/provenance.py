"""Where the records of a run come from: its command, the revision of the lab, the machine."""

import contextlib
import functools
import platform
import subprocess
from datetime import datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from distlab.machine.cores import cores
from distlab.run.commands import LAB, own_command


def provenance(device: torch.device) -> dict[str, Any]:
    """Return the part of `config.json` that says how a run on this device came about."""
    machine = {"processor": processor(), "cores": cores(), "system": platform.system()}
    if device.type == "cuda":
        machine["gpu"] = torch.cuda.get_device_name(device)
    machine |= {"python": platform.python_version(), "torch": torch.__version__}
    began = datetime.now().astimezone().isoformat(timespec="seconds")
    return {"command": own_command(), "began": began, "revision": revision(), "machine": machine}


@functools.cache
def revision() -> str:
    """Return git's name of the lab's checkout, with "-dirty" if files differ from it; else the installed version."""
    if (LAB / ".git").exists():
        describe = ["git", "-C", str(LAB), "describe", "--always", "--dirty", "--abbrev=10"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            return subprocess.run(describe, capture_output=True, text=True, check=True, timeout=5).stdout.strip()
    with contextlib.suppress(PackageNotFoundError):
        return version("distributed-llm-lab")
    return "unknown"


def processor() -> str:
    """Return the name of this machine's processor."""
    with contextlib.suppress(OSError):  # Linux
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
    return platform.processor() or platform.machine()
