"""The lab as it is called: from any folder and through links, with streams closed, on machines that lack something."""

import itertools
import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.processes import LAB, Ended, run
from support.terminals import CLONE_NEWNET, CLONE_NEWNS, fork_command, fork_launcher, unshare

LAUNCH = str(LAB / "launch.sh")
TINY = "--device cpu --data sample --dmodel 16 --num-heads 2 --n-layers 2 --seq-len 16 --batch-size 1 --steps 2".split()
RANK_0 = str(LAB / "DP/gradient_aggr/intro_DP_GA.py")
TWO = [LAUNCH, "dp-ga", "--world-size", "2", *TINY]


def in_shell(command: str, cwd: Path, **environment: Any) -> Ended:
    return run("bash", "-c", command, cwd=cwd, **environment)


def shown(*command: object) -> str:
    return shlex.join(map(str, command))


def can_unshare(*flags: str) -> bool:
    """Whether this user may have namespaces of their own."""
    return (
        shutil.which("unshare") is not None and subprocess.run(["unshare", *flags, "true"], check=False).returncode == 0
    )


def test_no_module_of_the_current_folder_is_imported_and_an_old_locale_and_few_open_files_end_no_run(
    tmp_path: Path,
) -> None:
    """The folder may be a stranger's model; an empty entry of PYTHONPATH is that folder, too.

    The soft limit on open files is raised.
    """
    old: dict[str, Any] = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "OMP_PROC_BIND": "false"}
    for name in ("queue", "random", "copy", "numpy", "runpy", "re", "torch", "pip", "venv", "simplellm"):
        (tmp_path / f"{name}.py").write_text(f"open('ran-{name}', 'w').close(); raise SystemExit(3)")
    for command, entry in (([LAUNCH], ""), (TWO, "::/nowhere:")):
        ended = in_shell(f"ulimit -Sn 30; exec {shown(*command)}", tmp_path, PYTHONPATH=entry, **old)
        assert not list(tmp_path.glob("ran-*"))
        assert ended.status == 0, ended.err
        assert "OMP_PROC_BIND" not in ended.err, "which binds no thread"
        assert "preparing" not in ended.err, "the active environment has all that is needed"


@pytest.mark.parametrize("called", ["lab/launch.sh", "links/further.sh", "linked/launch.sh"])
def test_launch_sh_is_found_through_links_and_with_cdpath(called: str, tmp_path: Path) -> None:
    (tmp_path / "lab").symlink_to(LAB)
    (tmp_path / "linked").symlink_to("lab")
    (tmp_path / "link.sh").symlink_to(LAUNCH)
    (tmp_path / "links").mkdir()
    (tmp_path / "links/further.sh").symlink_to("../link.sh")
    (tmp_path / "elsewhere/lab").mkdir(parents=True)
    ended = run(called, cwd=tmp_path, CDPATH=f"{tmp_path / 'elsewhere'}:{tmp_path}")
    assert ended.status == 0, ended.err
    assert "dp-ga" in ended.out


@pytest.mark.parametrize(
    ("flags", "passed"),
    [
        ("", "--numprocesses 3 --dist loadgroup"),
        ("tests/DP -k zero", "tests/DP -k zero"),
        ("--quick", "-m quick and not alone --numprocesses 2"),
        ("--quick tests/DP", "-m quick and not alone --numprocesses 2 tests/DP"),
        ("--gpu -x", "-vv -rs --gpu -x"),
    ],
)
def test_test_sh_gives_its_flags_to_pytest(flags: str, passed: str, tmp_path: Path) -> None:
    shutil.copy(LAB / "test.sh", tmp_path)
    (tmp_path / "environment.sh").write_text("lab=$PWD python=echo; prepare() { :; }")
    ended = run(tmp_path / "test.sh", *flags.split(), cwd=tmp_path)
    assert (ended.status, ended.out.splitlines()[-1]) == (0, f"-m pytest {passed}")


def test_a_lab_in_a_folder_with_a_colon_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "a:b"
    folder.mkdir()
    for name in ("launch.sh", "environment.sh"):
        shutil.copy(LAB / name, folder)
    ended = run(folder / "launch.sh")
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1
    assert str(folder) in ended.err


