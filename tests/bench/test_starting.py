"""bench/starting.py: when it stops the clock, and that it leaves no process."""

import signal
from pathlib import Path
from types import FrameType, ModuleType

import pytest
from support.chapters import load
from support.processes import wait_for

from simplellm.errors import InputError

PROGRAM = """
import subprocess, sys, time
sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
child = subprocess.Popen(sleep, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
open(sys.argv[0] + ".pid", "w").write(str(child.pid))
print("# 100 steps")
{then}
time.sleep(600)
"""


@pytest.fixture
def starting() -> ModuleType:
    return load("bench/starting.py")


def written(folder: Path, then: str) -> str:
    script = folder / "run.py"
    script.write_text(PROGRAM.format(then=then))
    return f"python {script}"


def is_gone(script: str) -> bool:
    pid = int(Path(f"{script.split()[1]}.pid").read_text())
    return wait_for(lambda: not Path(f"/proc/{pid}").exists(), seconds=10)


def test_a_run_is_killed_at_its_first_loss(
    starting: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = written(tmp_path, "print('0 8.38', flush=True)")
    monkeypatch.setattr(starting, "FIRST_LOSS", (command,))
    assert 0 < starting.seconds_of(command, str(tmp_path)) < 60
    assert is_gone(command)


def test_ctrl_c_leaves_no_process(starting: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(number: int, frame: FrameType | None) -> None:
        if not (tmp_path / "run.py.pid").exists():
            return
        signal.setitimer(signal.ITIMER_REAL, 0)
        raise KeyboardInterrupt

    command = written(tmp_path, "")
    monkeypatch.setattr(starting, "FIRST_LOSS", (command,))
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.5, 0.5)
    try:
        with pytest.raises(KeyboardInterrupt):
            starting.seconds_of(command, str(tmp_path))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert is_gone(command)


def test_a_run_without_a_loss_is_an_error(
    starting: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = written(tmp_path, "sys.exit(3)")
    monkeypatch.setattr(starting, "FIRST_LOSS", (command,))
    with pytest.raises(InputError, match="ended with status 3: # 100 steps"):
        starting.seconds_of(command, str(tmp_path))
    assert is_gone(command)
