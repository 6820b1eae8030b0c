"""`--repair`: a rank dies at a given point of a step, and the run goes on with the losses of the undisturbed one."""

import json
import re
import runpy
from pathlib import Path

import pytest
from support.chapters import losses, records, train_on
from support.processes import LAB
from support.repairs import DIES_IN, SHAPE, STEPS, run_dying, run_with
from support.terminals import fork_python

from distlab.checkpoints.format import latest_valid
from distlab.comm.recorder import DEATH
from distlab.launching import local_ranks
from distlab.launching.forks import fork_ranks
from distlab.reports.trace import read_chrome
from distlab.settings.common import parse
from distlab.settings.replicas import RepairSettings

LESSON = "DP/repair/intro_DP_repair.py"
FLAGS = f"--n-layers 2 --steps {STEPS} --batch-size 2 --micro-batches 2 --optimizer sgd --lr 0.5".split()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of one process."""
    flags = [*SHAPE, *FLAGS, "--batch-size", "6"]
    return train_on(1, "primer/intro.py", tmp_path_factory.mktemp("one process"), *flags)[-1]


@pytest.mark.parametrize(
    ("deaths", "flags"),
    [
        ([(0, DIES_IN, 1, "SIGKILL")], "--transport shared"),  # the writer, between its micro-batches
        ([(1, DIES_IN, 5, "SIGSTOP")], "--transport shared"),  # between the sums of the gradients and of the losses
        # Another rank dies in the repeated step.
        ([(0, DIES_IN, 4, "SIGKILL"), (2, DIES_IN, 7, "exception")], "--transport gloo --trace"),
        # Rank 0 has to undo the step that rank 1 lacks.
        ([(1, DIES_IN, 7, "lost"), (2, DIES_IN + 1, 0, "SIGKILL")], "--transport gloo"),
    ],
    ids=["kill", "stop", "two", "undo"],
)
def test_the_losses_are_those_of_the_undisturbed_run(
    deaths: list[tuple[int, int, int, str]], flags: str, expected: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    printed = run_with(deaths, out, LESSON, *FLAGS, *flags.split())
    assert losses(out) == pytest.approx(expected, abs=1e-6)
    for rank in (rank for rank, _, _, how in deaths if how != "lost"):
        assert f"# rank {rank} was terminated by SIG" in printed or f"# rank {rank} failed: " in printed
    if "--trace" in flags:
        events = read_chrome(out / "trace.json").oldest.events
        told = [event.name.split()[:2] for event in events if event.kind == DEATH]
        assert told == [["rank", str(rank)] for rank, *_ in deaths], "each of them once"


@pytest.mark.parametrize(("within", "transport"), [("agree", "shared"), ("groups", "gloo")])
def test_a_death_within_the_repair(within: str, transport: str, expected: list[float], tmp_path: Path) -> None:
    """Before a rank has told how far it is, and when the others know it, and make their groups."""
    deaths = [(0, DIES_IN, 5, "SIGKILL"), (1, DIES_IN, 0, within)]
    printed = run_with(deaths, tmp_path / "run", LESSON, *FLAGS, "--transport", transport)
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)
    assert "# rank 0 was terminated by SIGKILL; rank 1 was terminated by SIGKILL: rank 2 goes on with step 2" in printed


def test_exact_is_bit_for_bit_the_same_run(tmp_path: Path) -> None:
    # Of three numbers, the sum depends on which two are added up first.
    flags = [*FLAGS, *"--batch-size 3 --micro-batches 3 --repair exact --transport gloo".split()]
    run_with([], tmp_path / "undisturbed", LESSON, *flags)
    deaths = [(0, DIES_IN, 5, "SIGKILL"), (1, DIES_IN + 1, 7, "SIGKILL")]
    printed = run_with(deaths, tmp_path / "run", LESSON, *flags, "--run-on")
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")
    steps = [line.partition(" ")[0] for line in printed.splitlines() if not line.startswith("#")]
    assert steps == [str(step) for step in range(STEPS)], "the first rank had not printed step 1, the second has step 2"
    kept = [(tmp_path / name / "ledger.json").exists() for name in ("undisturbed", "run")]
    assert kept == [True, False], "after a repair, nobody knows which rank has sent how much"


@pytest.mark.parametrize(
    "deaths",
    [
        [(0, DIES_IN, 8, "SIGKILL")],
        # The checkpoint is complete, and rank 1 has yet to go on with the next step.
        [(1, DIES_IN, 9, "lost"), (0, DIES_IN + 1, 0, "SIGKILL")],
    ],
    ids=["unfinished", "complete"],
)
def test_a_death_while_saving_costs_no_checkpoint(
    deaths: list[tuple[int, int, int, str]], expected: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    often = f"--save-every 1 --keep {STEPS} --eval-every {DIES_IN + 1} --eval-sequences 2".split()
    printed = run_with(deaths, out, LESSON, *FLAGS, *often)
    assert losses(out) == pytest.approx(expected, abs=1e-6)
    assert printed.count("# validation after ") == 1, "the others evaluate again, and say nothing new"
    saved = sorted((out / "checkpoints").iterdir())
    assert [latest_valid(folder).step for folder in saved] == [*range(1, STEPS + 1)]


def test_a_loss_that_arrives_before_the_record_of_its_step_is_in_it(expected: list[float], tmp_path: Path) -> None:
    """With `--run-on`, the others know it when rank 1 dies between its update and the comparison of the replicas."""
    flags = [*FLAGS, *"--run-on --clip-norm 1000 --compare-every 1 --transport gloo".split()]
    printed = run_with([(1, DIES_IN, 8, "late")], tmp_path / "run", LESSON, *flags)
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)
    assert "grad_norm" in records(tmp_path / "run")[DIES_IN]
    assert "steps that were taken again" not in printed


def test_a_spare_that_comes_while_a_checkpoint_is_saved_saves_it_with_the_others(
    expected: list[float], tmp_path: Path
) -> None:
    """Point 10 is where the two others, each with three micro-batches, complete it."""
    out, flags = tmp_path / "run", [*FLAGS, "--spares", "1", "--save-every", str(DIES_IN + 1)]
    printed = run_with([(1, DIES_IN, 1, "SIGKILL"), (0, DIES_IN, 10, "lost")], out, LESSON, *flags)
    assert printed.count(" is back") == 1
    assert losses(out) == pytest.approx(expected, abs=1e-6)
    assert sorted(latest_valid(folder).step for folder in (out / "checkpoints").iterdir()) == [DIES_IN + 1, STEPS]
    assert len(json.loads((out / "memory.json").read_text())) == 3, "also of the spare, which has taken other steps"


def test_those_that_are_left_divide_the_validation_split_among_them(tmp_path: Path) -> None:
    flags = [*FLAGS, *"--clip-norm 0.3 --eval-every 4 --eval-sequences 7".split()]  # after the death
    train_on(1, "primer/intro.py", tmp_path / "one", *SHAPE, *flags, "--batch-size", "6")
    printed = run_with([(0, DIES_IN, 1, "SIGKILL")], tmp_path / "run", LESSON, *flags)
    held = printed.partition("# memory, MB")[2].splitlines()[1]
    assert held.startswith(("# rank 1 ", "# ranks 1, 2 "))
    expected, own = (records(tmp_path / name)[3]["validation_loss"] for name in ("one", "run"))
    assert own == pytest.approx(expected, rel=1e-6)


def test_after_a_death_before_the_first_step_all_ranks_start_again(
    expected: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As forks, which a run without `--max-restarts` has for its first start alone."""
    monkeypatch.setattr(local_ranks, "fork_ranks", lambda script, count: fork_ranks(script, 2 * count))
    run_with([(1, -1, 0, "SIGKILL")], tmp_path / "run", LESSON, *FLAGS)
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)


