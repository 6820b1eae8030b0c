"""Scripts of a user's own under launch.sh: what their files define is there before any rank starts."""

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from support.processes import LAB, children, free_port
from support.terminals import fork_launcher, fork_python

from distlab.launch import TOPOLOGIES, find_script, launch
from distlab.launching.local_ranks import temporary_folder
from distlab.launching.nodes import LOST_NODE_0, ElsewhereError, NodeRendezvous
from distlab.launching.processes import RankFailure
from distlab.launching.start import check_story, read_program_flags, tell_story, whole_sentences
from distlab.rendezvous.store import StoreError
from distlab.settings.common import RunSettings
from distlab.settings.help import more_flags
from distlab.settings.replicas import DataParallelSettings
from distlab.settings.scripts import read_script, read_script_for
from distlab.settings.training import TrainSettings
from primer.tell_story import Settings
from simplellm.command_line import as_command
from simplellm.errors import InputError

TINY = "--dmodel 16 --num-heads 2 --n-layers 2 --seq-len 16 --data sample --device cpu --world-size 2".split()

PIPELINE = f"""
'''A pipeline with a schedule of its own.'''
import sys
from pathlib import Path
{{before}}
sys.path.append({str(LAB / "PP/microbatches")!r})
from intro_PP_microbatches import train
from distlab.pipeline.actions import Action, Backward, Forward
from distlab.pipeline.schedules import schedule
from distlab.run.main import main
from distlab.settings.stages import ScheduledPipelineSettings

@schedule()
def mine(worker: int, workers: int, micro_batches: int) -> list[Action]:
    passes = [(Forward, number) for number in range(micro_batches)]
    return [kind(worker, number) for kind, number in passes + [(Backward, number) for _, number in passes]]

DEFAULTS = ScheduledPipelineSettings(batch_size=3)

if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""


@pytest.fixture(autouse=True)
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())


def test_a_schedule_that_the_script_s_own_file_registers(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(PIPELINE.format(before=""))
    ended = fork_launcher(script, "--schedule", "mine", *TINY, "--steps", "2", "--out", tmp_path / "run").finish()
    assert ended.status == 0, ended.err
    assert len([line for line in ended.out.splitlines() if not line.startswith("#")]) == 2
    refused = fork_launcher(script, "--schedule", "yours", *TINY).finish()
    assert (refused.status, refused.out) == (2, "")
    assert refused.err.startswith("# --schedule yours: give one of naive, gpipe, ")
    assert refused.err.endswith(", mine, 1f1b\n")


@pytest.mark.quick
def test_a_script_that_takes_over_has_the_ranks_that_torchrun_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for further in ("--schedule zb-v", "--schedule interleaved", "--trace", "--run-on"):
        flags = f"{further} --n-layers 2 --batch-size 2 --micro-batches 2"  # for the six stages of three ranks, too few
        found, settings = read_script_for(LAB / "PP/microbatches/intro_PP_microbatches.py", flags.split())
        assert (found.path.stem, settings.layout) == ("intro_PP_schedules", {"pp": 2})
    for further in ("--schedule auto", "--run-on"):
        assert read_script_for(LAB / "hybrid/intro_hybrid.py", further.split())[0].path.stem == "intro_5d"


def test_of_several_machines_the_first_tells_the_story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tell = Mock(return_value=0)
    monkeypatch.setattr("distlab.launching.start.run_ranks", lambda *_: 0)
    monkeypatch.setattr("distlab.launching.start.tell_story", tell)
    flags = f"--nnodes 2 --master-addr 192.0.2.7 --tell Once --out {tmp_path} --node-rank".split()
    for node in "10":
        assert launch(["dp-ga", *TINY, *flags, node]) == 0
        assert tell.call_count == (node == "0")


def test_a_program_has_as_many_ranks_as_a_run_may_have() -> None:
    assert read_program_flags(["--world-size", "1024", "--steps", "3"])[1] == ["--steps", "3"]


def test_a_refusal_is_not_about_a_flag_that_was_not_given(tmp_path: Path) -> None:
    """The last script that might take the flags would go on when a rank dies."""
    (tmp_path / "checkpoints/step-00000001").mkdir(parents=True)
    flags = f"--out {tmp_path} --save-every 1 --eval-every 1".split()
    assert read_script_for(LAB / "primer/intro.py", flags[:2]), "no checkpoint would be in its place"
    with pytest.raises(InputError, match=f"^--out {tmp_path}: .* is in the way"):
        read_script_for(LAB / "hybrid/intro_hybrid.py", flags)
    with pytest.raises(InputError, match=f"^--out {tmp_path}: .* is in the way"):  # of the checkpoint of the story
        launch(["dp-ga", "--out", str(tmp_path), "--tell", "Once"])
    with pytest.raises(InputError, match=r"^--repair on with --eval-every: "):
        read_script_for(LAB / "hybrid/intro_hybrid.py", [*flags, "--repair"])


def test_a_script_that_computes_when_it_is_imported(tmp_path: Path) -> None:
    """With several threads, which a fork of the launcher would wait for without end."""
    script = tmp_path / "mine.py"
    computed = "import torch; torch.set_num_threads(2); (torch.ones(500, 500) @ torch.ones(500, 500)).exp().sum()"
    script.write_text(PIPELINE.format(before=computed))
    flags = [*TINY, "--world-size", "1", "--steps", "1", "--out", tmp_path / "run"]
    ended = fork_launcher(script, *flags, OMP_NUM_THREADS="2").finish()
    assert ended.status == 0, ended.err


def test_a_folder_is_no_script(tmp_path: Path) -> None:
    (folder := tmp_path / "mine.py").mkdir()
    with pytest.raises(InputError, match=r"mine\.py: no such topology or script"):
        find_script(str(folder))


def test_settings_of_a_script_anywhere(tmp_path: Path) -> None:
    """With what it imports from its own folder, and annotations of its own."""
    (tmp_path / "beside_the_script.py").write_text("SECONDS = 7\n")
    (tmp_path / "script.py").write_text('''"""What it is."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from beside_the_script import SECONDS
