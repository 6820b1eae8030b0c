"""./launch.sh and the scripts' command lines, as a user meets them: what they print, how they end, what they leave."""

import itertools
import json
import os
import shlex
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.chapters import records
from support.processes import (
    LAB,
    alive,
    children,
    finish,
    free_port,
    process_of,
    run,
    start,
    steps_taken,
    wait_for,
    wait_for_steps,
)
from support.terminals import fork_command, fork_launcher, fork_python

from distlab.launch import TOPOLOGIES
from distlab.launch import launch as launch_command

TINY = "--dmodel 16 --num-heads 2 --n-layers 1 --seq-len 16 --data sample --device cpu".split()
GA = "DP/gradient_aggr/intro_DP_GA.py"


def test_without_arguments_it_lists_the_topologies_with_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    ended = run("./launch.sh")
    assert ended.status == 0
    for name in TOPOLOGIES:
        (line,) = [line for line in ended.out.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 5
    assert launch_command(["launch"]) == 0  # as the installed command passes it on
    assert capsys.readouterr().out == ended.out


def test_it_starts_without_what_only_runs_and_plans_need() -> None:
    late = ["torch", "tyro", "sentencepiece", "distlab_planner.plan", "distlab.settings.training"]
    code = f"import sys, distlab.launch; print(*sys.modules.keys() & set({late}))"
    ended = run(sys.executable, "-c", code)
    assert (ended.status, ended.out) == (0, "\n"), ended.err


def test_a_run_prints_a_line_a_step_and_leaves_its_records(tmp_path: Path) -> None:
    flags = [*TINY, "--steps", "3", "--world-size", "2", "--transport", "shared", "--out", tmp_path]
    ended = run("./launch.sh", "dp-ga", *flags)
    assert ended.status == 0, ended.err
    lines = ended.out.splitlines()
    steps = [line.split() for line in lines if not line.startswith("#")]
    assert [step[0] for step in steps] == ["0", "1", "2"]
    assert "# intro_DP_GA: 2 ranks over gloo on cpu, 1 thread each" in lines[:4]
    assert any("the generator" in line for line in lines[:4]), "the first lines say where the stories come from"
    for number, (step, record) in enumerate(zip(steps, records(tmp_path), strict=True)):
        assert record["step"] == number
        assert float(step[1]) == pytest.approx(record["loss"], abs=1e-7)
        assert record["tokens"] == (number + 1) * 2 * 16
        assert record["seconds"] > 0
        assert record["tokens_per_second"] == pytest.approx(32 / record["seconds"], rel=0.01)
        assert record["peak_memory_bytes"] > 50e6
        assert record["sent_bytes"]["gradients"] > 0
    assert not (tmp_path / "checkpoints").exists(), "without --save-every"
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["settings"]["steps"] == 3
    own = {"layout": {"dp": 2}, "world_size": 2, "script": str(LAB / GA), "backend": "gloo", "data": "sample"}
    own |= {"command": shlex.join(["./launch.sh", "dp-ga", *map(str, flags)])}
    assert {name: config[name] for name in own} == own
    for rank in range(2):
        log = (tmp_path / f"rank{rank}.log").read_text().splitlines()
        assert [line.split()[:2] for line in log if not line.startswith("#")] == [step[:2] for step in steps]
    summary = "\n".join(line for line in lines if line.startswith("#"))
    assert "warning" not in summary
    for part in ("tokens/s", "computed for", "waited", "of gradients in", "peak memory of rank 0"):
        assert part in summary
    assert "changed nothing" not in summary


def test_shared_memory_that_is_asked_for_but_not_used_is_remarked_on(tmp_path: Path) -> None:
    ended = fork_launcher(
        "ddp", *TINY, "--steps", "1", "--world-size", "1", "--transport", "shared", "--out", tmp_path
    ).finish()
    assert ended.status == 0, ended.err
    assert "\n# --transport shared changed nothing: this run put nothing into shared memory\n" in ended.out


def test_ranks_in_separate_terminals(tmp_path: Path) -> None:
    port = str(free_port())
    flags = [*TINY, "--steps", "2", "--master-port", port, "--out", str(tmp_path)]
    ended = [rank.finish() for rank in [fork_python(GA, str(rank), *flags) for rank in (2, 1, 0)]]
    assert [end.status for end in ended] == [0, 0, 0], [end.err for end in ended]
    losses = [[line.split()[:2] for line in end.out.splitlines() if not line.startswith("#")] for end in ended]
    assert losses[0] == losses[1] == losses[2]
    assert len(losses[0]) == 2


FAILING = """
'''A script whose rank 1 fails.'''
import os, signal, sys, torch
from distlab.run.main import main
from distlab.settings.replicas import DataParallelSettings
from simplellm.errors import InputError
DEFAULTS = DataParallelSettings()
def train(run):
    open(__file__ + f".{{run.rank}}.pid", "w").write(f"{{os.getpid()}} {{torch.initial_seed()}}")
    for step, batch in run.steps(iter(lambda: torch.zeros(1, 2), None)):
        if step == 2 and run.rank == 1:
            {failure}
        run.log(step, [batch.sum()])
if __name__ == "__main__":
    main(train, DEFAULTS, __doc__)
"""


@pytest.mark.quick
@pytest.mark.parametrize(
    ("failure", "status", "last_line"),
    [
        ("raise RuntimeError('the disk is on fire')", 1, "# rank 1 failed: RuntimeError: the disk is on fire"),
        ("assert None", 1, "# rank 1 failed: AssertionError"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 1, "# rank 1 was terminated by SIGKILL"),
        ("os._exit(7)", 7, "# rank 1 failed with exit status 7"),
        ("raise InputError('--lr 9: give 1')", 2, "# rank 1 failed: --lr 9: give 1"),
    ],
)
def test_a_failed_rank_ends_all_and_is_named_in_the_last_line(
    failure: str, status: int, last_line: str, tmp_path: Path
) -> None:
    script = tmp_path / "failing.py"
    script.write_text(FAILING.format(failure=failure))
    started = time.monotonic()
    ended = fork_launcher(script, "--data", "sample", "--seed", "5", "--out", tmp_path / "run").finish()
    assert ended.status == status
    assert [line for line in ended.err.splitlines() if line == last_line] == ended.err.splitlines()[-1:] == [last_line]
    assert time.monotonic() - started < 40
    ranks = [map(int, file.read_text().split()) for file in tmp_path.glob("*.pid")]
    pids, seeds = zip(*ranks, strict=True)
    assert sorted(seeds) == [5, 6, 7], "each draws random numbers of its own"
    assert len({*pids}) == 3
    assert not any(alive(pid) for pid in pids)


@pytest.mark.parametrize("topology", ["ddp", "dp-ga --transport shared", "pp-dapple --transport gloo"])
def test_a_killed_rank_is_named_whatever_carries_the_messages(topology: str, tmp_path: Path) -> None:
    launcher = fork_launcher(*topology.split(), *TINY, "--steps", "1000000", "--out", tmp_path)
    wait_for_steps(tmp_path, launcher, steps=1)
    os.kill(process_of(1, children(launcher.pid)), signal.SIGKILL)
    ended = launcher.finish(30)
    stage = " (stage 1)" * topology.startswith("pp-")
    assert ended.err.splitlines()[-1] == f"# rank 1{stage} was terminated by SIGKILL"
    assert "Traceback" not in ended.err


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize(
    "sent", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGKILL], ids=lambda sent: sent.name
)
def test_ending_the_launcher_leaves_no_process_behind(sent: signal.Signals, tmp_path: Path) -> None:
    launcher = fork_launcher("dp-ga", *TINY, "--steps", "1000000", "--out", tmp_path)
    try:
        wait_for_steps(tmp_path, launcher, steps=1)
        ranks = children(launcher.pid)
        assert len(ranks) >= 3
        if sent is signal.SIGINT:
            os.killpg(launcher.pid, sent)  # what Ctrl-C does
        else:
            launcher.send_signal(sent)
        ended = finish(launcher, 30)
        assert ended.status != 0
        assert wait_for(lambda: not any(alive(pid) for pid in ranks), 10)
        assert "Traceback" not in ended.err
        if sent is signal.SIGINT:
            assert f"# logs and metrics are in {tmp_path}" in ended.out
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.usefixtures("in_the_foreground")
@pytest.mark.parametrize("after", [0.1, 0.4, 1.0, 1.7])
def test_ctrl_c_while_it_starts_prints_no_traceback_and_is_not_lost(after: float, tmp_path: Path) -> None:
    """In launch.py's imports, in those of torch, in numpy's, which torch can do without, and while ranks start."""
    launcher = start("./launch.sh", "dp-ga", *TINY, "--steps", "1000000", "--out", tmp_path)
    command_line = Path(f"/proc/{launcher.pid}/cmdline")
    assert wait_for(lambda: "distlab.launch" in command_line.read_text()), "bash has become Python"
    time.sleep(after)
    os.killpg(launcher.pid, signal.SIGINT)
    ended = finish(launcher, 30)
    assert ended.status in (130, -signal.SIGINT), "a shell shows both as 130"
    assert "Traceback" not in ended.err