def test_after_the_last_rank_has_died_all_start_again_from_the_checkpoint(
    expected: list[float], tmp_path: Path
) -> None:
    """They die the second death again."""
    flags = [*FLAGS, *"--world-size 2 --batch-size 3 --micro-batches 3 --save-every 2 --max-restarts 1".split()]
    printed = run_with([(1, 1, 1, "SIGKILL"), (0, 4, 1, "SIGKILL")], tmp_path / "run", LESSON, *flags)
    assert "# resuming from " in printed
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("flags", "alive", "cores", "slower"),
    [
        ([], [0, 1], 8, 3 / 2),  # six micro-batches on two ranks, instead of two on each
        ([], [2], 8, 3),
        ([], [0, 1], 2, 1),  # two cores had as much to do before
        (["--repair", "exact"], [0, 1], 8, 2),  # one of them does all work of the dead one
        (["--world-size", "4"], [0, 1, 2], 8, 3 / 2),  # one of three has a micro-batch less than the others
    ],
)
def test_the_plan_of_a_death(flags: list[str], alive: list[int], cores: int, slower: float) -> None:
    assert parse(RepairSettings(), "", [*FLAGS, *flags]).slowdown(alive, cores) == pytest.approx(slower)


def test_the_micro_batches_of_the_dead_go_around_among_the_living() -> None:
    assign = runpy.run_path(str(LAB / LESSON))["assign"]
    assert assign(3, 2, [0, 2]) == {0: [0, 1, 2], 2: [4, 5, 3]}
    assert assign(3, 2, [0, 2], together=2) == {0: [0, 1, 2, 3], 2: [4, 5]}
    assert assign(4, 2, [2, 3], together=2) == {2: [4, 5, 0, 1], 3: [6, 7, 2, 3]}