from distlab.settings.common import RunSettings
Kind = Literal["a", "b"]
@dataclass
class Settings(RunSettings):
    kind: Kind = "a"
DEFAULTS = Settings()
DEFAULTS.timeout = SECONDS
''')
    script = read_script(tmp_path / "script.py")
    settings = script.parse(["--kind", "b"], "./launch.sh script.py")
    assert isinstance(settings, RunSettings)
    assert (settings.timeout, getattr(settings, "kind", None), script.description) == (7, "b", "What it is.")


@pytest.mark.parametrize("name", sorted(TOPOLOGIES.keys() - {"mpi", "hello"}))
def test_the_settings_of_each_script_are_found(name: str) -> None:
    path, flags = find_script(name)
    script = read_script(path)
    assert not script.has_threads, "its ranks may be forks"
    if "--tell" not in flags:
        script.parse(flags, name)


@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ("It rained. Ben was", "It rained. …"),
        ("It rained. Ben ran.", "It rained. Ben ran."),
        ('"Come!" he said. She said, "I', '"Come!" he said. …'),
        ("It", "It"),
    ],
)
def test_a_story_that_stopped_at_a_limit_ends_with_a_whole_sentence(told: str, shown: str) -> None:
    ending = "# stopped after --max-tokens 3"
    assert [*whole_sentences(["Tim and Ben\n", f"{told}\n", f"{ending}\n"])] == ["Tim and Ben", shown, ending]
    assert next(whole_sentences([f"{told}\n", "# the model ended its story\n"])) == told


def test_the_beginning_of_a_story_may_be_as_long_as_the_resumed_model_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = SimpleNamespace(record={"model": {"ctx_size": 64}})
    monkeypatch.setattr("distlab.launching.start.latest_valid", lambda *_, **__: found)
    settings = TrainSettings(seq_len=2, resume=tmp_path)
    assert check_story("Once upon a time", settings, "script.py") is settings


@pytest.mark.parametrize("prompt", ["Once", "", "- Hello", "--seed=1"])
def test_a_story_is_printed_in_comments(
    prompt: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tell(asked: Settings) -> int:
        print(f"Am\u00e9lie sang {asked.prompt} {asked.device} {asked.temperature} {asked.model}.\n# 3 tokens")
        return 3

    monkeypatch.setattr("distlab.launching.start.tell", as_command(tell, Settings, None))
    assert tell_story(tmp_path, prompt, "cpu") == 3
    assert capsys.readouterr().out == f"# Am\u00e9lie sang {prompt} cpu 0.5 {tmp_path}.\n# 3 tokens\n"


LOST = RankFailure(1, {"message": "rank 1 is gone", "status": 1, "lost_a_peer": True, "names_rank": True}, 5)


@pytest.mark.parametrize(
    ("end", "status", "told", "told_elsewhere"),
    [
        ({0: LOST}, 1, "rank 1 is gone", "rank 1 is gone"),
        (InputError("spare 1: no room"), 2, "spare 1: no room", "spare 1: no room"),
        (ElsewhereError("on another machine, node 1, nan"), 1, "on another machine, node 1, nan", ""),
        (StoreError("no answer", TimeoutError()), 1, LOST_NODE_0, ""),
    ],
)
def test_how_ranks_ended_is_told_here_and_to_other_machines_unless_they_know(
    end: Any, status: int, told: str, told_elsewhere: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script := tmp_path / "never_started.py").touch()
    monkeypatch.setattr("distlab.launching.local_ranks.supervise", Mock(side_effect=[end]))
    monkeypatch.setattr(
        NodeRendezvous, "leave", lambda _, cause: print(f"left: {cause}", children(os.getpid()), flush=True)
    )
    ended = fork_launcher(script).finish()
    assert (ended.status, ended.err, ended.out) == (status, f"# {told}\n", f"left: {told_elsewhere} []\n")


def test_a_node_0_that_was_never_found_has_not_exited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (script := tmp_path / "never_started.py").touch()
    silent = Mock(side_effect=StoreError("node 0 does not answer", TimeoutError()))
    monkeypatch.setattr("distlab.launching.local_ranks.NodeRendezvous", silent)
    ended = fork_launcher(script).finish()
    assert (ended.status, ended.err) == (1, "# node 0 does not answer\n")


@pytest.mark.parametrize(("kills", "by"), [(0, "SIGKILL"), (1, "SIGKILL"), (1, "SIGABRT")])
def test_a_rank_killed_for_memory_is_named_as_that(
    kills: int, by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(f"import os, signal\nos.kill(os.getpid(), signal.{by})\n")
    counts = iter([5, 5 + kills])
    monkeypatch.setattr("distlab.launching.local_ranks.memory_kills", lambda: next(counts))
    ended = fork_launcher(script, "--world-size", "1").finish()
    assert ended.status == 1
    assert ended.err.endswith(" had no memory left\n") == ((kills, by) == (1, "SIGKILL")), ended.err


LESSON = '''
"""A lesson."""
import os
from distlab.run.main import main
from distlab.settings.replicas import {settings}
DEFAULTS = {settings}(device="cpu", steps=1, data="sample")
MORE = "more.py"
def train(run):
    print(f"this is {name} of {{run.world_size}} at {{os.environ['HOME']}}")
