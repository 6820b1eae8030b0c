"""Figures that need no run: of layouts, of matrix products that ranks share, of schedules and of collectives."""

import itertools
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import torch
import tyro

from distlab.axes.layout import Neighbors, coordinate
from distlab.collectives.algorithms import ALL_REDUCES, broadcast_naive, broadcast_ring, broadcast_tree
from distlab.collectives.simulation import SimulatedWorld
from distlab.comm.link import Link
from distlab.parallel.context_parallel import positions_of
from distlab.parallel.options import CPOrder
from distlab.pipeline.actions import ActionCosts
from distlab.pipeline.auto import Limit
from distlab.pipeline.plan import simulate
from distlab.pipeline.schedules import AUTO, SCHEDULES, all_stages, stages_per_worker
from distlab.reports import style
from simplellm.errors import require

Png = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="file to write")]


def _require_colors(ranks: int) -> None:
    """Raise `InputError` unless there are several ranks, and a color for each."""
    require(2 <= ranks <= len(style.SERIES), f"--ranks {ranks}: give 2 to {len(style.SERIES)}")


def layout(png: Png, /, dp: int = 2, pp: int = 3, neighbors: Neighbors = "stages") -> None:
    """Which rank holds which stage of which replica, and which ranks communicate.

    Args:
        dp: replicas of the pipeline.
        pp: stages of each pipeline.
        neighbors: what ranks with neighboring numbers hold: the stages of a pipeline, or the replicas of a stage.
    """
    for flag, count in (("--dp", dp), ("--pp", pp)):
        require(1 <= count <= 32, f"{flag} {count}: give 1 to 32")
    figure, axes = style.subplots(0.6 + 1.2 * dp, width=style.WIDTH * max(1.0, pp / 5))
    sizes = {"dp": dp, "pp": pp} if neighbors == "stages" else {"pp": pp, "dp": dp}
    for rank in range(dp * pp):
        stage, replica = (coordinate(sizes, rank, axis) for axis in ("pp", "dp"))
        x, y = 2.4 * stage, -1.4 * replica
        axes.add_patch(style.rectangle(x, y, 1.6, 0.8, style.PALE))
        axes.text(x + 0.8, y + 0.4, f"rank {rank}\nstage {stage}", ha="center", va="center")
        if stage == 0:
            axes.text(x - 0.2, y + 0.4, f"replica {replica}", ha="right", va="center")
        if stage < pp - 1:
            axes.add_patch(style.arrow((x + 1.65, y + 0.4), (x + 2.35, y + 0.4), style.SKY, heads="<|-|>"))
        if replica < dp - 1:
            axes.add_patch(style.arrow((x + 0.8, y - 0.05), (x + 0.8, y - 0.55), style.ORANGE, heads="<|-|>"))
    axes.set(xlim=(-1.4, 2.4 * pp - 0.7), ylim=(-1.4 * (dp - 1) - 0.1, 0.9), aspect="equal")
    axes.axis("off")
    messages = {"activations and their gradients": style.SKY, "gradients of weights, averaged": style.ORANGE}
    style.legend(figure, {name: style.swatch(color) for name, color in messages.items()})
    style.save(figure, png)


def averaging(png: Png, /, ranks: int = 3) -> None:
    """The state of each rank of data parallelism in a step, and the one message; colors differ where the ranks do.

    Args:
        ranks: number of replicas.
    """
    _require_colors(ranks)
    figure, axes = style.subplots(4.3)
    lines = (  # what there is before or after each operation, from top to bottom, and who has it
        ("rows of the batch", "own", "nothing: data is a function\nof (seed, step, row)"),
        ("weights", "equal", "nothing: all ranks start equal"),
        ("gradient of these rows", "own", "all-reduce of all gradients"),
        ("mean gradient", "equal", "nothing: equal gradients,\nequal optimizer steps"),
        ("weights, one step on", "equal", ""),
    )
    for line, (title, content, messages) in enumerate(lines):
        y = -1.3 * line
        axes.text(-0.3, y + 0.35, title, ha="right", va="center")
        axes.text(2.6 * ranks + 0.2, y - 0.3, messages, ha="left", va="center")
        for rank in range(ranks):
            x = 2.6 * rank
            color = style.SERIES[rank] if content == "own" else style.PALE
            axes.add_patch(style.rectangle(x, y, 1.8, 0.7, color))
            axes.text(x + 0.9, y + 0.35, "equal" * (content == "equal"), ha="center", va="center", size=style.SMALL)
            if line == 0:
                axes.text(x + 0.9, y + 0.85, f"rank {rank}", ha="center", va="bottom", size=style.TITLE)
            targets = range(ranks) if messages.startswith("all-reduce") else [rank] * (line < len(lines) - 1)
            for to in targets:
                color = style.INK if len(targets) == 1 else style.ORANGE
                axes.add_patch(style.arrow((x + 0.9, y - 0.06), (2.6 * to + 0.9, y - 0.54), color, 1.2))
    axes.text(2.6 * ranks + 0.2, 0.85, "messages", ha="left", va="bottom", size=style.TITLE)
    axes.set(xlim=(-4.1, 2.6 * ranks + 5.0), ylim=(-1.3 * len(lines) + 1.1, 1.4))
    axes.axis("off")
    style.save(figure, png)