def test_the_usual_time_of_a_step_is_one_with_all_ranks(tmp_path: Path) -> None:
    """Here, a rank dies before there are enough of them, so that there is nothing to compare with."""
    deaths = [(2, 1, 1, "SIGKILL"), (1, 8, 1, "SIGKILL")]
    printed = run_with(deaths, tmp_path / "run", LESSON, *FLAGS, "--steps", "15", steps=15)
    assert "rank 0 goes on with step 8" in printed
    assert "times as long" not in printed


def test_only_a_launcher_repairs(tmp_path: Path) -> None:
    ended = fork_python(LESSON, "0", *SHAPE, *FLAGS, "--out", tmp_path).finish(10)
    assert ended.status == 2
    why = "only launch.sh notices deaths; start the ranks with it, or with --repair off"
    assert ended.err.splitlines()[-1] == f"# --repair: {why}"


def test_an_exception_before_the_first_step_ends_the_run_at_once(tmp_path: Path) -> None:
    ended = run_dying([(1, -1, 0, "exception")], LESSON, *FLAGS, "--out", tmp_path / "run")
    assert ended.status
    assert (ended.out + ended.err).count("ValueError: a bad import") == 1


def test_a_rank_whose_weights_have_changed_ends_and_is_replaced_from_another(
    expected: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    flags = [*FLAGS, "--compare-every", str(DIES_IN + 1), "--spares", "2"]  # right after the weights have changed
    deaths = [(2, DIES_IN, 7, "corrupt"), (-1, -1, 1, "SIGKILL")]  # also of the first spare, while it waits
    printed = run_with(deaths, out, LESSON, *flags)
    told = "# rank 2 failed: its weights are not those that most of ranks 0, 1 and 2 have"
    assert 0 < printed.find(told) < printed.find(f"\n{DIES_IN + 1} "), "before the next step"
    assert losses(out) == pytest.approx(expected, abs=1e-6)


def test_of_two_replicas_that_differ_neither_is_believed(tmp_path: Path) -> None:
    flags = [*FLAGS, "--world-size", "2", "--compare-every", str(DIES_IN + 1), "--out", tmp_path]
    ended = run_dying([(1, DIES_IN, 7, "corrupt")], LESSON, *flags)
    assert ended.status == 1
    why = "the weights of ranks 0 and 1 differ, and nobody knows which are right; resume a checkpoint"
    assert f"failed: {why}" in ended.err.splitlines()[-1]
    assert len(losses(tmp_path)) == DIES_IN


def test_a_newcomer_that_becomes_the_writer_goes_on_counting_tokens_and_hands_the_count_on(
    expected: list[float], tmp_path: Path
) -> None:
    """It, like the third, has been started when there were checkpoints."""
    deaths = [(rank, 1 + number, 1, "SIGKILL") for number, rank in enumerate((1, 2, 0))]
    flags = [*FLAGS, *"--spares 3 --save-every 1".split()]
    printed = run_with(deaths, tmp_path / "run", LESSON, *flags, ALL_BACK="1")
    assert printed.count(" is back") == 3
    assert losses(tmp_path / "run") == pytest.approx(expected, abs=1e-6)
    log = (tmp_path / "run/rank0.log").read_text()
    assert re.findall(r"^\d+(?= )", log, re.MULTILINE)[:3] == ["0", "1", "2"], "a newcomer goes on with it"


def test_a_newcomer_to_a_resumed_run_counts_the_tokens_before_the_checkpoint(tmp_path: Path) -> None:
    """The run before it had larger batches. The checkpoint from which it resumes is deleted before a rank dies."""
    out = tmp_path / "run"
    train_on(1, "primer/intro.py", out, *SHAPE, *FLAGS, *"--batch-size 6 --steps 1 --save-every 1".split())
    flags = [*FLAGS, *"--world-size 2 --batch-size 2 --steps 6 --save-every 1 --keep 2 --spares 1 --resume".split()]
    deaths = [(1, 3, 1, "SIGKILL"), (0, 5, 1, "SIGKILL")]
    resumed = str(latest_valid(out).folder)
    printed = run_with(deaths, out, LESSON, *flags, resumed, first=1, steps=6, ALL_BACK="1")
    assert printed.count(" is back") == 1
    found = [path.name for path in sorted((out / "checkpoints").iterdir())]
    assert found == [f"step-{step:08}" for step in (5, 6)], "it moves none of those that the others have written"


def test_a_rank_holds_after_three_deaths_what_it_held_before(tmp_path: Path) -> None:
    out, places = tmp_path / "run", (1, 2, 1)  # whose spares come back at once, behind rank 0
    deaths = [(rank, 6 + 2 * number, number, "SIGKILL") for number, rank in enumerate(places)]
    flags = [*FLAGS, *"--steps 18 --spares 3 --transport shared".split()]
    printed = run_with(deaths, out, LESSON, *flags, steps=18, ALL_BACK="1", WATCH="True")
    assert printed.count(" is back") == 3
    told = re.search(r"takes (\S+) s instead of (\S+) s: (\S+) times as long, 1\.00 by the plan for ", printed)
    assert told, "it is compared with the steps before the first death"
    now, usual, times = map(float, told.groups())
    assert times == pytest.approx(now / usual, rel=0.02, abs=0.006)
    held = json.loads((out / "held0.json").read_text())["steps"]
    assert held["2"] == held["8"] == held["17"]


def test_a_spare_that_finds_no_weights_does_not_end_the_run_as_if_it_were_complete(tmp_path: Path) -> None:
    """The only rank that has them dies after the spare has joined, and before the end of its step."""
    deaths = [(1, DIES_IN, 1, "SIGKILL"), (0, DIES_IN, 5, "replaced")]  # in the repeated step, with all micro-batches
    ended = run_dying(deaths, LESSON, *FLAGS, *"--world-size 2 --spares 1 --out".split(), tmp_path / "run")
    assert ended.status
    assert "no rank is left that could give rank 1 its weights" in ended.out + ended.err
    assert "Traceback" not in ended.err, ended.err