@pytest.mark.usefixtures("in_the_foreground")
def test_ctrl_c_is_not_lost_in_a_program_that_catches_it(tmp_path: Path) -> None:
    """Such as pyenv's python3, which launch.sh asks first whether it has what the lab needs."""
    begun, shim = tmp_path / "begun", tmp_path / "python3"
    shim.write_text(f"#!/usr/bin/env bash\ntrap 'exit 1' INT\ntouch {begun}\nsleep 0.5\nexit 1\n")
    shim.chmod(0o755)
    launcher = start("./launch.sh", "--help", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert wait_for(begun.exists)
    os.killpg(launcher.pid, signal.SIGINT)
    assert finish(launcher, 30).status == 130


def test_a_run_under_nohup_outlives_its_terminal(tmp_path: Path) -> None:
    steps, under_nohup = 80, partial(signal.signal, signal.SIGHUP, signal.SIG_IGN)
    command = [str(LAB / "launch.sh"), "dp-ga", *TINY, "--steps", str(steps), "--out", str(tmp_path)]
    launcher = fork_command(command, under_nohup)
    try:
        wait_for_steps(tmp_path, launcher, steps=1)
        os.killpg(launcher.pid, signal.SIGHUP)  # what a terminal does that closes
        assert steps_taken(tmp_path) < steps
        assert finish(launcher, 60).status == 0
        assert steps_taken(tmp_path) == steps
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)


