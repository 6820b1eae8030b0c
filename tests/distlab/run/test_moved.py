"""Flags that have moved to a chapter's second script, and runs of before the move."""

from pathlib import Path

import pytest
from support.chapters import MODEL, TRAINING, train_on
from support.processes import LAB
from support.terminals import fork_launcher, fork_python

from distlab.run.moved import SECOND, second_script
from distlab.run.start import read_script

pytestmark = pytest.mark.quick
GA, DILOCO = "DP/gradient_aggr/intro_DP_GA.py", "DP/diloco/intro_DP_DiLoCo.py"


@pytest.mark.parametrize("script", SECOND)
def test_the_second_script_has_the_flags_and_the_plain_one_has_not(script: str) -> None:
    second = SECOND[script]
    plain, other = (vars(read_script(LAB / path).defaults) for path in (script, second.script))
    assert second.flags.keys() <= other.keys() - plain.keys()


@pytest.mark.parametrize(
    ("script", "flags", "second"),
    [
        (GA, "--steps 3", None),
        (GA, "--compress topk", "dp-buckets"),
        (GA, "0 --all_reduce=ring", "dp-buckets"),
        (DILOCO, "--sync-every 4", None),
        (DILOCO, "--sync-every 4 --fragments 2", "streaming-diloco"),
        ("DP/zero/intro_DP_ZeRO.py", "--shard weights", "dp-fsdp"),
        ("hybrid/intro_hybrid.py", "--shard weights", None),
    ],
)
def test_a_moved_flag_is_found(script: str, flags: str, second: str | None) -> None:
    found = second_script(LAB / script, flags.split())
    assert (found.name if found else None) == second


@pytest.mark.parametrize(
    ("script", "flags", "second"),
    [
        (DILOCO, "--sync-every 4", None),
        (DILOCO, "--sync-every 4 --fragments 2", "streaming-diloco"),
        (GA, "--compress topk", "dp-buckets"),
    ],
)
def test_a_run_is_resumed_by_the_script_that_can(script: str, flags: str, second: str | None, tmp_path: Path) -> None:
    own = SECOND[script].script if second else script
    train_on(2, own, tmp_path, *flags.split(), "--world-size", "2", "--save-every", "2")
    found = second_script(LAB / script, ["0", "--resume", str(tmp_path)])
    assert (found.name if found else None) == second


def test_it_runs_from_the_launcher_and_in_a_terminal(tmp_path: Path) -> None:
    flags = [*MODEL, *TRAINING, "--steps", "1", "--compress", "topk", "--world-size", "1"]
    for started in (
        fork_launcher("dp-ga", *flags, "--out", tmp_path / "a"),
        fork_python(GA, 0, *flags, "--out", tmp_path / "b"),
    ):
        ended = started.finish()
        assert ended.status == 0, ended.err
        assert "# intro_DP_buckets: 1 rank" in ended.out
