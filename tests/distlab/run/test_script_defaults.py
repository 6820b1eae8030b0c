"""What a script's flags are is known without the rest of the script, and without torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest
from support.processes import LAB

from distlab.launch import TOPOLOGIES
from distlab.run.script_defaults import read_defaults, statements_for
from distlab.run.settings import RunSettings

# These take their settings from another script, primer/mlp.py, with all that it imports.
OF_ANOTHER_SCRIPT = "mlp-ddp mlp-mydp".split()

WITHOUT_TORCH = f"""
import contextlib, io, sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        assert name.partition(".")[0] != "torch", "imports torch"

sys.meta_path.insert(0, NoTorch())
from distlab.launch import TOPOLOGIES, find_script, launch
from distlab.run.script_defaults import read_defaults
from simplellm.errors import InputError

for name in TOPOLOGIES.keys() - {{"mpi", *{OF_ANOTHER_SCRIPT}}}:
    read_defaults(find_script(name)[0])
for command in sys.argv[1:]:
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            status = launch(command.split())
    except SystemExit as end:
        status = end.code
    except InputError as error:
        status = error
    print(status)
"""


def test_neither_help_nor_a_wrong_flag_needs_torch() -> None:
    """Torch takes seconds to import, for which a reader of --help would wait."""
    commands = {
        "": "0",
        "--help": "0",
        "dp-ga --help": "0",
        "nothing": "nothing: no such topology or script",
        "hybrid --nope": "Unrecognized options: --nope",
        "dp-ga --steps many": "Error parsing --steps",
        "tp --world-size 5": "--num-heads 6 among 5 tensor-parallel ranks",
        "pp-zb --n-layers 2 --world-size 7": "7 stages for --n-layers 2",
        "primer --data nothing.txt": "nothing.txt",
        "primer --tokenizer nothing": "--tokenizer nothing",
        "primer --resume nothing": "nothing: there is no such folder",
        "dp-ga --nnodes 2": "--nnodes 2",
        "dp-ga --all-reduce ring --backend nccl": "--all-reduce ring with --backend nccl",
        "sentiment --heads 3": "--heads 3 with --tp 2",
    }
    program = [sys.executable, "-c", WITHOUT_TORCH, *commands]
    ended = subprocess.run(program, cwd=LAB, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    for line, expected in zip(ended.stdout.splitlines(), commands.values(), strict=True):
        assert expected in line


@pytest.mark.parametrize("name", OF_ANOTHER_SCRIPT)
def test_defaults_may_depend_on_another_script(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", sys.path.copy())
    script = LAB / TOPOLOGIES[name]
    defaults, description = read_defaults(script)
    assert type(defaults).__name__ == "ParallelMLPSettings"
    assert description == ast.get_docstring(ast.parse(script.read_text()))


@pytest.mark.parametrize(
    ("source", "needed"),
    [
        ("import os; import re; DEFAULTS = re.compile('a')", "re DEFAULTS"),
        ("a = 1\nb = a\ndef c(): return b\ndef d(): return a\nDEFAULTS = c()", "a b c DEFAULTS"),
        ("DEFAULTS = 1\nif __name__ == '__main__': print(DEFAULTS)", "DEFAULTS"),
        ("DEFAULTS = {}\nDEFAULTS['a'] = 1\nDEFAULTS.b = 2\nDEFAULTS |= {}", "DEFAULTS DEFAULTS DEFAULTS DEFAULTS"),
        ("try:\n  import a.b\nexcept ImportError:\n  a = None\nimport b as c\nDEFAULTS = a", "a DEFAULTS"),
        (
            "class A:\n  b = 1\n  def c(self): return d\nb = 2\nd = 3\n@A\nclass E: pass\nDEFAULTS = E()",
            "A d E DEFAULTS",
        ),
        ("'a docstring'\nimport sys\nsys.path.append('x')\nDEFAULTS = 1", "sys * DEFAULTS"),
        ("from __future__ import annotations\nfrom x import *\nDEFAULTS = 1", "* * DEFAULTS"),
    ],
)
def test_the_statements_that_a_name_depends_on(source: str, needed: str) -> None:
    def named(statement: ast.stmt) -> str:
        match statement:
            case ast.Expr() | ast.ImportFrom():
                return "*"
            case ast.Import(names=[alias]):
                return alias.name
            case ast.FunctionDef() | ast.ClassDef():
                return statement.name
            case ast.Try():
                return "a"
        return next(node.id for node in ast.walk(statement) if isinstance(node, ast.Name))

    assert " ".join(map(named, statements_for("DEFAULTS", ast.parse(source)))) == needed


def test_settings_of_a_script_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what it imports from its own folder, and annotations of its own; what training needs is not executed."""
    monkeypatch.setattr(sys, "path", sys.path.copy())
    (tmp_path / "beside_the_script.py").write_text("SECONDS = 7\n")
    (tmp_path / "script.py").write_text('''"""What it is."""
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal
from beside_the_script import SECONDS
from distlab.run.settings import RunSettings, parse
import nothing_of_this_name
Kind = Literal["a", "b"]
@dataclass
class Settings(RunSettings):
    kind: Kind = "a"
DEFAULTS = Settings()
DEFAULTS.timeout = SECONDS
def train(run):
    nothing_of_this_name.train(run)
''')
    defaults, description = read_defaults(tmp_path / "script.py")
    assert isinstance(defaults, RunSettings)
    assert (defaults.timeout, getattr(defaults, "kind", None), description) == (7, "a", "What it is.")
    defaults.check()