@pytest.mark.parametrize("flags", ["", "--save-every 7", "--out {out}", "--nnodes 2 --node-rank 1 --out {out}"])
def test_a_model_that_tells_a_story_is_saved_at_the_end(
    flags: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Node 0 has it tell: in the folder that the ranks were given, when they have finished."""
    monkeypatch.chdir(tmp_path)
    ran: list[list[str]] = []
    told: list[tuple[Path, str]] = []
    statuses = [0, 1]

    def ended(_: object, args: list[str], *__: object) -> int:
        ran.append(args)
        return statuses[len(ran) - 1]

    def tell(run: Path, prompt: str, device: str) -> int:
        told.append((run, prompt))
        return 0

    monkeypatch.setattr("distlab.launching.start.run_ranks", ended)
    monkeypatch.setattr("distlab.launching.start.tell_story", tell)
    address = "--master-addr 10.0.0.1" if "--nnodes" in flags else ""
    command = f"dp-ga --world-size 2 --steps 50 {flags.format(out=tmp_path / 'kept')} {address}".split()
    for status in statuses:
        assert launch_command([*command, "--tell", "Once upon a time"]) == status
    args = ran[0]
    every = [value for flag, value in itertools.pairwise(args) if flag == "--save-every"]
    assert every == (["7"] if "save" in flags else ["50"])
    out = Path(args[args.index("--out") + 1])
    assert out == tmp_path / "kept" if "--out" in flags else out.parent == Path("runs/intro_DP_GA")
    assert told == ([] if "--nnodes" in flags else [(out, "Once upon a time")])
    assert "--tell" not in args


def test_a_port_in_use_is_named_by_the_launcher_and_by_rank_0(tmp_path: Path) -> None:
    with socket.socket() as busy:
        busy.bind(("localhost", 0))
        busy.listen()
        port = str(busy.getsockname()[1])
        flags = [*TINY, "--master-port", port, "--out", tmp_path]
        for process in (fork_launcher("dp-ga", *flags), fork_python(GA, "0", *flags)):
            ended = process.finish()
            assert ended.status == 2
            assert f"--master-port {port}: cannot listen" in ended.err.splitlines()[-1]
            assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("script", "flags", "sentence"),
    [
        (GA, ["3"], "rank 3: --world-size 3 has the ranks 0 to 2"),
        (GA, [], "no rank given: --world-size 3 has the ranks 0 to 2"),
        (GA, ["x"], "'x' is not the value of a flag, nor a rank"),
        (GA, "--betas 0.9 0.95 0.99".split(), "'0.99' is not the value of a flag, nor a rank"),
        ("primer/intro.py", ["1"], "rank 1: one process has only rank 0"),
        ("primer/intro.py", ["--device", "cuda"], "--device cuda"),
    ],
)
def test_a_wrong_value_in_a_terminal(script: str, flags: list[str], sentence: str) -> None:
    ended = fork_python(script, *flags, CUDA_VISIBLE_DEVICES="").finish()
    assert ended.status == 2
    assert sentence in ended.err.splitlines()[-1]
    assert "Traceback" not in ended.err
    assert "which runs now" not in ended.out


def test_quickstart_is_a_run_whose_model_tells_a_story(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its flags, of which the user's own may replace any."""
    monkeypatch.chdir(tmp_path)
    ran: list[Any] = []

    def ended(_: object, args: list[str], settings: object, *__: object) -> int:
        ran.append(settings)
        return 1

    monkeypatch.setattr("distlab.launching.start.run_ranks", ended)
    assert launch_command(["quickstart", "--steps", "9", "--world-size", "3"]) == 1
    (settings,) = ran
    assert (settings.steps, settings.world_size, settings.data, settings.lr) == (9, 3, "sample", 2e-3)
