"""A skeleton is a chapter's script without the functions that are the lesson: the rest of it stays, and runs."""

import ast
import re
import subprocess
import sys
from pathlib import Path

from distlab_exercises.catalogue import EXERCISES, Exercise
from distlab_exercises.skeleton import write_out

SCRIPT = '''"""What the chapter says."""

from functools import cache

STEPS = 3


def average(numbers: tuple[float, ...]) -> float:
    """The mean."""
    # A sum, divided by how many there are.
    return _added(numbers) / len(numbers)


def _added(numbers: tuple[float, ...]) -> float:
    return _helper(numbers)


@cache
def _helper(numbers: tuple[float, ...]) -> float:
    return sum(numbers)


def _shown(number: float) -> str:
    return f"{number:g}"


@cache
def largest(
    number: int,
) -> int:
    # Nobody should see the answer.

    best = number
    return best


class Meter:
    """Counts."""

    def __init__(self) -> None:
        self.count = 0

    def tick(self) -> None:
        """One more."""
        self._add(1)

    def _add(self, number: int) -> None:
        self.count += number


def train() -> None:
    for step in range(STEPS):
        print(_shown(average((step, largest(step)))))


if __name__ == "__main__":
    train()
'''


def test_functions_of_a_script_are_taken_out_and_the_rest_stays(tmp_path: Path) -> None:
    script = tmp_path / "chapter.py"
    script.write_text(SCRIPT)
    takes = ("average", "largest", "Meter")
    exercise = Exercise("numbers", "means", 5, "a page", "Write it.", ("Add up.",), script=str(script), takes=takes)
    skeleton = write_out(exercise, tmp_path / "my.py")
    defined = {node.name: node for node in ast.parse(skeleton).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert set(defined) == {"average", "_shown", "largest", "Meter", "train"}, "the solution's own helpers are gone"
    assert "answer" not in skeleton
    assert "divided by how many" not in skeleton
    assert ast.get_docstring(defined["average"]) == "The mean."
    methods = [node.name for node in ast.walk(defined["Meter"]) if isinstance(node, ast.FunctionDef)]
    assert methods == ["__init__", "tick"]
    assert skeleton.count("raise NotImplementedError") == 4
    assert skeleton.endswith(SCRIPT[SCRIPT.index("def train") :])

    (tmp_path / "my.py").write_text(skeleton)
    unsolved = subprocess.run([sys.executable, tmp_path / "my.py"], capture_output=True, text=True, timeout=60)
    assert unsolved.stderr.splitlines()[-1] in (
        "NotImplementedError: write average",
        "NotImplementedError: write largest",
    )
    (tmp_path / "my.py").write_text(write_out(exercise, tmp_path / "my.py", solved=True))
    solved = subprocess.run([sys.executable, tmp_path / "my.py"], capture_output=True, text=True, timeout=60)
    assert solved.stdout.split() == ["0", "1", "2"]


def test_methods_that_are_given_stay_in_a_class_whose_others_are_to_be_written() -> None:
    for name, missing in (
        ("ep-backward", ["Exchange.backward"]),
        ("mpi-collectives", ["Communicator.myAllreduce", "Communicator.ringAllreduce", "Communicator.myAlltoall"]),
    ):
        text = write_out(EXERCISES[name], Path("mine.py"))
        assert re.findall(r'raise NotImplementedError\("write (.*)"\)', text) == missing


def test_what_the_solution_imports_is_there_for_the_student_except_its_own_helpers() -> None:
    for name, helpers in ("cp-ring", {"_span"}), ("mydp", set()), ("reduce", {"_powers_of_two", "_ranks_from"}):
        texts = (write_out(EXERCISES[name], Path("my.py"), solved=is_solved) for is_solved in (False, True))
        nodes = ((n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Import | ast.ImportFrom)) for text in texts)
        given, used = ({alias.name for node in imports for alias in node.names} for imports in nodes)
        assert used - given == helpers, name
