"""`--repair`, whose value may be left out, and which most scripts do not have."""

from collections.abc import Sequence

from simplellm.errors import FlagError


def complete_repair(args: Sequence[str], defaults: object) -> list[str]:
    """Return the arguments with a value for a `--repair` that has none; `InputError` if a script cannot do that."""
    given, bare = [*args], [number for number, arg in enumerate(args) if arg == "--repair"]
    if bare and not hasattr(defaults, "repair"):
        why = getattr(defaults, "no_repair", "this script cannot go on when a rank dies")
        advice = "dp-ga and hybrid can; with --save-every, --max-restarts 3 begins again from the last checkpoint"
        raise FlagError(f"--repair: {why}; {advice}")
    for number in bare:
        if args[number + 1 :][:1] == [] or args[number + 1].startswith("--"):
            given[number] = "--repair=on"
    return given
