"""A lesson's script hands over to a fuller one: for flags that it has not, and for runs that it cannot go on with."""

from pathlib import Path

import pytest
from support.chapters import train_on
from support.processes import LAB

from distlab.settings.scripts import read_script_for

pytestmark = pytest.mark.quick
GA, DILOCO = "DP/gradient_aggr/intro_DP_GA.py", "DP/diloco/intro_DP_DiLoCo.py"


@pytest.mark.parametrize(
    ("script", "flags", "runs"),
    [
        (GA, "--steps 3", "intro_DP_GA"),
        (GA, "--compress topk", "intro_DP_buckets"),
        (GA, "0 --all_reduce=ring", "intro_DP_buckets"),
        (DILOCO, "--sync-every 4", "intro_DP_DiLoCo"),
        (DILOCO, "--sync-every 4 --fragments 2", "intro_DP_Streaming"),
        ("DP/zero/intro_DP_ZeRO.py", "--shard weights", "intro_DP_FSDP"),
        ("collectives/intro_collectives.py", "--rounds 3", "compare_collectives"),
        ("hybrid/intro_hybrid.py", "--dp 3 --pp 2", "intro_hybrid"),
        ("hybrid/intro_hybrid.py", "--shard optimizer", "intro_5d"),
        ("TP/intro_TP.py", "--sequence-parallel", "intro_TP_styles"),
        ("PP/microbatches/intro_PP_microbatches.py", "--schedule interleaved", "intro_PP_schedules"),
        ("PP/microbatches/intro_PP_microbatches.py", "--run-on", "intro_PP_schedules"),
    ],
)
def test_a_flag_finds_its_script(script: str, flags: str, runs: str) -> None:
    found, _ = read_script_for(LAB / script, flags.split(), "launch.sh")
    assert found.path.stem == runs


@pytest.mark.parametrize(
    ("script", "more", "flags", "runs"),
    [
        (DILOCO, DILOCO, "--sync-every 4", "intro_DP_DiLoCo"),
        (DILOCO, "DP/streaming/intro_DP_Streaming.py", "--sync-every 4 --fragments 2", "intro_DP_Streaming"),
        (GA, "DP/buckets/intro_DP_buckets.py", "", "intro_DP_GA"),
        (GA, "DP/buckets/intro_DP_buckets.py", "--compress topk", "intro_DP_buckets"),
    ],
)
def test_a_run_is_resumed_by_the_script_that_can(script: str, more: str, flags: str, runs: str, tmp_path: Path) -> None:
    train_on(1, more, tmp_path, *flags.split(), *"--world-size 1 --steps 4 --save-every 4".split())
    resume = f"--resume {tmp_path} --steps 6 --world-size 2".split()
    found, _ = read_script_for(LAB / script, resume, "launch.sh")
    assert found.path.stem == runs
