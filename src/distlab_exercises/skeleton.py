"""Writes the file of an exercise: a chapter's script, or functions of the library, without the part that is the lesson.

The part is a function or class at the top level of the script or of a module, which the catalogue names; it is found by
its name, so a skeleton cannot differ from the chapter that it was made from.
"""

import ast
import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from distlab.run.commands import LAB, launcher
from distlab_exercises.catalogue import Exercise

WIDTH = 112  # of the task's lines
Definition = ast.FunctionDef | ast.ClassDef


def write_out(exercise: Exercise, path: Path, solved: bool = False) -> str:
    """Return the text of an exercise's file.

    Args:
        path: where the file will be; its docstring says how to check it there.
        solved: leave the solution in, as in the lab itself.
    """
    text = (LAB / exercise.script).read_text() if exercise.script else ""
    own = [name for name in exercise.takes if ":" not in name]
    if not solved:
        for before, after in exercise.given:
            assert text.count(before) == 1, f"{exercise.name}: {text.count(before)} times {before}"
            text = text.replace(before, after)
        text = _emptied(text, own, exercise.keeps)
        text = re.sub(r"^MORE = .*\n", "", text, flags=re.MULTILINE)  # its path is that of the chapter's folder
    named = [name.split(":") for name in exercise.takes if ":" in name]
    for module in dict.fromkeys(module for module, _ in named):
        text = _with_definitions(text, module, [name for other, name in named if other == module], exercise, solved)
    return _with_docstring(text, exercise, path)


def _definitions(tree: ast.Module) -> dict[str, Definition]:
    return {node.name: node for node in tree.body if isinstance(node, Definition)}


def _emptied(text: str, names: Sequence[str], keeps: Sequence[str] = ()) -> str:
    """Return a module without the bodies of some of its functions, and of the methods of some of its classes.

    Docstrings stay, comments go. A class keeps `__init__` and its public methods; the others belong to the solution, as
    do private definitions of the module that only the solution names. Methods in `keeps` stay as they are.
    """
    found = _definitions(ast.parse(text))
    lines = text.split("\n")
    cuts: list[tuple[int, int, list[str]]] = []  # the first line, the line after the last one, the replacement
    for node in (found[name] for name in names):
        functions = (
            [n for n in node.body if isinstance(n, ast.FunctionDef)] if isinstance(node, ast.ClassDef) else [node]
        )
        for function in (function for function in functions if function.name not in keeps):
            if function.name.startswith("_") and not function.name.startswith("__") and function is not node:
                cuts.append((_first_line(function) - 2, function.end_lineno or 0, []))  # with the blank line before it
                continue
            name = function.name if function is node else f"{node.name}.{function.name}"
            first, indent = function.body[0], " " * function.body[0].col_offset
            start = (first.end_lineno if ast.get_docstring(function) is not None else first.lineno - 1) or 0
            while re.fullmatch(r"\s*(#.*)?", lines[start - 1]):
                start -= 1
            cuts.append((start, function.end_lineno or 0, [f'{indent}raise NotImplementedError("write {name}")']))
    for start, end, instead in sorted(cuts, reverse=True):
        lines[start:end] = instead
    return _without_unnamed("\n".join(lines))


def _without_unnamed(text: str) -> str:
    """Return a module without its private functions and classes that nothing else in it names."""
    tree = ast.parse(text)
    for name, node in _definitions(tree).items():
        if name.startswith("_") and name not in _names_in(other for other in tree.body if other is not node):
            lines = text.split("\n")
            lines[_first_line(node) - 1 : node.end_lineno] = []
            return _without_unnamed(re.sub(r"\n{4,}", "\n\n\n", "\n".join(lines)))
    return text


def _first_line(node: Definition) -> int:
    return min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])