def stages(png: Png, /, pp: int = 3, layers: int = 6) -> None:
    """The layers of each stage of a pipeline, and the messages to its neighbors.

    Args:
        pp: stages of the pipeline.
        layers: layers of the model.
    """
    require(2 <= pp <= 6, f"--pp {pp}: give 2 to 6")
    require(pp <= layers <= 24, f"--layers {layers}: give {pp} to 24")
    figure, axes = style.subplots(2.9, width=style.WIDTH * max(1.0, pp / 4))
    bounds = [rank * layers // pp for rank in range(pp + 1)]
    for rank, (first, end) in enumerate(itertools.pairwise(bounds)):
        x = 3.2 * rank
        held = f"layer {first}" if end == first + 1 else f"layers {first}{',' if end == first + 2 else ' to'} {end - 1}"
        parts = ["embedding"] * (rank == 0) + [held] + ["head, loss"] * (rank == pp - 1)
        axes.add_patch(style.rectangle(x, 0, 1.9, 1.9, style.lighter(style.SERIES[rank], 0.35)))
        axes.text(x + 0.95, 0.95, "\n".join(parts), ha="center", va="center")
        axes.text(x + 0.95, 2.0, f"rank {rank}", ha="center", va="bottom", size=style.TITLE)
        axes.text(
            x + 0.95, -0.1, "and their weights, gradients,\noptimizer state", ha="center", va="top", size=style.SMALL
        )
        if rank < pp - 1:
            axes.add_patch(style.arrow((x + 1.98, 1.35), (x + 3.12, 1.35), style.SKY))
            axes.add_patch(style.arrow((x + 3.12, 0.55), (x + 1.98, 0.55), style.ORANGE))
    right = 3.2 * pp - 1.3
    for x, to, name in ((-0.8, -0.08, "tokens"), (right + 0.8, right + 0.08, "the same\ntokens, as\ntargets")):
        axes.add_patch(style.arrow((x, 0.95), (to, 0.95), style.INK))
        axes.text(x + (-0.1 if to > x else 0.1), 0.95, name, ha="right" if to > x else "left", va="center")
    axes.set(xlim=(-2.2, right + 2.5), ylim=(-0.8, 2.4))
    axes.axis("off")
    messages = {"forward: activations, (rows, seq, dmodel)": style.SKY, "backward: their gradients": style.ORANGE}
    style.legend(figure, {name: style.swatch(color) for name, color in messages.items()})
    style.save(figure, png)


def block(png: Png, /, ranks: int = 3) -> None:
    """Which parts of a layer each rank of tensor parallelism holds, and where f and g communicate.

    Args:
        ranks: number of ranks that share the layer; each has a color.
    """
    _require_colors(ranks)
    figure, axes = style.subplots(1.3 + 0.7 * ranks)
    parts = (  # from left to right: the name, and whether each rank has a slice or the whole
        ("norm", False),
        ("f", None),
        ("Q, K, V\nby outputs", True),
        ("heads", True),
        ("O\nby inputs", True),
        ("g", None),
        ("+, norm", False),
        ("f", None),
        ("gate, up\nby outputs", True),
        ("SiLU", True),
        ("down\nby inputs", True),
        ("g", None),
        ("+", False),
    )
    x, bottom = 0.0, -1.0 * ranks + 0.3
    for name, is_sliced in parts:
        width = 0.5 if is_sliced is None else {"+": 0.7, "norm": 1.0}.get(name, 1.3)
        middle = x + width / 2
        if is_sliced is None:
            color = style.ORANGE if name == "g" else style.SKY
            axes.add_patch(style.rectangle(x, bottom, width, ranks * 1.0 - 0.3, color))
            axes.text(middle, bottom / 2, name, ha="center", va="center", size=style.TITLE)
        else:
            axes.text(middle, 0.12, name, ha="center", va="bottom", size=style.SMALL)
            for rank in range(ranks):
                y = -1.0 * rank - 0.7
                axes.add_patch(style.rectangle(x, y, width, 0.7, style.SERIES[rank] if is_sliced else style.PALE))
                axes.add_patch(style.arrow((x + width, y + 0.35), (x + width + 0.25, y + 0.35), style.INK, 0.8))
        x += width + 0.25
    for rank in range(ranks):
        axes.text(-0.2, -1.0 * rank - 0.35, f"rank {rank}", ha="right", va="center")
    axes.set(xlim=(-1.3, x), ylim=(bottom - 0.1, 0.9))
    axes.axis("off")
    messages = {
        "whole on each rank": style.PALE,
        "f: backward, an all-reduce": style.SKY,
        "g: forward, an all-reduce": style.ORANGE,
    }
    style.legend(figure, {name: style.swatch(color) for name, color in messages.items()})
    style.save(figure, png)


def splits(png: Png, /, ranks: int = 3) -> None:
    """The two ways to split a matrix product over ranks, and what the ranks have to exchange; each rank has a color.

    Args:
        ranks: number of ranks that share the product.
    """
    _require_colors(ranks)
    figure, grid = style.subplots(4.0, 2)

    def matrix(axes: Any, x: float, width: float, height: float, name: str, cut: str) -> None:
        """Draw a rectangle, whole or with a part for each rank: by "columns", by "rows", or as "terms" of a sum."""
        for rank in range(ranks if cut else 1):
            left, bottom, part_width, part_height = {
                "": (x, -height / 2, width, height),
                "columns": (x + rank * width / ranks, -height / 2, width / ranks, height),
                "rows": (x, height / 2 - (rank + 1) * height / ranks, width, height / ranks),
                "terms": (x + rank * 0.28, -height / 2 - rank * 0.14, width, height),
            }[cut]
            color = style.SERIES[rank] if cut else style.PALE
            axes.add_patch(style.rectangle(left, bottom, part_width, part_height, color))
        axes.text(x + width / 2, height / 2 + 0.12, name, ha="center", va="bottom")

    ways = (
        ("by outputs", "slices: gathered, or\nthe next product's inputs", ("", "columns", "columns")),
        ("by inputs", "terms of a sum:\nadded up (all-reduce)", ("columns", "rows", "terms")),
    )
    for axes, (title, exchange, cuts) in zip(grid, ways, strict=True):
        matrix(axes, 0, 2, 1.2, "input (tokens, in)", cuts[0])
        matrix(axes, 2.7, 2, 2, "weight (in, out)", cuts[1])
        matrix(axes, 5.4, 2, 1.2, "output (tokens, out)", cuts[2])
        for x, sign in ((2.35, "\N{MULTIPLICATION SIGN}"), (5.05, "=")):
            axes.text(x, 0, sign, ha="center", va="center", size=style.TITLE)
        axes.text(-0.3, 0, title, ha="right", va="center", size=style.TITLE)
        axes.text(8.1, 0, exchange, ha="left", va="center")
        axes.set(xlim=(-1.8, 11.4), ylim=(-1.2, 1.5), aspect="equal")
        axes.axis("off")
    style.save(figure, png)


def sequence_parts(png: Png, /, ranks: int = 4) -> None:
    """Which rank computes which pairs of queries and keys, and in which step of the ring; each rank has a color.

    Args:
        ranks: number of ranks that share a sequence.
    """
    _require_colors(ranks)
    figure, grid = style.subplots(4.4, 1, 2)
    chunks = 2 * ranks
    for axes, order in zip(grid, get_args(CPOrder), strict=True):
        owners = {int(chunk): rank for rank in range(ranks) for chunk in positions_of(rank, ranks, chunks, order)}
        work = Counter[int]()  # by rank; within a chunk, half of the pairs
        for query, key in itertools.product(range(chunks), repeat=2):
            if key > query:
                continue
            work[owners[query]] += 1 if key == query else 2
            color = style.lighter(style.SERIES[owners[query]], 0.4 if key == query else 0.75)
            axes.add_patch(style.rectangle(key, query, 1, 1, color))
            step = (owners[query] - owners[key]) % ranks
            axes.text(key + 0.5, query + 0.5, step, ha="center", va="center", size=style.SMALL)
        busiest = max(work.values()) * ranks / work.total()
        title = f"{order}: busiest rank {busiest:.3g} \N{MULTIPLICATION SIGN} the mean"
        axes.set(title=title, xlabel="keys", xlim=(0, chunks), ylim=(chunks, 0), aspect="equal", xticks=[], yticks=[])
    grid[0].set_ylabel("queries")
    style.legend(figure, {f"rank {rank}": style.swatch(style.SERIES[rank]) for rank in range(ranks)})
    style.save(figure, png)


def replicas(png: Png, /, ranks: int = 3) -> None:
    """Which parts of weights, gradients and optimizer state each replica holds, and which messages a step takes.

    Args:
        ranks: number of replicas; each part has a color.
    """
    _require_colors(ranks)
    figure, axes = style.subplots(5.2)
    kinds = {"weights": 1, "gradients": 1, "optimizer state": 2}  # by Adam's moments, twice as many numbers
    ways = (  # what is sharded, and the messages of a step
        ("averaged gradients\n(dp-ga)", 0, "all-reduce\nof the gradients"),
        (
            "optimizer state sharded\n(ZeRO 1, dp-zero)",
            1,
            "reduce-scatter of the gradients,\nall-gather of the weights",
        ),
        ("gradients too\n(ZeRO 2)", 2, "reduce-scatter of each bucket,\nall-gather of the weights"),
        (
            "weights too\n(ZeRO 3, FSDP, dp-fsdp)",
            3,
            "reduce-scatter of each layer's gradients,\nall-gather of its weights before each pass",
        ),
    )
    for row, (title, sharded, messages) in enumerate(ways):
        top = -2.2 * row
        axes.text(-0.7, top - 0.75, title, ha="right", va="center")
        axes.text(3.0 * ranks + 0.1, top - 0.75, messages, ha="left", va="center")
        for rank, (line, (kind, width)) in itertools.product(range(ranks), enumerate(kinds.items())):
            y = top - 0.5 * (line + 1)
            for part in range(ranks):
                is_held = part == rank or line < len(kinds) - sharded
                color = style.SERIES[part] if is_held else style.PALE
                axes.add_patch(style.rectangle(3.0 * rank + part * width / ranks, y, width / ranks, 0.4, color))
            axes.text(3.0 * rank - 0.1, y + 0.2, kind[0].upper(), ha="right", va="center")
        if row == 0:
            for rank in range(ranks):
                axes.text(3.0 * rank, top + 0.15, f"rank {rank}", ha="left", va="bottom", size=style.TITLE)
    axes.set(xlim=(-4.6, 3.0 * ranks + 5.6), ylim=(-2.2 * len(ways) + 0.4, 0.8))
    axes.axis("off")
    style.save(figure, png)


def schedules(png: Png, /, stages: int = 4, micro_batches: int = 8) -> None:
    """Activations that each schedule keeps, and its idle time, by the plan; beside them, `auto` for each limit.

    Twice: with F = I = W, and with I = 1.2 and W = 0.8. Messages are free.

    Args:
        stages: workers of the pipeline.
        micro_batches: parts that the batch is split into.
    """
    require(2 <= stages <= 8, f"--stages {stages}: give 2 to 8")
    require(stages <= micro_batches <= 32, f"--micro-batches {micro_batches}: give {stages} to 32")
    figure, grid = style.subplots(4.2, 1, 2, sharey=True)
    curves: dict[str, Any] = {}
    for axes, (title, weight_share) in zip(
        grid, {"F = I = W": 0.5, "F = 1, I = 1.2, W = 0.8": 0.4}.items(), strict=True
    ):

        def planned(
            name: str, chunks: int, limit: Limit | None = None, share: float = weight_share
        ) -> tuple[float, float]:
            """Return the micro-batches that a worker keeps, and the percentage of time that it idles."""
            costs = ActionCosts(1 / chunks, 2 / chunks, activation_bytes=1 / chunks, weight_share=share)
            plan = simulate(all_stages(name, stages, micro_batches, chunks, costs, limit), costs)
            return max(plan.peak_bytes), 100 * sum(plan.bubble) / stages

        for chunks, color in ((1, style.BLUE), (2, style.VERMILLION)):
            limits = [half / 2 for half in range(4, 2 * micro_batches + 1)]
            idle = [planned(AUTO, chunks, Limit(limit))[1] for limit in limits]
            least = list(itertools.accumulate(idle, min))  # a list that keeps less also fits a larger limit
            name = f"auto, {chunks} stage{'s' * (chunks > 1)} a worker"
            [curves[name]] = axes.step(limits, least, where="post", color=color)
        for name, schedule in SCHEDULES.items():
            if name not in ("naive", AUTO) and schedule.fits(stages, micro_batches):
                kept, idle_percent = planned(name, stages_per_worker(name))
                color = style.BLUE if stages_per_worker(name) == 1 else style.VERMILLION
                axes.plot(kept, idle_percent, "o", color=color, markersize=6)
                place: dict[str, Any] = {"xytext": (-6, -12), "ha": "right"} if name == "zb-v" else {"xytext": (6, 5)}
                axes.annotate(name, (kept, idle_percent), **place, textcoords="offset points", size=style.SMALL)
        axes.set(title=title, xlim=(1.5, micro_batches + 1.5), ylim=(0, None), xlabel="micro-batches kept at most")
    grid[0].set_ylabel("idle share of a step, %")
    style.legend(figure, curves)
    style.save(figure, png)


def topologies(png: Png, /, world_size: int = 8) -> None:
    """The messages of broadcasts and all-reduces over time, in a simulated world.

    The latency of a message is a tenth of the time to send the whole tensor; chunks take less, and are drawn thinner.
    The ring all-reduce is drawn twice: beside the others, and enlarged.

    Args:
        world_size: number of ranks.
    """
    require(2 <= world_size <= 32, f"--world-size {world_size}: give 2 to 32 ranks")
    tensor = torch.empty(840, device="meta")  # has a size but no content
    link = Link(latency_seconds=0.1, bytes_per_second=tensor.nbytes)

    def simulated(collective: Callable[..., None]) -> SimulatedWorld:
        world = SimulatedWorld(world_size, link, keep_messages=True)
        world.run(lambda endpoint: collective(tensor, endpoint=endpoint))
        return world

    broadcasts = {"naive": broadcast_naive, "tree": broadcast_tree, "ring": broadcast_ring}
    rows = [
        {f"broadcast\n{name}": simulated(partial(broadcast, src=0)) for name, broadcast in broadcasts.items()},
        {f"all-reduce\n{name}": simulated(all_reduce) for name, all_reduce in ALL_REDUCES.items()},
    ]
    longest = [max(world.makespan for world in row.values()) for row in rows]
    figure, grid = style.subplots(7.4, 2, 4, height_ratios=longest)
    for line, row, seconds in zip(grid, rows, longest, strict=True):
        for axes, (title, world) in zip(line, row.items(), strict=False):
            _draw_messages(axes, title, world, tensor.nbytes, seconds)
    _draw_messages(grid[0, 3], f"{title}, enlarged", world, tensor.nbytes, world.makespan)
    figure.supylabel("time, in transmissions of the whole tensor")
    style.save(figure, png)


def _draw_messages(axes: Any, title: str, world: SimulatedWorld, tensor_bytes: int, seconds: float) -> None:
    """Draw messages with time running downwards; those between a ring's first and last rank cross the edges."""
    thinner = min(1.0, 8 / world.size)
    for sender, receiver, size_bytes, start, end in world.messages:
        ways = [(sender, receiver)]
        if "ring" in title and abs(sender - receiver) == world.size - 1 > 1:
            step = 1 if sender else -1
            ways = [(sender, sender + step), (receiver - step, receiver)]
        for x, to_x in ways:
            width = thinner * (0.6 + size_bytes / tensor_bytes)
            axes.add_patch(style.arrow((x, start), (to_x, end), style.SERIES[x > to_x], width))
    for rank, finished in enumerate(world.seconds):
        axes.plot([rank, rank], [0, finished], color=style.PALE, linewidth=3 * thinner, zorder=0)
    ranks = range(0, world.size, max(1, world.size // 4))
    axes.set(title=title, xlabel="rank", xticks=ranks, xlim=(-0.6, world.size - 0.4), ylim=(seconds, 0))
    axes.grid(visible=False)
