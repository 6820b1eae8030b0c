"""environment.sh installs the build of torch that fits the machine: a real index, and a pip that is watched."""

import importlib.util
import json
import os
import socket
import stat
import subprocess
import sys
import threading
import time
import venv
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from support.processes import LAB, Ended, finish, start

pytestmark = pytest.mark.skipif(importlib.util.find_spec("pip") is None, reason="needs pip")

NO_DRIVER = "has_driver() { false; }"  # this machine may have one
MIRROR = "https://mirror.invalid/simple"
CPU = "# torch: the CPU build, about 200 MB, from {index} ({why})"
CUDA = "# torch: PyPI's CUDA build, about 3 GB with NVIDIA's libraries ({why})"

# In place of pip: notes each installation, and has pip do what needs no network but that of the test's index.
PIP = f"""
import json, os, sys
from pathlib import Path

flags = sys.argv[1:]
into = []
if flags[0] == "install":
    with Path(__file__).with_name("installed.jsonl").open("a") as log:
        log.write(json.dumps(flags) + "\\n")
    if "--index-url" not in flags:
        sys.exit(os.environ.get("FAILURE"))
    into = ["--python", sys.executable]
del os.environ["PYTHONPATH"]
os.execv({sys.executable!r}, [{sys.executable!r}, "-m", "pip", *into, *flags])
"""


