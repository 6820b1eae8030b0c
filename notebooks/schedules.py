"""Pipeline schedules: what is a bubble, and which has none? Play them, change costs, kill a worker, write your own."""

import marimo

app = marimo.App(width="medium", app_title="Schedules")

with app.setup:
    import marimo as mo

    from distlab.pipeline.actions import ActionCosts
    from distlab.pipeline.plan import in_a_row, simulate
    from distlab.pipeline.schedules import all_stages, schedule_names
    from distlab.show_schedule import Request, plan_of
    from distlab_playground import drawing, playback, schedules
    from distlab_playground.guesses import ask, stop_without_numbers
    from simplellm.errors import InputError

    def drawn(name, micro_batches=6, steps=1):
        """Return steps in a row, as a drawing and as a table."""
        plan = simulate(in_a_row(all_stages(name, 3, micro_batches), steps))
        return with_table(plan, [f"worker {n}" for n in range(3)], f"{name}, steps: {steps}")

    def with_table(plan, names, about):
        folded = mo.accordion({f"Table: each pass of {about}": mo.Html(schedules.table(plan, names))})
        return mo.vstack([mo.Html(drawing.passes(plan, names, about=about)), folded])


@app.cell
def _():
    locked, lock = mo.state(None, allow_self_loops=True)
    return lock, locked


@app.cell
def _(lock, locked):
    bubbles = schedules.bubbles(workers=3, micro_batches=6, steps=10)
    question = ask(
        "Ten steps follow each other without a wait in between, each with 6 micro-batches. **Which of these schedules "
        "leaves (almost) no bubble?**",
        list(bubbles),
        locked,
        lock,
    )
    _about = mo.md(
        "# Schedules\n\nThree workers share the layers of a model. Each micro-batch passes forward through all of them "
        "(F0, F1), then backward (B0, B1). In the gaps of the drawing, a worker waits for another one: the idle share "
        "of its time is the *bubble*. A *schedule* says in which order each worker takes its passes."
    )
    mo.vstack([_about, drawn("gpipe", micro_batches=2), question])
    return bubbles, question


@app.cell
def _(bubbles, locked):
    mo.stop(locked() is None)
    shown = sorted(bubbles.items(), key=lambda pair: pair[1])
    compared = dict.fromkeys([locked(), shown[0][0]])
    mo.vstack(
        [
            mo.md(f"{schedules.verdict(locked(), bubbles)}\n\nThree steps of {' and of '.join(compared)}:"),
            *(drawn(name, steps=3) for name in compared),
            mo.Html(
                drawing.table(
                    ["schedule", "bubble"],
                    [(name, f"{bubble:.1%}") for name, bubble in shown],
                    "Idle on average in ten steps; F, I and W take the same time, messages none",
                )
            ),
        ]
    )
    return


@app.cell
def _(locked):
    mo.stop(locked() is None)

    def _number(start, stop, value, label):
        return mo.ui.number(start, stop, value=value, label=label)

    schedule = mo.ui.dropdown(schedule_names(), value="dapple", label="schedule")
    workers, micro_batches = _number(1, 8, 3, "workers"), _number(1, 32, 6, "micro-batches")
    chunks = _number(1, 4, 2, "chunks (interleaved, auto)")
    forward, inputs, weights = _number(1, 9, 1, "ticks of F"), _number(1, 9, 1, "of I"), _number(1, 9, 1, "of W")
    transfer, limit = _number(0, 9, 0, "ticks of a message"), _number(1, 32, 6, "micro-batches that a worker may keep")
    steps = _number(1, 10, 1, "steps in a row, without a wait")
    pipelines, dead = _number(1, 3, 1, "pipelines"), mo.ui.text(label="dead workers, as 4 or 1,5 (a star: their work)")
    mo.vstack(
        [
            mo.md(
                "## Play\n\nF is a forward pass. A backward pass is B, or it has two parts: I (gradients of "
                "activations, for which the worker before waits) and W (gradients of weights, for which none waits)."
            ),
            mo.hstack([schedule, workers, micro_batches, steps], justify="start", wrap=True),
            mo.hstack([forward, inputs, weights], justify="start", wrap=True),
            mo.hstack([transfer, chunks, pipelines], justify="start", wrap=True),
            mo.hstack([limit, dead], justify="start", wrap=True),
        ]
    )
    return chunks, dead, forward, inputs, limit, micro_batches, pipelines, schedule, steps, transfer, weights, workers


