"""How processes leave, end with their parents, and refuse limits that are too low."""

import contextlib
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import run

from distlab.machine.processes import LEAST_OPEN_FILES, require_open_files
from simplellm.errors import InputError

# Threads that are always about to come back from torch. With `sys.exit`, ten of twelve such processes aborted: so
# there are three of them, forked after the imports.
ASKS_WITHOUT_END = """
import os, threading
import torch.distributed as dist
from distlab.machine.processes import leave

for _ in range(3):
    if not (child := os.fork()):
        break
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)  # or the next fork would have it, too
else:
    leave(0)

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def ask() -> None:
    while True:
        store.check(["a key"])

for _ in range(4):
    threading.Thread(target=ask, daemon=True).start()
print("goodbye")
leave(3)
"""


def test_a_process_leaves_while_threads_are_inside_of_torch() -> None:
    ended = subprocess.run([sys.executable, "-c", ASKS_WITHOUT_END], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "goodbye\n3\n" * 3, "")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the processes of a parent that was killed")
@pytest.mark.quick
def test_a_parent_that_died_before_it_was_asked_for_ends_its_child(tmp_path: Path) -> None:
    """The child asks for it when the parent is dead."""
    child = f"""
import os, signal, sys, time
from distlab.machine.processes import end_with_parent
parent = os.getpid()
if os.fork() > 0:
    os._exit(0)
while os.getppid() == parent:
    time.sleep(0.01)
open({str(tmp_path / "asks")!r}, "w")
end_with_parent(signal.SIGKILL, parent)
open({str(tmp_path / "lives")!r}, "w")
"""
    assert run(sys.executable, "-c", child).status == 0
    assert (tmp_path / "asks").exists(), "its output ends with the child"
    assert not (tmp_path / "lives").exists()


@pytest.mark.parametrize("most", [LEAST_OPEN_FILES - 1, LEAST_OPEN_FILES, resource.RLIM_INFINITY])
def test_a_limit_on_open_files_that_is_too_low_for_a_rank_is_refused(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [(1, most)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    refused = pytest.raises(InputError, match=f"^a process may have {most} open files, and a rank needs {most + 1}; ")
    with refused if most == LEAST_OPEN_FILES - 1 else contextlib.nullcontext():
        require_open_files()