if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
'''


@pytest.mark.parametrize(("flags", "name"), [([], "lesson"), (["--sync-every", "2"], "more")])
@pytest.mark.parametrize("starts_alone", [False, True])
def test_a_script_with_more_flags_takes_over(flags: list[str], name: str, starts_alone: bool, tmp_path: Path) -> None:
    (tmp_path / "lesson.py").write_text(LESSON.format(settings="DataParallelSettings", name="lesson"))
    (tmp_path / "more.py").write_text(LESSON.format(settings="LocalStepsSettings", name="more"))
    flags = [*flags, "--world-size", "1", "--out", str(tmp_path / "run")]
    if starts_alone:
        ended = fork_python(tmp_path / "lesson.py", "0", *flags, "--master-port", free_port()).finish()
    else:
        ended = fork_launcher(tmp_path / "lesson.py", *flags).finish()
    assert ended.status == 0, ended.err
    assert f"this is {name} of 1 at {os.environ['HOME']}\n" in ended.out
    assert ended.out.startswith("# these flags are those of more.py, which runs now\n") == (name == "more")


def test_the_last_script_says_which_value_is_wrong(tmp_path: Path) -> None:
    first, last = (LESSON.format(settings=f"{name}Settings", name=name) for name in ("LocalSteps", "TensorParallel"))
    (tmp_path / "lesson.py").write_text(first)
    (tmp_path / "more.py").write_text(last.replace("settings.replicas", "settings.slices"))
    with pytest.raises(InputError, match=r"^--num-heads 6 among 4 tensor-parallel ranks"):  # nor does it clip
        read_script_for(tmp_path / "lesson.py", "--clip-norm 1 --world-size 4".split())


def test_help_names_the_flags_of_a_script_that_names_itself(tmp_path: Path) -> None:
    (tmp_path / "more.py").write_text(LESSON.format(settings="LocalStepsSettings", name="more"))
    told = "more.py runs instead with --sync-every (see --help of more.py), and with values that this script refuses."
    assert more_flags(DataParallelSettings(), tmp_path / "more.py").strip() == told


def test_a_rank_that_fails_before_it_has_joined_the_others_is_named(tmp_path: Path) -> None:
    """As one that finds no room on its GPU."""
    path = tmp_path / "lesson.py"
    lesson = LESSON.format(settings="DataParallelSettings", name="lesson")
    path.write_text(lesson.replace("DEFAULTS", "from distlab.run import joining\njoining.devices = None\nDEFAULTS", 1))
    ended = fork_python(path, "1", "--world-size", "2").finish()
    assert ended.status == 1
    assert ended.err.splitlines()[-1].startswith("# rank 1 failed: AttributeError"), ended.err


def test_without_the_other_script_a_lesson_refuses_its_flags(tmp_path: Path) -> None:
    """As a copy of it in a student's folder, also one that has the other script's name, and so names itself."""
    for name in ("lesson.py", "more.py"):
        (tmp_path / name).write_text(LESSON.format(settings="DataParallelSettings", name="lesson"))
        with pytest.raises(InputError, match="--sync-every"):
            read_script_for(tmp_path / name, ["--sync-every", "2"])


def test_the_ranks_files_are_deleted_also_after_an_interruption() -> None:
    folders: list[Path] = []

    def work() -> None:
        with temporary_folder() as folder:
            folders.append(folder)
            assert folder.is_dir()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert not folders[0].exists()