def _with_definitions(text: str, module: str, names: list[str], exercise: Exercise, solved: bool) -> str:
    """Return a script with a library module's definitions written out, not imported, and with their imports."""
    source = (Path(__file__).parents[1] / f"{module.replace('.', '/')}.py").read_text()
    tree = ast.parse(source)
    used = _names_in(_definitions(tree)[name] for name in names)
    if not solved:
        source = _emptied(source, names, exercise.keeps)
        used = {name for name in used if not name.startswith("_")}
    definitions = _definitions(ast.parse(source))
    nodes = [definitions[name] for name in names]
    used |= _names_in(nodes)
    lines = source.split("\n")
    code = ["\n".join(lines[_first_line(node) - 1 : node.end_lineno]) for node in nodes]

    imports = _imports(text)
    bound = {alias.asname or alias.name for node in imports for alias in node.names}
    bound |= {name for line in exercise.imports for name in _bindings(ast.parse(line), module)}
    needed = used - bound - set(names)
    new = _together(line for name, line in _bindings(tree, module).items() if name in needed)
    lines, last = text.split("\n"), max((node.end_lineno or 0 for node in imports), default=0)
    lines[last:last] = [*exercise.imports, *new, "", "", "\n\n\n".join(code), ""]
    return re.sub(r"\n{4,}", "\n\n\n", _without_imported("\n".join(lines), names)).lstrip("\n")


def _imports(text: str) -> list[ast.Import | ast.ImportFrom]:
    return [node for node in ast.parse(text).body if isinstance(node, ast.Import | ast.ImportFrom)]


def _without_imported(text: str, names: list[str]) -> str:
    """Return a module without the imports of some names."""
    lines = text.split("\n")
    for statement in reversed(_imports(text)):
        if isinstance(statement, ast.ImportFrom) and any(alias.name in names for alias in statement.names):
            kept = [alias for alias in statement.names if alias.name not in names]
            instead = [ast.unparse(ast.ImportFrom(statement.module, kept, statement.level))] if kept else []
            lines[statement.lineno - 1 : statement.end_lineno] = instead
    return "\n".join(lines)


def _names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {n.id for node in nodes for n in ast.walk(node) if isinstance(n, ast.Name)}


def _together(imports: Iterable[str]) -> Iterator[str]:
    """Yield import statements, with the names of one module in one statement."""
    names: dict[str, list[str]] = {}
    for line in imports:
        before, _, name = line.partition(" import ")
        names.setdefault(before if name else line, []).append(name)
    for before, of_one in names.items():
        yield f"{before} import {', '.join(of_one)}" if of_one[0] else before


def _bindings(tree: ast.Module, module: str) -> dict[str, str]:
    """Return, by global name of a module, the statement with which another module imports it."""
    found: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Import):
            found |= {
                (alias.asname or alias.name.partition(".")[0]): ast.unparse(ast.Import([alias])) for alias in node.names
            }
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                found[alias.asname or alias.name] = ast.unparse(ast.ImportFrom(node.module, [alias], node.level))
        elif isinstance(node, Definition):
            found[node.name] = f"from {module} import {node.name}"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                for name in _names_in([target]):
                    found[name] = f"from {module} import {name}"
    return found


def _with_docstring(text: str, exercise: Exercise, path: Path) -> str:
    """Return a module that begins with the task."""
    tree = ast.parse(text)
    body = text
    if ast.get_docstring(tree) is not None:
        body = "\n".join(text.split("\n")[tree.body[0].end_lineno :])
    task = "\n\n".join(
        textwrap.fill(" ".join(part.split()), WIDTH, break_on_hyphens=False)
        for part in exercise.task.strip().split("\n\n")
    )
    file = shlex.quote(str(path)).replace("\\", "\\\\").replace('"""', r"\"\"\"")  # for a shell, in a docstring
    ends = [f"check it    {launcher()} check {file}", f"get a hint  {launcher()} hint {exercise.name}"]
    if exercise.script and "DEFAULTS" in text:
        settings = exercise.trials[0].settings if exercise.trials else {}
        flags = "".join(f" --{name} {value}" for name, value in settings.items() if isinstance(value, str))
        ends.append(f"run it      {launcher()} {file}{flags}")  # such as --schedule gpipe
    ends.append(f"read        {exercise.chapter}")
    commands = "\n".join(f"    {line}" for line in ends)
    return (
        f'"""Exercise {exercise.name}: {exercise.title}.\n\n{task}\n\n{commands}\n"""\n\n{body.lstrip()}'.rstrip()
        + "\n"
    )
