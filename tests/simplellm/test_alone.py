"""The model library without the rest of the lab: it needs none of it, and knows no program's flags."""

import errno
import os
import subprocess
import sys

import pytest

from simplellm.command_line import read
from simplellm.errors import InputError, require_text
from simplellm.exit_status import TOO_MANY_PROCESSES, about_system, lost_reader, status_of
from simplellm.options import check_heads
from simplellm.sources import open_source

WITHOUT_THE_LAB = """
import importlib, pkgutil, sys

class OnlySimplellm:
    def find_spec(self, name, path=None, target=None):
        assert not name.startswith("distlab"), name

sys.meta_path.insert(0, OnlySimplellm())
import simplellm
for module in pkgutil.iter_modules(simplellm.__path__, "simplellm."):
    importlib.import_module(module.name)
    print(module.name)
"""


def test_all_modules_can_be_imported_without_the_lab() -> None:
    program = [sys.executable, "-c", WITHOUT_THE_LAB]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert {"simplellm.llama", "simplellm.export"} <= set(ended.stdout.split())


def test_an_error_names_arguments_and_on_a_command_line_flags(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match=r"^num_kv_heads 3 does not divide num_heads 4: each must") as caught:
        check_heads(16, 4, 3)
    assert caught.value.with_flags().startswith("--num-kv-heads 3 does not divide --num-heads 4: each must")
    with pytest.raises(InputError, match=r"^data data/data.txt: there is no such file") as caught:
        open_source("data/data.txt", "train", 0)
    assert caught.value.with_flags().startswith("--data data/data.txt: there is no such file")
    assert status_of(lambda: require_text("\udcff", "prompt")) == 2
    assert capsys.readouterr().err.startswith("# --prompt is not valid text")


@pytest.mark.parametrize("columns", [None, "20"])
def test_a_terminal_is_narrow_again_when_the_command_line_is_read(
    columns: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.get_terminal_size", lambda: os.terminal_size((20, 24)))
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    assert read(lambda: os.environ["COLUMNS"]) == "40"
    assert os.environ.get("COLUMNS") == columns


def of_file(number: int, file: str | None = "f") -> OSError:
    return OSError(number, os.strerror(number), file)


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (of_file(errno.ENOSPC), "cannot write f (No space left on device); make room"),
        (of_file(errno.EDQUOT, None), "cannot write the output or a file (Disk quota exceeded); make room"),
        (of_file(errno.EFBIG), "cannot write f: it would exceed the limit on file sizes; raise it (ulimit -f)"),
        (of_file(errno.EROFS), "f: Read-only file system; give a path that this user may use"),
        (of_file(errno.ELOOP), "f: Too many levels of symbolic links; give another path"),
        (of_file(errno.EIO), "f: Input/output error; its disk or its network does not work"),
        (of_file(errno.ENFILE), "the open files of this machine are at their limit: close other programs"),
        (RuntimeError("pipe: Too many open files"), "open files are at their limit: raise it (ulimit -n)"),
        (RuntimeError("can't start new thread"), TOO_MANY_PROCESSES),
        (RuntimeError(os.strerror(errno.EAGAIN)), TOO_MANY_PROCESSES),
        (of_file(errno.ENOENT, "/gone/f"), "cannot open /gone/f: there is no folder /gone; has it been removed?"),
        (
            FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']"),
            "no folder for temporary files can be written to: set TMPDIR to one that can",
        ),
        (of_file(errno.ENOENT, f"{os.curdir}/f"), None),
        (of_file(errno.ENOENT), None),
        (of_file(errno.EACCES, None), None),
        (ValueError("No space left on device"), None),
    ],
)
def test_errors_of_the_system_are_told_with_a_remedy(error: Exception, sentence: str | None) -> None:
    assert about_system(error) == sentence


@pytest.mark.parametrize("stream", [1, 2])
def test_a_reader_of_either_output_that_has_exited_is_no_error(stream: int) -> None:
    kept, (read_end, write_end) = os.dup(stream), os.pipe()
    os.close(read_end)
    os.dup2(write_end, stream)
    try:
        has_exited = lost_reader(BrokenPipeError())
    finally:
        os.dup2(kept, stream)
        os.close(kept)
        os.close(write_end)
    assert has_exited
    assert not lost_reader(BrokenPipeError()), "that of another pipe"
