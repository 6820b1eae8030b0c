"""Which revision of the lab a run was made with."""

import platform
import sys
from pathlib import Path

import pytest
import torch

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
def test_the_processor_is_called_by_its_name_beside_the_versions_of_python_and_torch() -> None:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = {line.partition(": ")[2] for line in lines if line.startswith("model name")}
    machine = provenance.provenance(torch.device("cpu"))["machine"]
    assert machine["processor"] in (names or {platform.machine()})
    assert (machine["python"], machine["torch"]) == (platform.python_version(), torch.__version__)
