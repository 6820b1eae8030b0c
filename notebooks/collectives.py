"""Collectives: the messages of a broadcast, an all-reduce, a gather in time, and what they cost on a network."""

import marimo

app = marimo.App(width="medium", app_title="Collectives")

with app.setup:
    import math

    import marimo as mo

    from distlab.collectives.simulation import SimulatedWorld
    from distlab.comm.link import Link
    from distlab_planner.collective_model import LIBRARY, CostModel, operations, predict_collective
    from distlab_playground import drawing, playback
    from distlab_playground.guesses import ask, stop_without_numbers

    [KNOWN] = SimulatedWorld(1).run(lambda endpoint: operations(0, endpoint, device="meta"))

    def simulated(operation, size_bytes, ranks, latency_us, gigabytes_per_second):
        """Return the simulated world of each topology of an operation: computers with one network card each."""
        link = Link(latency_us * 1e-6, gigabytes_per_second * 1e9)
        costs = CostModel(link, math.inf, math.inf, one_card=True)
        names = (name for name in KNOWN[operation] if name != LIBRARY)
        return {
            name: predict_collective(operation, name, size_bytes, ranks, costs, keep_messages=True) for name in names
        }


@app.cell
def _():
    locked, lock = mo.state(None, allow_self_loops=True)
    return lock, locked


@app.cell
def _(lock, locked):
    question = ask(
        "Eight computers average the gradients of a million weights: an *all-reduce* of 4 MB, over links of 20 µs and "
        "1.25 GB/s. **Which topology is the fastest?**",
        list(simulated("all-reduce", 4, 2, 20, 1.25)),
        locked,
        lock,
    )
    mo.vstack([mo.md("# Collectives"), question])
    return (question,)


@app.cell
def _(locked):
    mo.stop(locked() is None)
    sizes = {"4 MB": 4_000_000, "4 kB": 4_000}
    milliseconds = {
        size: {name: world.makespan * 1e3 for name, world in simulated("all-reduce", count, 8, 20, 1.25).items()}
        for size, count in sizes.items()
    }
    fastest = {size: min(of_size, key=of_size.get) for size, of_size in milliseconds.items()}
    mo.vstack(
        [
            mo.md(
                f"{'Right' if locked() == fastest['4 MB'] else 'No'}: **{fastest['4 MB']}** is the fastest for 4 MB, "
                f"and **{fastest['4 kB']}** for 4 kB. Large tensors pay for bytes, small ones for messages in a row."
            ),
            mo.Html(
                drawing.table(
                    ["topology", *(f"{size}, ms" for size in sizes)],
                    [(name, *(f"{milliseconds[size][name]:.3f}" for size in sizes)) for name in milliseconds["4 MB"]],
                    "An all-reduce of 8 computers, by simulation",
                )
            ),
        ]
    )
    return


@app.cell
def _(locked):
    mo.stop(locked() is None)
    operation = mo.ui.dropdown(list(KNOWN), value="all-reduce", label="operation")
    ranks = mo.ui.number(2, 16, value=4, label="ranks")
    kilobytes = mo.ui.number(1, 100_000, value=1000, label="kB of the tensor, or of all parts")
    latency = mo.ui.number(0, 10_000, value=20, label="latency, µs")
    bandwidth = mo.ui.number(0.01, 1000, step=0.01, value=1.25, label="bandwidth, GB/s")
    mo.vstack(
        [
            mo.md("## Play\n\nEach arrow is a message: it leaves its sender's line, and ends at its receiver's."),
            mo.hstack([operation, ranks, kilobytes], justify="start", wrap=True),
            mo.hstack([latency, bandwidth], justify="start", wrap=True),
        ]
    )
    return bandwidth, kilobytes, latency, operation, ranks


@app.cell
def _(bandwidth, kilobytes, latency, operation, ranks):
    stop_without_numbers(bandwidth, kilobytes, latency, ranks)
    worlds = simulated(operation.value, 1000 * kilobytes.value, ranks.value, latency.value, bandwidth.value)
    topology = mo.ui.radio(list(worlds), value=list(worlds)[-1], label="topology", inline=True)
    topology
    return topology, worlds


@app.cell
def _(topology, worlds):
    world = worlds[topology.value]
    last = len(world.messages)
    place, move = mo.state(last)
    return last, move, place, world


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
    played = playback.slider(last, place(), move, "messages, in the order of arrival (arrow keys)")
    played
    return (played,)


@app.cell
def _(operation, place, ranks, world, worlds):
    busiest = {name: max(world.counts, key=lambda count: count.sent_bytes) for name, world in worlds.items()}
    mo.vstack(
        [
            mo.Html(drawing.messages(ranks.value, world.messages, world.makespan, place())),
            mo.md(drawing.message_words(world.messages, place())),
            mo.Html(
                drawing.table(
                    ["topology", "ms", "messages", "of the busiest sender", "its bytes"],
                    [
                        (
                            name,
                            f"{one.makespan * 1e3:.3f}",
                            f"{len(one.messages):,}",
                            f"{busiest[name].sends:,}",
                            f"{busiest[name].sent_bytes:,}",
                        )
                        for name, one in worlds.items()
                    ],
                    f"{operation.value} of {ranks.value} ranks",
                )
            ),
        ]
    )
    return


@app.cell
def _(topology, world):
    sent = [
        (
            f"{number}",
            f"{one.sender}",
            f"{one.receiver}",
            f"{one.size_bytes:,}",
            f"{one.started_seconds * 1e3:.4g}",
            f"{one.ended_seconds * 1e3:.4g}",
        )
        for number, one in enumerate(world.messages, start=1)
    ]
    heads = ["message", "from rank", "to rank", "bytes", "leaves, ms", "arrives, ms"]
    mo.accordion({"Table: all messages": mo.Html(drawing.table(heads, sent, f"Messages of {topology.value}"))})
    return


if __name__ == "__main__":
    app.run()
