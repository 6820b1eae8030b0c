"""The wheel: what is installed works without the checkout, from an empty folder."""

import shutil
import subprocess
import sys
import sysconfig
import venv
from importlib.util import find_spec
from pathlib import Path

import pytest
from support.processes import LAB, Ended, run

from distlab.launch import TOPOLOGIES

CHECKOUT = (
    "src primer DP PP TP CP EP hybrid collectives mpi pyproject.toml setup.py MANIFEST.in README.md LICENSE".split()
)
TINY = "--steps 2 --dmodel 16 --num-heads 2 --n-layers 1 --seq-len 16 --data sample --device cpu".split()
USER_SCRIPT = """
'''A script of a user's own.'''
from distlab.run.main import main
from distlab.settings.training import TrainSettings
from distlab.run.training import TrainingRun
import distlab, distlab_compare, distlab_exercises, distlab_figures, distlab_page, distlab_planner
import distlab_playground, simplellm, sys
DEFAULTS = TrainSettings(steps=1)
def work(run):
    for name, module in [*sys.modules.items()]:
        if name == "simplellm" or name.startswith("distlab") and "." not in name:
            print("#", module.__file__)
if __name__ == "__main__":
    main(work, DEFAULTS, __doc__)
"""


class Installed:
    """An environment that has the wheel, and this one's packages, but not its checkout."""

    def __init__(self, folder: Path) -> None:
        checkout, self.empty, environment = folder / "checkout", folder / "empty", folder / "environment"
        checkout.mkdir()
        self.empty.mkdir()
        for name in CHECKOUT:
            copy = shutil.copytree if (LAB / name).is_dir() else shutil.copyfile
            copy(LAB / name, checkout / name)
        pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
        quiet = ["--no-deps", "--no-build-isolation", "--no-index"]
        subprocess.run([*pip, "wheel", *quiet, "--wheel-dir", folder, checkout], check=True)
        [wheel] = folder.glob("*.whl")
        venv.create(environment, with_pip=False, symlinks=True)
        self.python = environment / "bin/python"
        [packages] = environment.glob("lib/python*/site-packages")
        # Not as a site folder: its .pth files would name the checkout.
        (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
        # "--ignore-installed": the other environment may have the checkout as an editable install of the same version.
        install = ["install", "--no-deps", "--no-index", "--ignore-installed"]
        subprocess.run([*pip, "--python", self.python, *install, wheel], check=True)

    def run(self, program: str, *args: object, deadline: float = 60) -> Ended:
        command = self.python.parent / program
        return run(command, *args, deadline=deadline, cwd=self.empty, PYTHONPATH="", HF_HUB_OFFLINE="1")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_the_command_lists_and_launches_the_chapters(installed: Installed) -> None:
    listed = installed.run("distlab", "--help")
    assert listed.status == 0, listed.err
    for name in TOPOLOGIES:
        (line,) = [line for line in listed.out.splitlines() if line.split()[:1] == [name]]
        assert len(line.split()) > 5
    ended = installed.run("distlab", "launch", "dp-ga", *TINY, "--world-size", "2")
    assert ended.status == 0, ended.err
    assert [line.split()[0] for line in ended.out.splitlines() if not line.startswith("#")] == ["0", "1"]
    assert "# save the model next time: distlab launch dp-ga --steps 2" in ended.out
    if find_spec("plotly"):
        assert "/page.html" in installed.run("distlab", "page", "runs/intro_DP_GA").out


def test_the_planner_and_the_exercises_are_in_it(installed: Installed) -> None:
    machine = LAB / "docs/machines/cluster.json"
    planned = installed.run("distlab", "plan", "--machine", machine, "--ranks", "4", "--top", "2")
    assert planned.status == 0, planned.err
    assert "\n1   distlab 5d " in planned.out
    shown = installed.run("distlab", "show-schedule", "dapple", "--stages", "2")
    assert "F0" in shown.out, shown.err
    written = installed.run("distlab", "exercise", "all-reduce", "my")
    assert written.status == 0, written.err
    assert "# check it: distlab check my/" in written.out
    assert "start the playground in a checkout of the lab" in installed.run("distlab", "playground").err


def test_a_script_of_a_user_imports_what_is_installed(installed: Installed) -> None:
    script = installed.empty / "mine.py"
    script.write_text(USER_SCRIPT)
    ended = installed.run("distlab", script, "--data", "sample")
    assert ended.status == 0, ended.err
    modules = [line[2:] for line in ended.out.splitlines() if line.endswith("__init__.py")]
    assert len(modules) == 8
    assert all(Path(module).is_relative_to(installed.python.parents[1]) for module in modules), modules
