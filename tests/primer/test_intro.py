"""The first training script: how much of the lab a reader of it meets."""

import os
import subprocess
import sys
from pathlib import Path

from support.processes import LAB

MOST_FILES, MOST_LINES = 60, 6360

COUNT = """
import os, runpy, sys

def print_and_exit(status):  # a run ends its process so
    files = {module.__file__ for module in [*sys.modules.values()] if getattr(module, "__file__", None)}
    own = sorted(file for file in files if file.startswith(os.getcwd() + "/src/"))
    for file in own:
        print("file", sum(1 for _ in open(file)), file)
    sys.stdout.flush()
    end(status)

end, os._exit = os._exit, print_and_exit
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_a_reader_of_one_process_meets_few_files(tmp_path: Path) -> None:
    """Code that only several ranks or rarer flags need must not be imported; the stories are not encoded yet."""
    flags = "--steps 2 --data sample --dmodel 32 --n-layers 1 --seq-len 32 --num-heads 2".split()
    command = [sys.executable, "-c", COUNT, "primer/intro.py", *flags, "--out", str(tmp_path / "run")]
    env = {**os.environ, "PYTHONPATH": str(LAB / "src"), "SIMPLELLM_CACHE": str(tmp_path)}
    ended = subprocess.run(command, cwd=LAB, capture_output=True, text=True, timeout=60, env=env)
    assert ended.returncode == 0, ended.stderr
    lines = [int(line.split()[1]) for line in ended.stdout.splitlines() if line.startswith("file ")]
    assert len(lines) > 20, "the files were not counted"
    assert len(lines) <= MOST_FILES, ended.stdout
    assert sum(lines) <= MOST_LINES, ended.stdout