@app.cell
def _(chunks, dead, forward, inputs, limit, micro_batches, pipelines, schedule, steps, transfer, weights, workers):
    stop_without_numbers(chunks, forward, inputs, limit, micro_batches, pipelines, steps, transfer, weights, workers)
    request = Request(
        schedule.value,
        stages=workers.value,
        micro_batches=micro_batches.value,
        forward=forward.value,
        backward=inputs.value + weights.value,
        weight_share=weights.value / (inputs.value + weights.value),
        chunks_per_stage=chunks.value,
        keep_at_most=str(limit.value) if schedule.value == "auto" else None,
        transfer=transfer.value,
        steps=steps.value,
        run_on=steps.value > 1,
        pipelines=pipelines.value,
        dead=dead.value or None,
    )
    try:
        title, plan, costs = plan_of(request)
    except InputError as error:
        mo.stop(True, mo.callout(mo.md(f"The library says: {error}"), kind="warn"))
    gone = [int(part) for part in dead.value.split(",")] if dead.value else []
    names = [f"worker {n}" for n in range(workers.value * pipelines.value) if n not in gone]
    return costs, names, plan, title


@app.cell
def _(plan):
    last = sum(map(len, plan.spans))
    place, move = mo.state(last)
    return last, move, place


@app.cell
def _(last, move):
    play = playback.switch(last, move)
    play
    return (play,)


@app.cell
def _(last, move, play):
    mo.stop(not play.value)
    clock = playback.clock(last, move)
    clock
    return (clock,)


@app.cell
def _(last, move, place):
    played = playback.slider(last, place(), move, "actions played (arrow keys)")
    played
    return (played,)


@app.cell
def _(costs, limit, names, place, plan, title):
    curves = [schedules.kept(line, costs) for line in plan.spans]
    over = [name for name, most in zip(names, plan.peak_bytes, strict=True) if most > limit.value]
    mo.vstack(
        [
            mo.Html(drawing.passes(plan, names, place(), title)),
            mo.md(schedules.says(plan, names, place())),
            mo.Html(
                drawing.table(
                    ["worker", "idle (bubble)", "micro-batches kept, at most"],
                    [
                        (name, f"{bubble:.1%}", f"{most:g}")
                        for name, bubble, most in zip(names, plan.bubble, plan.peak_bytes, strict=True)
                    ],
                    f"{title}: {plan.makespan:g} ticks, idle {sum(plan.bubble) / len(names):.1%} on average",
                )
            ),
            mo.Html(drawing.kept(curves, names, plan.makespan, limit.value)),
            mo.md(f"**Over the limit: {', '.join(over)}.**" if over else "No worker keeps more than the limit."),
        ]
    )
    return


@app.cell
def _(costs, names, plan):
    mo.accordion({"Table: each pass, and the activations kept after it": mo.Html(schedules.table(plan, names, costs))})
    return


@app.cell
def _(chunks, locked, micro_batches, schedule, workers):
    mo.stop(locked() is None)
    stop_without_numbers(chunks, micro_batches, workers)
    _sizes = dict(stages=workers.value, micro_batches=micro_batches.value, chunks_per_stage=chunks.value)
    try:
        _, _example, _ = plan_of(Request(schedule.value, **_sizes))
    except InputError:
        mo.stop(True)
    own = mo.ui.text_area(
        schedules.as_typed(_example),
        label="a line for each worker; other stages than its own number come first, as in 0 5: F0 F0' B0' B0",
        full_width=True,
        rows=5,
    ).form(submit_button_label="Check this schedule")
    mo.vstack([mo.md("## Write your own\n\nExchange two actions, leave one out: what does the library say?"), own])
    return (own,)


@app.cell
def _(forward, inputs, own, transfer, weights):
    mo.stop(own.value is None)
    stop_without_numbers(forward, inputs, transfer, weights)
    backward = inputs.value + weights.value
    prices = ActionCosts(forward.value, backward, transfer.value, weight_share=weights.value / backward)
    try:
        own_plan = simulate(schedules.typed(own.value), prices)
    except InputError as error:
        _lines = schedules.numbered(own.value)
        mo.stop(True, mo.callout(mo.md(f"The library says: {error}\n\n```text\n{_lines}\n```"), kind="warn"))
    mo.vstack(
        [
            mo.md(f"It runs: {own_plan.makespan:g} ticks, idle {sum(own_plan.bubble) / len(own_plan.bubble):.1%}."),
            with_table(own_plan, [f"worker {n}" for n in range(len(own_plan.rows))], "this schedule"),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
