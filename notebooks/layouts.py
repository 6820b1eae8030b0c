"""Layouts: which way to share a model among ranks is the fastest on a machine, and does it fit?"""

import marimo

app = marimo.App(width="full", app_title="Layouts")

with app.setup:
    import marimo as mo

    from distlab.run.commands import LAB
    from distlab_planner.machine import read_machine
    from distlab_planner.memory import share_of_rank
    from distlab_planner.plan import MEASURED, PlanRequest
    from distlab_planner.table import HEADS
    from distlab_playground import drawing, layouts
    from distlab_playground.guesses import ask
    from simplellm.errors import InputError

    FILES = {path.stem: path for path in sorted((LAB / "docs/machines").glob("*.json"))}
    FILES |= {"this machine (runs/machine.json)": MEASURED} if MEASURED.exists() else {}

    def found(request, machine):
        """Return the layouts of a request that fit, the best first."""
        request.check()
        machine = machine.with_room_for(request.ranks, f"{request.ranks} ranks: {machine.name}")
        return request.find(machine, share_of_rank(machine, request.ranks))

    SIZES = dict(dmodel=4096, num_heads=32, n_layers=32, seq_len=2048, vocab_size=32_000, dtype="bfloat16")


@app.cell
def _():
    locked, lock = mo.state(None, allow_self_loops=True)
    return lock, locked


@app.cell
def _(lock, locked):
    axes = {
        "8 replicas, all weights on each": dict(dp=(8,), shard=("none",)),
        "8 replicas that shard the weights": dict(dp=(8,), shard=("weights",)),
        "a pipeline of 8 stages": dict(pp=(8,)),
        "8 slices of each layer": dict(tp=(8,)),
    }
    question = ask(
        "A model of 8.9 billion weights is trained with Adam on a host with eight H100 of 80 GB, with 32 "
        "sequences of 2,048 tokens in a step. **Which layout has the shortest step?**",
        list(axes),
        locked,
        lock,
    )
    mo.vstack([mo.md("# Layouts"), question])
    return axes, question


@app.cell
def _(axes, locked):
    mo.stop(locked() is None)
    h100 = read_machine(FILES["h100"])
    best = {
        name: found(PlanRequest(ranks=8, global_batch=32, top=1, **SIZES, **chosen), h100)
        for name, chosen in axes.items()
    }
    fitting = {name: one.rows[0] for name, one in best.items() if one.rows}
    fastest = min(fitting, key=lambda name: fitting[name].step.seconds)
    mo.vstack(
        [
            mo.md(f"{'Right' if locked() == fastest else 'No'}: **{fastest}** is the fastest that fits."),
            mo.Html(
                drawing.table(
                    ["layout", "step, s", "GB of a rank, of 80"],
                    [
                        (name, f"{fitting[name].step.seconds:.2f}", f"{fitting[name].process_bytes / 1e9:.1f}")
                        if name in fitting
                        else (name, "does not fit", f"{one.least_bytes / 1e9:.1f}")
                        for name, one in best.items()
                    ],
                    "The best of each kind by the planner, on docs/machines/h100.json (from data sheets)",
                )
            ),
        ]
    )
    return


@app.cell
def _(locked):
    mo.stop(locked() is None)

    def _number(value, label, start=1, stop=None):
        return mo.ui.number(start, stop, value=value, label=label)

    asked = (
        mo.md(
            "## Play\n\n{machine} {ranks} {global_batch}\n\n{dmodel} {num_heads} {n_layers} {seq_len}\n\n"
            "{vocab_size} {dtype} {optimizer} {top}"
        )
        .batch(
            machine=mo.ui.dropdown(list(FILES), value="h100", label="machine"),
            ranks=_number(8, "ranks", stop=256),
            global_batch=_number(32, "sequences in a step"),
            dmodel=_number(4096, "dmodel"),
            num_heads=_number(32, "heads"),
            n_layers=_number(32, "layers"),
            seq_len=_number(2048, "tokens of a sequence", start=2),
            vocab_size=_number(32_000, "pieces of the tokenizer"),
            dtype=mo.ui.dropdown(["float32", "bfloat16"], value="bfloat16", label="dtype"),
            optimizer=mo.ui.dropdown(["adam", "adamw", "sgd"], value="adam", label="optimizer"),
            top=_number(8, "layouts to show", stop=30),
        )
        .form(submit_button_label="Plan")
    )
    asked
    return (asked,)


@app.cell
def _(asked):
    mo.stop(asked.value is None)
    mo.stop(None in asked.value.values(), mo.md("Give a number in each field."))
    values = dict(asked.value)
    machine = read_machine(FILES[values.pop("machine")])
    try:
        request = PlanRequest(**values)
        result = found(request, machine)
    except InputError as error:
        mo.stop(True, mo.callout(mo.md(f"The library says: {error}"), kind="warn"))
    mo.stop(not result.rows, mo.callout(mo.md(layouts.none_fits(result)), kind="warn"))
    names = [f"{number}: {row.layout}" for number, row in enumerate(result.rows, start=1)]
    chosen = mo.ui.dropdown(names, value=names[0], label="memory of the workers of")
    return chosen, machine, names, request, result


@app.cell
def _(chosen, machine, names, request, result):
    row = result.rows[names.index(chosen.value)]
    tokens = request.global_batch * request.seq_len
    most_bytes = share_of_rank(machine, request.ranks)
    held = layouts.memory(row, request.model, machine, request.optimizer)
    mo.vstack(
        [
            mo.Html(
                drawing.table(
                    HEADS,
                    [one.cells(number, tokens) for number, one in enumerate(result.rows, start=1)],
                    f"{request.ranks} ranks, {result.layouts:,} layouts; {result.too_large:,} do not fit",
                )
            ),
            chosen,
            mo.Html(layouts.bars(held, most_bytes)),
            mo.Html(layouts.memory_table(held)),
        ]
    )
    return


if __name__ == "__main__":
    app.run()
