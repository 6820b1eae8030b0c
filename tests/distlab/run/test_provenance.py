"""Which revision of the lab a run was made with."""

import platform
import sys
from datetime import datetime, timedelta
from pathlib import Path

import pytest
import torch

from distlab.machine.cores import cores
from distlab.run import provenance


@pytest.mark.quick
def test_a_folder_that_git_cannot_read_has_the_installed_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere")
    monkeypatch.setattr(provenance, "LAB", tmp_path)
    monkeypatch.setattr(provenance, "version", lambda name: f"{name} 1.0")
    assert provenance.revision.__wrapped__() == "distributed-llm-lab 1.0"


@pytest.mark.quick
@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_the_machine_is_named_by_its_processor_and_versions_and_the_beginning_of_the_run_is_now() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    own = provenance.provenance(torch.device("cpu"))
    assert own["machine"].pop("processor") in (names or {platform.machine()})
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    assert own["machine"] == {"cores": cores(), "system": "Linux", **versions}
    assert abs(datetime.fromisoformat(own["began"]) - datetime.now().astimezone()) < timedelta(minutes=1)