def test_a_current_folder_that_was_deleted_is_named(tmp_path: Path) -> None:
    ended = in_shell(f"mkdir gone; cd gone; rmdir ../gone; exec {shown(*TWO)}", tmp_path)
    assert ended.status == 2
    assert ended.err.splitlines()[-1] == "# the current folder has been deleted; change to a folder that exists"


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="only root can be somebody else")
def test_a_lab_of_another_user_is_named_where_packages_are_missing() -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        for name in ("launch.sh", "environment.sh", "requirements.txt", "pyproject.toml"):
            shutil.copy(LAB / name, folder)
        as_nobody = ("setpriv", "--reuid", "65534", "--clear-groups")
        ended = run(*as_nobody, f"{folder}/launch.sh", cwd=Path("/"), PATH="/usr/bin:/bin")
    assert ended.status == 2
    assert ended.err.startswith(f"# {folder}: you may not write there")
    assert len(ended.err.splitlines()) == 1


def test_text_is_checked_out_with_unix_line_ends(tmp_path: Path) -> None:
    """Also where git is set to have Windows' in a clone."""
    if not (LAB / ".git").exists():
        pytest.skip("needs the repository")
    options = ["-c", "core.autocrlf=true"]
    for name in (".gitattributes", "launch.sh", "environment.sh", "requirements.txt"):
        shutil.copy(LAB / name, tmp_path)
    for args in (["init", "-q"], ["add", "."], ["checkout-index", "-f", "--prefix=out/", "-a"]):
        subprocess.run(["git", *options, *args], cwd=tmp_path, check=True, timeout=30, capture_output=True)
    for path in (tmp_path / "out").iterdir():
        assert b"\r" not in path.read_bytes(), path.name


CLOSED, ALONE = "<&- >&- 2>&-", [sys.executable, LAB / "primer/intro.py", *TINY]


@pytest.mark.parametrize(
    ("command", "how"),
    [([LAUNCH], CLOSED), (ALONE, CLOSED), (TWO, "2>&- 1</dev/null")],
    ids=str,
)
def test_closed_streams_end_nothing(command: list[object], how: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    flags = [] if command == [LAUNCH] else ["--out", out]
    ended = in_shell(f"{shown(*command, *flags)} {how}", tmp_path)
    assert ended.status == 0, ended.err
    assert ended.err == ""
    if flags:
        assert (out / "metrics.jsonl").read_text().count("\n") == 2
        assert (out / "rank0.log").read_text().count("# logs and metrics") == 1


def test_a_reader_that_goes_away_is_told(tmp_path: Path) -> None:
    command = shown(sys.executable, "-m", "distlab.launch", *TWO[1:], "--steps", "100000", "--out", tmp_path / "out")
    ended = in_shell(f"{command} | head -3; exit ${{PIPESTATUS[0]}}", tmp_path)
    assert ended.out.count("\n") == 3
    assert (ended.status, ended.err.splitlines()[-1]) == (141, "# the reader of the output has exited")


def test_a_program_that_the_lab_starts_has_streams_where_the_lab_had_none(tmp_path: Path) -> None:
    program = [sys.executable, "-c", "import os; [os.fstat(number) for number in range(3)]"]
    begin = "import subprocess; from simplellm.errors import open_streams; open_streams()"
    begin += f"; subprocess.check_call({program})"
    assert in_shell(f"{shown(sys.executable, '-c', begin)} {CLOSED}", tmp_path).status == 0


def test_a_character_that_the_output_lacks_is_escaped(tmp_path: Path) -> None:
    out, encoding = tmp_path / "Märchen “ж”", "koi8-r"
    command = shown(*TWO, "--out", out, "--tell", "Ein Mär “ж”")
    ended = in_shell(f"{command} > printed", tmp_path, PYTHONIOENCODING=f"{encoding}:strict")
    assert ended.status == 0, ended.err
    assert "# Ein M" in (tmp_path / "printed").read_text(encoding)
    assert str(out) in (out / "rank0.log").read_text(encoding="utf-8")


@pytest.mark.parametrize("is_missing", [False, True])
def test_without_proc_ranks_start_all_the_same(is_missing: bool, tmp_path: Path) -> None:
    if not can_unshare("-m"):
        pytest.skip("needs a mount namespace")
    if is_missing:
        ended = run("unshare", "-m", "bash", "-c", f"mount -t tmpfs none /proc; exec {shown(*TWO)}", cwd=tmp_path)
    else:
        commands = "mount --make-rprivate /", "mount -o remount,ro,bind /proc"
        ended = fork_command([*TWO, "--out", str(tmp_path)], partial(unshare, CLONE_NEWNS, *commands)).finish()
    assert ended.status == 0, ended.err


def test_an_inherited_file_above_the_limit_ends_no_rank(tmp_path: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    descriptor = 4000 if hard == resource.RLIM_INFINITY else min(4000, hard - 1)

    def inherit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptor + 1, hard))
        os.dup2(os.open(os.devnull, os.O_RDONLY), descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))

    ended = fork_command([*TWO, "--out", str(tmp_path)], inherit).finish()
    assert ended.status == 0, ended.err


