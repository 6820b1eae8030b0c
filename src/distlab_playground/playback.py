"""Playback: a slider over the steps of something in order, which moves by itself while a switch is on.

A notebook keeps each part in a cell and a variable of its own, for marimo to hear it. `move` is the setter of the state
that holds the place, from 1 to `last`: `place, move = mo.state(last)`.
"""

from collections.abc import Callable
from typing import Any

Move = Callable[[Callable[[int], int]], None]


def switch(last: int, move: Move) -> Any:
    """Return the switch; at the end, it starts again from the first step."""
    import marimo as mo

    def begin(is_on: bool) -> None:
        if is_on:
            move(lambda place: 1 if place == last else place)

    return mo.ui.switch(label="Play", on_change=begin)


def clock(last: int, move: Move) -> Any:
    """Return a clock that takes a step at a time, up to the last, while it is shown."""
    import marimo as mo

    def step(_: Any) -> None:
        move(lambda place: min(place + 1, last))

    return mo.ui.refresh(options=["0.5s", "1s", "2s"], default_interval="1s", label="a step every", on_change=step)


def slider(last: int, place: int, move: Callable[[Any], None], label: str) -> Any:
    """Return the slider."""
    import marimo as mo

    return mo.ui.slider(1, last, value=place, on_change=move, label=label, show_value=True, full_width=True)
