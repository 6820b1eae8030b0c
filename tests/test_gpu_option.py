"""`--gpu` where there is no GPU, and what all other tests see of one where there is."""

import os
import re
import sys
from pathlib import Path

import pytest
import torch
from support.gpu_runs import why_no_gpu
from support.processes import run
from support.terminals import fork_python


def test_without_a_gpu_one_sentence_says_that_nothing_was_run() -> None:
    ended = fork_python("-m", "pytest", "--gpu").finish()
    assert ended.status == 0
    (line,) = (ended.out + ended.err).splitlines()
    assert line.startswith("# there is no GPU here (torch ")
    assert line.endswith("no GPU test was run, and nothing is proven")


def test_a_gpu_that_torch_does_not_see_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: GPU-0)'\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    status, sentence = why_no_gpu()
    assert status == 1
    assert sentence.startswith(f"nvidia-smi lists GPU 0: NVIDIA H200 (UUID: GPU-0), but torch {torch.__version__} sees")


def test_a_rehearsal_says_that_it_proves_nothing_and_begins_with_what_matters_most_also_in_several_processes() -> None:
    flags = "-m pytest --gpu --minutes 0 -n 1 -vv tests/gpu/test_model.py tests/gpu/test_checkpoints.py".split()
    ended = run(sys.executable, *flags, LAB_GPU_REHEARSAL="1")
    assert ended.status == 1, "no test begins in no time"
    files = re.findall(r"^\[gw0\].* tests/gpu/test_(\w+)", ended.out, re.MULTILINE)
    assert files[:3] == ["checkpoints", "checkpoints", "model"]
    assert ended.out.splitlines()[-1].startswith("# a rehearsal on the CPU, as with 1 GPU")


def test_other_tests_and_what_they_start_see_no_gpu() -> None:
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ""
    assert not torch.cuda.is_available()
    assert not torch.cuda.is_initialized()
