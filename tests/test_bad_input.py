"""What cannot work ends with one sentence: a sample of `bad_input.py`, and every flag of every script."""

import dataclasses
import os
import random

import pytest
from bad_input import generate, open_folder, try_all
from support.bad_inputs.flags import LATER, flag_cases
from support.bad_inputs.inputs import SCRIPTS, defaults_of
from support.bad_inputs.trials import can_be_nobody, shown
from support.processes import run_ranks

from distlab.settings.common import parse
from simplellm.errors import InputError

VALUES = 1  # of each flag of each script that is tried; bad_input.py tries more


@pytest.mark.parametrize("script", sorted(set(SCRIPTS.values())))
def test_each_flag_refuses_what_it_cannot_be(script: str) -> None:
    defaults, chance = defaults_of(script), random.Random(script)
    cases: dict[str, list[list[str]]] = {}
    for flag, args in flag_cases(script):
        cases.setdefault(flag, []).append(args)
    for flag, values in cases.items():
        if flag == "rank" or flag[2:].replace("-", "_") in LATER:
            continue
        for args in chance.sample(values, min(VALUES, len(values))):
            with pytest.raises(InputError) as refused:
                parse(dataclasses.replace(defaults), "", args)
            sentence = str(refused.value)
            assert "\n" not in sentence, args
            assert flag in sentence or (args[-1] and args[-1] in sentence), (args, sentence)


def test_bad_input_ends_with_a_sentence() -> None:
    """Each of 200, a third of them as a user without rights."""
    with open_folder() as folder:
        inputs = generate(200, seed=3, folder=folder)
        # In a fork, which alone imports all that the commands import.
        [outcomes] = run_ranks(1, lambda _: try_all(inputs, folder, 2, lambda _, __: None), deadline=600)
    assert len({bad.kind for bad in inputs}) == 11
    assert sum(bad.as_nobody for bad in inputs) >= 60 or not can_be_nobody()
    for bad, outcome in zip(inputs, outcomes, strict=True):
        assert not outcome.problems, (bad.as_nobody, [shown(command) for command in bad.commands], outcome.problems)


@pytest.mark.parametrize("flag", ["--out", "--data", "--master-addr"])
def test_a_name_that_is_not_utf8_is_refused(flag: str) -> None:
    name = os.fsdecode(b"/tmp/s\xff")  # as Python reads it from a command line
    with pytest.raises(InputError, match=f"^{flag} is no valid text in the terminal's encoding; give UTF-8$"):
        parse(dataclasses.replace(defaults_of("primer/intro.py")), "", [flag, name])
