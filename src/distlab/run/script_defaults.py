"""The default settings of a script, read without running the rest of the script.

A script imports torch and more for training, which takes seconds. Its flags can be read without these imports.
"""

import ast
import sys
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import CodeType

from distlab.run.settings import RunSettings
from simplellm.errors import InputError

EVERYTHING = "*"  # stands for the names that a statement binds, if they cannot be read from the statement


def read_defaults(script: Path) -> tuple[RunSettings, str | None]:
    """A script's `DEFAULTS` and its docstring. Only the statements that `DEFAULTS` depends on are executed.

    Raises:
        InputError: the script has no `DEFAULTS`, or they are not `RunSettings`.
    """
    loader = DefaultsLoader("launched_script", str(script))
    spec = spec_from_loader(loader.name, loader)
    assert spec is not None
    module = module_from_spec(spec)
    sys.modules[module.__name__] = module  # annotations of its settings are looked up there
    sys.path.insert(0, str(script.parent))  # as Python does for a script
    loader.exec_module(module)
    defaults = getattr(module, "DEFAULTS", None)
    if not isinstance(defaults, RunSettings):
        raise InputError(f"{script}: launch.sh needs a script with DEFAULTS, a distlab.run.settings.RunSettings")
    return defaults, ast.get_docstring(ast.parse(script.read_text()))


class DefaultsLoader(SourceFileLoader):
    """Imports the part of a script that its `DEFAULTS` depend on."""

    def get_code(self, fullname: str) -> CodeType:
        tree = ast.parse(self.get_data(self.path), self.path)
        return self.source_to_code(ast.Module(statements_for("DEFAULTS", tree), type_ignores=[]), self.path)


def statements_for(name: str, tree: ast.Module) -> list[ast.stmt]:
    """The statements of a module that a global name depends on, directly or through other names, in order."""
    names, found = {name, EVERYTHING}, list[ast.stmt]()
    while True:
        needed = [statement for statement in tree.body if not names.isdisjoint(bound_names(statement))]
        if needed == found:
            return found
        found = needed
        for node in (node for statement in found for node in ast.walk(statement)):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                names.add(node.id)


def bound_names(statement: ast.stmt) -> Iterator[str]:
    """The global names that a statement binds, and those whose objects it may change."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name
        return
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):  # such as sys.path.append(...)
        yield EVERYTHING
    if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
        yield EVERYTHING
    for node in ast.walk(statement):
        if isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]  # "*" is EVERYTHING
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name | ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load):
            while isinstance(node, ast.Attribute | ast.Subscript):
                node = node.value
            if isinstance(node, ast.Name):
                yield node.id
