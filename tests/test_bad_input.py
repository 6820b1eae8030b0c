"""What cannot work ends with one sentence: a sample of `bad_input.py`, and every flag."""

import dataclasses
import os
from typing import Any, Literal, get_origin

import pytest
from bad_input import generate, open_folder, try_all
from support.bad_inputs.flags import LATER, fields_of, flag_cases
from support.bad_inputs.inputs import SCRIPTS, defaults_of
from support.bad_inputs.trials import can_be_nobody, shown
from support.processes import run_ranks

from distlab.settings.common import RunSettings, parse
from simplellm.errors import InputError

ALL_SCRIPTS = sorted(set(SCRIPTS.values()))
NUMBERS = int, float, int | None, float | None
FLAGS_AS_COMMANDS = 10  # inputs of the kind "flags" that are tried as whole commands


def declared(script: str) -> dict[str, type]:
    """The flags of a script, and the class of settings that declares each."""
    classes = reversed(type(defaults_of(script)).__mro__)
    return {name: each for each in classes for name in vars(each).get("__annotations__", ())}


@pytest.fixture(scope="module")
def first_script() -> dict[tuple[str, type | None], str]:
    """By flag and class that declares it, the first script that has it."""
    return {pair: script for script in reversed(ALL_SCRIPTS) for pair in declared(script).items()}


@pytest.fixture(scope="module")
def unread() -> set[tuple[str, str]]:
    """Kinds of types and texts that cannot be read as one, which were tried: a flag's type alone reads them."""
    return set()


def read_as_number(kind: Any, text: str) -> int | float | None:
    try:
        return (int if kind in (int, int | None) else float)(text)
    except ValueError:
        return None


def check(defaults: RunSettings, kind: Any, name: str, args: list[str]) -> None:
    """Check a flag's value; what is a number of its type needs no command line, which takes longer to parse."""
    number = read_as_number(kind, args[-1]) if kind in NUMBERS else None
    if number is None:
        parse(defaults, "", args)
    else:
        changed: dict[str, Any] = {name: number}
        dataclasses.replace(defaults, **changed).check()


@pytest.mark.parametrize("script", ALL_SCRIPTS)
def test_each_flag_refuses_what_it_cannot_be(
    script: str, first_script: dict[tuple[str, type | None], str], unread: set[tuple[str, str]]
) -> None:
    """In the first of the scripts that have it from the same class; one text at each that its type cannot read."""
    defaults, classes, kinds = defaults_of(script), declared(script), fields_of(defaults_of(script))
    cases: dict[str, list[list[str]]] = {}
    for flag, args in flag_cases(script):
        cases.setdefault(flag, []).append(args)
    for flag, values in cases.items():
        name = flag.removeprefix("--").replace("-", "_")
        if name == "rank" or name in LATER or first_script.get((name, classes.get(name)), script) != script:
            continue
        kind = kinds.get(name)
        for args in values:
            is_unread = kind in NUMBERS and read_as_number(kind, args[-1]) is None
            if (is_unread or get_origin(kind) is Literal) and args[-1] not in ("x", "nonsense"):
                if (tried := (str(get_origin(kind) or kind), args[-1])) in unread:
                    continue
                unread.add(tried)
            with pytest.raises(InputError) as refused:
                check(defaults, kind, name, args)
            sentence = str(refused.value)
            assert "\n" not in sentence, args
            assert flag in sentence or (args[-1] and args[-1] in sentence), (args, sentence)


def test_bad_input_ends_with_a_sentence() -> None:
    """Each of 200 but most wrong flags, which are tried above; a third of them as a user without rights."""
    with open_folder() as folder:
        inputs = generate(200, seed=3, folder=folder)
        of_flags = [bad for bad in inputs if bad.kind == "flags"]
        inputs = of_flags[:FLAGS_AS_COMMANDS] + [bad for bad in inputs if bad.kind != "flags"]
        # In a fork, which alone imports all that the commands import.
        [outcomes] = run_ranks(1, lambda _: try_all(inputs, folder, 2, lambda _, __: None), deadline=600)
    assert len({bad.kind for bad in inputs}) == 10
    assert sum(bad.as_nobody for bad in inputs) >= 50 or not can_be_nobody()
    for bad, outcome in zip(inputs, outcomes, strict=True):
        assert not outcome.problems, (bad.as_nobody, [shown(command) for command in bad.commands], outcome.problems)


@pytest.mark.parametrize("flag", ["--out", "--data", "--master-addr"])
def test_a_name_that_is_not_utf8_is_refused(flag: str) -> None:
    name = os.fsdecode(b"/tmp/s\xff")  # as Python reads it from a command line
    with pytest.raises(InputError, match=f"^{flag} is not valid text in the terminal's encoding; give UTF-8$"):
        parse(dataclasses.replace(defaults_of("primer/intro.py")), "", [flag, name])
