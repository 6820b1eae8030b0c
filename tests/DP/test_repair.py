"""`--repair`: a rank dies at a given point of a step, and the run goes on with the losses of the undisturbed one."""

import json
from pathlib import Path

import pytest
from support.chapters import losses, train_on
from support.processes import children
from support.terminals import fork_launcher

from distlab.checkpoints.format import latest_valid

pytestmark = pytest.mark.waits

STEPS, DIES_IN = 6, 2
SHAPE = "--data sample --dmodel 32 --num-heads 2 --n-layers 2 --seq-len 24 --device cpu --timeout 20".split()
FLAGS = [*SHAPE, *f"--steps {STEPS} --batch-size 2 --micro-batches 2 --optimizer sgd --lr 0.5".split()]

# The chapter's script, in which ranks pass numbered points within a step: before and after the loss of each micro-batch
# (0 to 3), the sum of the gradients (4, 5), `run.log` (6, 7), and the completion of a checkpoint (8, 9).
DYING = f"""
'''The chapter's script, whose ranks die where DEATHS says.'''
import json, os, signal, sys, time
sys.path.insert(0, {str(Path(__file__).parents[2] / "DP/repair")!r})
import intro_DP_repair as lesson
from support.held import mappings, pipes_and_memory, threads
from distlab.checkpoints import saving
from distlab.comm.waits import TrafficError
from distlab.run.main import main

DEFAULTS = lesson.DEFAULTS
DEATHS = json.loads(os.environ["DEATHS"])

def train(run):
    now = dict(step=-1, point=0)
    held = []

    def reach():
        for death in DEATHS[:]:
            *where, how = death
            if where == [run.rank, now["step"], now["point"]]:
                DEATHS.remove(death)
                if how == "exception":
                    raise ValueError("a bad row")
                if how == "lost":  # when rank 0 has gone on
                    time.sleep(0.5)
                    raise TrafficError("lost", RuntimeError("Connection closed by peer"))
                os.kill(os.getpid(), getattr(signal, how))
        now["point"] += 1

    def with_points(function):
        def call(*args, **options):
            reach()
            result = function(*args, **options)
            reach()
            return result
        return call

    def steps(stories, of_run=run.steps):
        for step, batch in of_run(stories):
            held.append((mappings(), pipes_and_memory(), threads()))
            now.update(step=step, point=0)
            yield step, batch

    lesson.causalLLMLoss, lesson.add_up = with_points(lesson.causalLLMLoss), with_points(lesson.add_up)
    run.log, run.steps = with_points(run.log), steps
    saving.together = with_points(saving.together)
    if os.environ.get("LEAVE_OUT"):
        lesson.share_out = lambda replicas, parts, alive, whole: {{r: [(r, k) for k in range(parts)] for r in alive}}
    lesson.train(run)
    (run.out / f"held{{run.rank}}.json").write_text(json.dumps(held))

if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Those of one process."""
    flags = [*FLAGS, "--batch-size", "6"]
    return train_on(1, "primer/intro.py", tmp_path_factory.mktemp("one process"), *flags)[-1]


def run_with(deaths: list[tuple[int, int, int, str]], out: Path, *flags: str, **environment: str) -> str:
    """Run the script with these deaths (rank, step, point, how); return what it prints."""
    script = out.with_suffix(".py")
    script.write_text(DYING)
    launcher = fork_launcher(script, *FLAGS, *flags, "--out", out, DEATHS=json.dumps(deaths), **environment)
    ended = launcher.finish()
    assert ended.status == 0, ended.err
    assert not children(launcher.pid)
    steps = [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(STEPS)), "each step once"
    return ended.out


@pytest.mark.parametrize("transport", ["shared", "gloo"])
@pytest.mark.parametrize(
    "deaths",
    [
        [(0, DIES_IN, 1, "SIGKILL")],  # the writer, between its micro-batches
        [(1, DIES_IN, 5, "SIGSTOP")],  # between the sums of the gradients and of the losses
        [(2, DIES_IN, 4, "exception"), (1, DIES_IN, 7, "SIGKILL")],  # then another, in the repeated step
        [(1, DIES_IN, 7, "lost"), (2, DIES_IN + 1, 0, "SIGKILL")],  # rank 0 has to undo the step that rank 1 lacks
    ],
    ids=["kill", "stop", "two", "undo"],
)
def test_the_losses_are_those_of_the_undisturbed_run(
    deaths: list[tuple[int, int, int, str]], transport: str, expected: list[float], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    printed = run_with(deaths, out, "--transport", transport)
    assert losses(out) == pytest.approx(expected, abs=1e-6)
    dead = [rank for rank, _, _, how in deaths if how != "lost"]
    alive = [rank for rank in range(3) if rank not in dead]
    for rank in dead:
        assert f"# rank {rank} was terminated by SIG" in printed or f"# rank {rank} failed: " in printed
    for rank in alive:
        counts = json.loads((out / f"held{rank}.json").read_text())
        assert all(after <= before for before, after in zip(counts[1], counts[-1], strict=True)), counts


@pytest.mark.parametrize("transport", ["shared", "gloo"])
def test_exact_is_bit_for_bit_the_same_run(transport: str, tmp_path: Path) -> None:
    flags = ["--repair", "exact", "--transport", transport]
    run_with([], tmp_path / "undisturbed", *flags)
    run_with([(0, DIES_IN, 5, "SIGKILL"), (2, DIES_IN + 1, 1, "SIGKILL")], tmp_path / "run", *flags)
    assert losses(tmp_path / "run") == losses(tmp_path / "undisturbed")


@pytest.mark.parametrize("point", [8, 9])
def test_a_death_while_saving_costs_no_checkpoint(point: int, expected: list[float], tmp_path: Path) -> None:
    out = tmp_path / "run"
    run_with([(0, DIES_IN, point, "SIGKILL")], out, "--save-every", str(DIES_IN + 1))
    assert losses(out) == pytest.approx(expected, abs=1e-6)
    saved = sorted((out / "checkpoints").iterdir())
    assert [latest_valid(folder).step for folder in saved] == [DIES_IN + 1, STEPS]


def test_without_the_rows_of_the_dead_the_losses_differ(expected: list[float], tmp_path: Path) -> None:
    run_with([(2, DIES_IN, 1, "SIGKILL")], tmp_path / "run", LEAVE_OUT="1")
    own = losses(tmp_path / "run")
    assert own[:DIES_IN] == pytest.approx(expected[:DIES_IN], abs=1e-6)
    assert abs(own[DIES_IN] - expected[DIES_IN]) > 0.1
