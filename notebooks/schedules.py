"""Pipeline schedules: play them action by action, change their costs, kill a worker, write your own."""

import marimo

app = marimo.App(width="medium", app_title="Schedules")

with app.setup:
    import math

    import marimo as mo

    from distlab.pipeline.actions import ActionCosts
    from distlab.pipeline.plan import simulate
    from distlab.pipeline.schedules import schedule_names
    from distlab.show_schedule import Request, plan_of
    from distlab_playground import drawing, schedules
    from distlab_playground.guesses import ask
    from simplellm.errors import InputError

    def stop_without_numbers(*fields):
        mo.stop(None in [field.value for field in fields], mo.md("Give a number in each field."))


@app.cell
def _():
    locked, lock = mo.state(None, allow_self_loops=True)
    return lock, locked


@app.cell
def _(lock, locked):
    bubbles = schedules.bubbles(workers=3, micro_batches=6, steps=10)
    question = ask(
        "Three workers share the layers of a model. Each micro-batch passes forward through all of them, then "
        "backward. A worker that waits for another one is idle: the idle share of its time is the *bubble*.\n\n"
        "Ten steps follow each other without a wait in between, each with 6 micro-batches. **In which of these orders "
        "is the bubble the shortest?**",
        list(bubbles),
        locked,
        lock,
    )
    mo.vstack([mo.md("# Schedules"), question])
    return bubbles, question


@app.cell
def _(bubbles, locked):
    mo.stop(locked() is None)
    shown = sorted(bubbles.items(), key=lambda pair: pair[1])
    best, least = shown[0]
    is_right = math.isclose(bubbles[locked()], least)
    mo.vstack(
        [
            mo.md(
                f"{'Right' if is_right else 'No'}: **{best}** has the shortest, {least:.1%} (what the first "
                f"and the last step leave); **{locked()}** has {bubbles[locked()]:.1%}. Play them below to see why."
            ),
            mo.Html(
                drawing.table(
                    ["schedule", "bubble"],
                    [(name, f"{bubble:.1%}") for name, bubble in shown],
                    "Idle on average; all passes take the same time, messages none",
                )
            ),
        ]
    )
    return


@app.cell
def _(locked):
    mo.stop(locked() is None)

    def number(start, stop, value, label):
        return mo.ui.number(start, stop, value=value, label=label)

    schedule = mo.ui.dropdown(schedule_names(), value="dapple", label="schedule")
    workers, micro_batches = number(1, 8, 3, "workers"), number(1, 32, 6, "micro-batches")
    chunks = number(1, 4, 2, "chunks (interleaved, auto)")
    forward, inputs, weights = number(1, 9, 1, "ticks of F"), number(1, 9, 1, "of I"), number(1, 9, 1, "of W")
    transfer, limit = number(0, 9, 0, "ticks of a message"), number(1, 32, 6, "micro-batches that a worker may keep")
    pipelines, dead = number(1, 3, 1, "pipelines"), mo.ui.text(label="dead workers, as 4 or 1,5 (a star: their work)")
    mo.vstack(
        [
            mo.md(
                "## Play\n\nF is a forward pass. A backward pass is B, or it has two parts: I (gradients of "
                "activations, for which the worker before waits) and W (gradients of weights, for which none waits)."
            ),
            mo.hstack([schedule, workers, micro_batches], justify="start", wrap=True),
            mo.hstack([forward, inputs, weights], justify="start", wrap=True),
            mo.hstack([transfer, chunks, pipelines], justify="start", wrap=True),
            mo.hstack([limit, dead], justify="start", wrap=True),
        ]
    )
    return chunks, dead, forward, inputs, limit, micro_batches, pipelines, schedule, transfer, weights, workers


@app.cell
def _(chunks, dead, forward, inputs, limit, micro_batches, pipelines, schedule, transfer, weights, workers):
    stop_without_numbers(chunks, forward, inputs, limit, micro_batches, pipelines, transfer, weights, workers)
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
    played = mo.ui.slider(
        1,
        sum(map(len, plan.spans)),
        value=sum(map(len, plan.spans)),
        label="played (arrow keys)",
        show_value=True,
        full_width=True,
    )
    return (played,)


@app.cell
def _(costs, limit, names, plan, played, title):
    curves = [schedules.kept(line, costs) for line in plan.spans]
    over = [name for name, most in zip(names, plan.peak_bytes, strict=True) if most > limit.value]
    mo.vstack(
        [
            played,
            mo.Html(drawing.passes(plan, names, played.value, title)),
            mo.md(schedules.says(plan, names, played.value)),
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
    sizes = dict(stages=workers.value, micro_batches=micro_batches.value, chunks_per_stage=chunks.value)
    try:
        _, example, _ = plan_of(Request(schedule.value, **sizes))
    except InputError:
        mo.stop(True)
    own = mo.ui.text_area(
        schedules.as_typed(example),
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
        mo.stop(True, mo.callout(mo.md(f"The library says: {error}"), kind="warn"))
    numbered = [f"worker {n}" for n in range(len(own_plan.rows))]
    mo.vstack(
        [
            mo.md(f"It runs: {own_plan.makespan:g} ticks, idle {sum(own_plan.bubble) / len(own_plan.bubble):.1%}."),
            mo.Html(drawing.passes(own_plan, numbered)),
            mo.accordion({"Table: each pass": mo.Html(schedules.table(own_plan, numbered))}),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
