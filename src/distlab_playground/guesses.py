"""Guesses: a notebook asks first, and shows its answer after the guess is locked."""

from collections.abc import Callable, Sequence
from typing import Any

# The two parts of marimo's state, which a notebook makes: `locked, lock = mo.state(None, allow_self_loops=True)`.
Locked = Callable[[], Any]
Lock = Callable[[Any], None]


def ask(question: str, options: Sequence[str] | None, locked: Locked, lock: Lock) -> Any:
    """Return a question with its options, or with a field for a number; once locked, the guess instead.

    A notebook keeps the result in a variable of its own, for marimo to hear the button.
    """
    import marimo as mo

    guess = locked()
    if guess is not None:
        return mo.callout(mo.md(f"{question}\n\nYour guess, locked: **{guess}**"), kind="neutral")
    label = "Your guess"
    element = mo.ui.number(label=label) if options is None else mo.ui.radio(options, label=label)
    text = mo.md(f"{question}\n\n{{guess}}")
    return text.batch(guess=element).form(
        submit_button_label="Lock this guess",
        validate=missing,
        on_change=lambda given: lock(given and given["guess"]),
    )


def missing(given: Any) -> str | None:
    """Return what to do before a form can be sent; an option that is not chosen and an empty field are None."""
    return "Give an answer first." if not given or None in given.values() else None


def stop_without_numbers(*fields: Any) -> None:
    """Stop a cell if a field for a number is empty, and show what to do."""
    import marimo as mo

    mo.stop(None in [field.value for field in fields], mo.md("Give a number in each field."))