@dataclass
class Lab:
    """A folder with environment.sh and a .venv/ that is empty but for Python; `programs` is first on the PATH."""

    path: Path
    programs: Path

    def shell(self, commands: str, **environment: str) -> Ended:
        """Run shell commands that use the functions of environment.sh, to their end."""
        script, path = f"set -euo pipefail; source environment.sh; {commands}", f"{self.programs}:{os.environ['PATH']}"
        return finish(start("bash", "-c", script, cwd=self.path, PATH=path, no_proxy="127.0.0.1", **environment))

    def prepare(self, before: str = NO_DRIVER, **environment: str) -> Ended:
        """Run `prepare requirements.txt`, after the shell commands `before`."""
        return self.shell(f'{before}; prepare requirements.txt; echo "$python"', **environment)

    def installed(self) -> list[list[str]]:
        """What pip was told to install, call by call, without the flags that say how."""
        log = self.path / "src/installed.jsonl"
        calls = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
        return [[flag for flag in call[1:] if flag not in ("-qq", "--disable-pip-version-check")] for call in calls]

    @property
    def rest(self) -> list[str]:
        """The installation of all that is not there yet, from wherever pip looks by itself."""
        return ["-r", str(self.path / "requirements.txt"), "-e", str(self.path)]


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    for name in [name for name in os.environ if name.startswith(("PIP_", "LAB_TORCH"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    lab = Lab(tmp_path / "lab", tmp_path / "programs")
    (lab.path / "src").mkdir(parents=True)
    for name in ("environment.sh", "pyproject.toml"):
        (lab.path / name).write_text((LAB / name).read_text())
    # No environment that is active has the second one, so that .venv/ is needed.
    (lab.path / "requirements.txt").write_text("torch==2.13.0\nno-such-package==1.0\n")
    (lab.path / "src/pip.py").write_text(PIP)  # environment.sh puts src/ before all other modules
    venv.create(lab.path / ".venv", with_pip=False, symlinks=True)
    lab.programs.mkdir()
    return lab


def add_program(lab: Lab, name: str, script: str) -> None:
    program = lab.programs / name
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)


@dataclass
class Index:
    """A place that should have CPU builds."""

    url: str
    requests: list[str] = field(default_factory=list)


@contextmanager
def index_with(version: str, folder: Path) -> Iterator[Index]:
    """An index over HTTP with one package, torch, in one version, which requires a package that the index has not."""
    name = f"torch-{version}"
    (folder / "torch").mkdir(parents=True)
    with zipfile.ZipFile(folder / "torch" / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("torch/__init__.py", "")
        info = f"{name}.dist-info"
        needs = "Requires-Dist: no-such-package"
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: torch\nVersion: {version}\n{needs}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    link = f"{name}-py3-none-any.whl".replace("+", "%2B")
    (folder / "torch/index.html").write_text(f'<!DOCTYPE html><a href="{link}">{name}</a>')
    requests: list[str] = []

    class Handler(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            requests.append(self.path)

    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=str(folder))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield Index(f"http://127.0.0.1:{server.server_port}", requests)
        server.shutdown()


@pytest.fixture
def index(tmp_path: Path) -> Iterator[Index]:
    with index_with("2.13.0+cpu", tmp_path / "index") as index:
        yield index


@pytest.fixture
def silent() -> Iterator[Index]:
    """What takes connections, and does not answer."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield Index(f"http://127.0.0.1:{listener.getsockname()[1]}")


def torch_lines(ended: Ended) -> list[str]:
    """What is said of torch's build."""
    return [line for line in ended.err.splitlines() if line.startswith("# torch")]


def test_the_cpu_build_comes_from_pytorchs_index_and_all_else_does_not(lab: Lab, index: Index) -> None:
    """The exact version, which is not installed twice."""
    failed = lab.prepare(LAB_TORCH_INDEX=index.url, FAILURE="no room")
    assert failed.status == 1
    sentence = "# pip could not install requirements.txt, for the reason above; run the command again to continue"
    assert failed.err.splitlines()[-2:] == ["no room", sentence]
    why = "there is no NVIDIA driver; LAB_TORCH=cuda takes PyPI's CUDA build"
    assert torch_lines(failed) == [CPU.format(index=index.url, why=why)]
    assert lab.installed() == [["--index-url", index.url, "--no-deps", "torch==2.13.0"], lab.rest]
    assert any(path.endswith(".whl") for path in index.requests)
    assert all(path.startswith("/torch/") for path in index.requests), "nothing else was looked for there"
    python = lab.path / ".venv/bin/python"
    version = 'from importlib.metadata import version; print(version("torch"))'
    assert subprocess.check_output([python, "-c", version], text=True, timeout=60) == "2.13.0+cpu\n"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--no-index", "--no-deps", "torch==2.13.0"]
    assert "already satisfied" in subprocess.check_output(pip, text=True, timeout=60)

    index.requests.clear()
    again = lab.prepare(LAB_TORCH_INDEX=index.url)
    assert again.status == 0
    assert torch_lines(again) == []
    assert lab.installed()[2:] == [lab.rest]
    assert not index.requests


def test_the_cpu_build_can_be_chosen_where_there_is_a_driver_and_where_pip_is_configured(
    lab: Lab, index: Index
) -> None:
    add_program(lab, "nvidia-smi", "exit 9")
    ended = lab.prepare("true", LAB_TORCH="cpu", LAB_TORCH_INDEX=index.url, PIP_INDEX_URL=MIRROR)
    assert ended.status == 0, ended.err
    assert torch_lines(ended) == [CPU.format(index=index.url, why="as LAB_TORCH says")]
    assert lab.installed() == [["--index-url", index.url, "--no-deps", "torch==2.13.0"], lab.rest]


def test_what_another_launch_installs_is_waited_for_and_not_installed_again(lab: Lab) -> None:
    made = f"cp {lab.path}/requirements.txt {lab.path}/.venv/"
    add_program(lab, "flock", f"[ /dev/fd/$1 -ef {lab.path}/.venv.lock ] && {made}")  # the other has ended meanwhile
    ended = lab.prepare()
    assert (ended.status, ended.err, ended.out.strip()) == (0, "", str(lab.path / ".venv/bin/python"))
    assert lab.installed() == []


def test_the_playground_is_installed_when_it_is_asked_for(lab: Lab) -> None:
    for name in ("launch.sh", "requirements-playground.txt"):
        (lab.path / name).write_text((LAB / name).read_text())
    path = f"{lab.programs}:{os.environ['PATH']}"
    for name in ("hybrid", "playground"):  # there is nothing to run in this folder
        finish(start("bash", "launch.sh", name, cwd=lab.path, PATH=path, LAB_TORCH="cuda"))
    assert lab.installed() == [lab.rest, ["-r", str(lab.path / "requirements-playground.txt"), *lab.rest[2:]]]


def test_with_a_driver_torch_comes_from_pypi(lab: Lab, index: Index) -> None:
    add_program(lab, "nvidia-smi", "exit 9")
    ended = lab.prepare("true", LAB_TORCH_INDEX=index.url)
    assert ended.status == 0, ended.err
    why = "there is an NVIDIA driver; LAB_TORCH=cpu takes the CPU build, about 200 MB"
    assert torch_lines(ended) == [CUDA.format(why=why)]
    assert lab.installed() == [lab.rest]
    assert not index.requests


@pytest.mark.parametrize("is_silent", [True, False])
def test_an_index_that_is_silent_or_without_torch_does_not_count(
    is_silent: bool, lab: Lab, silent: Index, index: Index
) -> None:
    url, started = silent.url if is_silent else f"{index.url}/elsewhere", time.monotonic()
    ended = lab.prepare(LAB_TORCH_INDEX=url)
    assert time.monotonic() - started < 20, "two seconds, and what a busy machine adds"
    assert ended.status == 0, ended.err
    why = f"there is no NVIDIA driver, but {url}, which has CPU builds, does not answer"
    assert torch_lines(ended) == [CUDA.format(why=why)]
    assert lab.installed() == [lab.rest]


def test_an_index_without_this_version_ends_in_a_sentence(lab: Lab, tmp_path: Path) -> None:
    with index_with("2.12.0+cpu", tmp_path / "index") as index:
        ended = lab.prepare(LAB_TORCH_INDEX=index.url)
    assert ended.status == 1
    sentence = (
        f"# pip could not install torch==2.13.0 from {index.url}, for the reason above; LAB_TORCH=cuda takes PyPI's"
    )
    assert ended.err.splitlines()[-1] == sentence
    assert len(lab.installed()) == 1, "three gigabytes are not fetched unasked"


@pytest.mark.parametrize("system", ["Linux", "Darwin"])
def test_where_pip_is_configured_and_elsewhere_than_on_linux_torch_comes_from_where_pip_looks(
    system: str, lab: Lab, index: Index
) -> None:
    settings = lab.path / "pip.conf"
    settings.write_text(f"[install]\nindex_url = {MIRROR}\n" if system == "Linux" else "")
    add_program(lab, "uname", f"echo {system}")
    ended = lab.prepare(LAB_TORCH_INDEX=index.url, PIP_CONFIG_FILE=str(settings))
    assert ended.status == 0, ended.err
    assert torch_lines(ended) == []
    assert lab.installed() == [lab.rest]
    assert not index.requests


def test_each_place_where_pip_is_told_to_look_counts(lab: Lab) -> None:
    places = {"INDEX_URL": MIRROR, "EXTRA_INDEX_URL": MIRROR, "FIND_LINKS": "/wheels", "NO_INDEX": "1"}
    for name, value in places.items():
        assert lab.shell("python=python3; has_indexes", **{f"PIP_{name}": value}).status == 0, name


def test_an_environment_is_checked_whatever_python_leaves_out(lab: Lab) -> None:
    """Under PYTHONOPTIMIZE no assertion holds, and there are no docstrings. The CUDA build may be chosen anywhere."""
    ended = lab.prepare(PYTHONOPTIMIZE="2", LAB_TORCH="cuda")
    assert ended.status == 0, ended.err
    assert torch_lines(ended) == [CUDA.format(why="as LAB_TORCH says")]
    assert lab.installed() == [lab.rest]
    assert ended.out.strip() == str(lab.path / ".venv/bin/python")


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("PYTHONIOENCODING", "latin-9x", "LookupError: unknown encoding: latin-9x"),
        ("PYTHONHOME", "/nowhere", "ModuleNotFoundError: No module named 'encodings'"),
    ],
)
def test_variables_with_which_python_does_not_start_are_told(lab: Lab, name: str, value: str, why: str) -> None:
    ended = lab.prepare(**{name: value})
    assert ended.status == 2
    sentence = f"# Python does not start with the variables PYTHON... of this shell ({why}); correct or unset them"
    assert ended.err.splitlines() == [sentence]


def test_another_choice_is_refused(lab: Lab) -> None:
    ended = lab.prepare(LAB_TORCH="rocm")
    assert ended.status == 2
    sentence = "# LAB_TORCH=rocm: give cpu or cuda, or leave it out for the build that fits this machine"
    assert ended.err.splitlines() == [sentence]
    assert lab.installed() == []