def test_ranks_are_not_bound_to_one_core(tmp_path: Path) -> None:
    variables: dict[str, Any] = {"OMP_PROC_BIND": "true", "OMP_PLACES": "cores", "GOMP_CPU_AFFINITY": "0"}
    script = tmp_path / "cores.py"
    script.write_text("import os, torch\nprint(len(os.sched_getaffinity(0)))\n")
    ended = run(LAUNCH, script, "--world-size", "2", cwd=tmp_path, **variables)
    assert ended.status == 0, ended.err
    assert ended.out.split() == [str(len(os.sched_getaffinity(0)))] * 2
    assert all(f"{name}={value}" in ended.err for name, value in variables.items())


def test_a_limit_on_open_files_that_is_too_low_is_named(tmp_path: Path) -> None:
    ended = fork_command(TWO, partial(resource.setrlimit, resource.RLIMIT_NOFILE, (63, 63))).finish()
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1, ended.err
    assert "ulimit -n" in ended.err


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("-f 0", "TMPDIR"),
        ("-f 1", "File too large"),
        ("-v 400000", "have 410 MB of address space, and a rank needs 750 MB; "),
    ],
)
def test_a_limit_on_the_size_of_files_or_of_address_space_that_is_too_low_is_named(
    limit: str, told: str, tmp_path: Path
) -> None:
    ended = in_shell(f"ulimit {limit}; exec {shown(*TWO, '--out', tmp_path / 'out')}", tmp_path)
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1, ended.err
    assert told in ended.err


@pytest.mark.parametrize("command", [[LAUNCH, "primer", *TINY], TWO, [sys.executable, RANK_0, "0", *TINY]], ids=len)
def test_loopback_that_is_down_is_told_at_once(command: list[str], tmp_path: Path) -> None:
    if not can_unshare("-n"):
        pytest.skip("needs a network namespace")

    flags = ["--out", str(tmp_path / "out")]
    ended = fork_command([*command, *flags], partial(unshare, CLONE_NEWNET)).finish(20)
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1, ended.err
    assert "--master-addr localhost" in ended.err


@pytest.mark.parametrize(
    ("name", "columns"),
    [*itertools.product(["primer"], ["1", "4", "0", "-2"]), ("figures", "1"), ("tokenizer", "1")],
)
def test_help_ends_in_the_narrowest_terminal(name: str, columns: str) -> None:
    ended = fork_launcher(name, "--help", COLUMNS=columns).finish(30)
    assert ended.status == 0, ended.err


def test_a_folder_whose_name_is_not_utf8(tmp_path: Path) -> None:
    folder = tmp_path / os.fsdecode("Märchen".encode("latin-1"))
    folder.mkdir()
    assert run(LAUNCH, cwd=folder).status == 0
    assert fork_command(TWO, partial(os.chdir, folder)).finish().status == 0
    ended = fork_command([*TWO, "--save-every", "1"], partial(os.chdir, folder)).finish()
    assert ended.status == 2
    assert len(ended.err.splitlines()) == 1, ended.err
    assert "UTF-8" in ended.err


def test_a_run_is_resumed_from_within(tmp_path: Path) -> None:
    assert fork_launcher(*TWO[1:], "--save-every", "2", "--out", tmp_path / "run").finish().status == 0
    checkpoints = tmp_path / "run/checkpoints"
    more = [LAUNCH, *"dp-ga --world-size 2 --device cpu --steps 3 --resume".split()]
    for cwd, resume in ((checkpoints, "."), (checkpoints / "step-00000002", ".."), (tmp_path / "run", "./")):
        ended = fork_command([*more, resume], partial(os.chdir, cwd)).finish()
        assert ended.status == 0, ended.err
        assert [line.split()[0] for line in ended.out.splitlines() if not line.startswith("#")] == [
            "2"
        ]  # after steps 0 and 1
