"""The numbers of a run's page, computed again from the run's files, without the code that makes pages.

For runs of replicas and of pipelines with one stage for each worker, plain SGD and no slices.
"""

import functools
import json
import math
import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from distlab.pipeline.schedules import all_stages
from simplellm.errors import InputError

STEPS = 20  # of the runs in tests/distlab_page/conftest.py
CURVES = "loss", "validation_loss", "lr", "grad_norm"
NUMBER = re.compile(r"(?<![\w.#-])-?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?")  # not one in a name, such as zb-h1
Pass = tuple[int, str]  # a worker, and the name of a pass: "F2"


def numbers(value: Any, at: str = "") -> dict[str, float]:
    """Return the numbers in JSON values, by where they are; texts do not count."""
    if isinstance(value, dict):
        return {place: n for key, held in value.items() for place, n in numbers(held, f"{at}.{key}").items()}
    if isinstance(value, list | tuple):
        return {place: n for index, held in enumerate(value) for place, n in numbers(held, f"{at}[{index}]").items()}
    return {at: value} if isinstance(value, int | float) and not isinstance(value, bool) else {}


def in_texts(value: Any, at: str = "") -> dict[str, list[float]]:
    """Return the numbers in texts in JSON values, by where the text is."""
    if isinstance(value, dict):
        return {place: n for key, held in value.items() for place, n in in_texts(held, f"{at}.{key}").items()}
    if isinstance(value, list | tuple):
        return {place: n for index, held in enumerate(value) for place, n in in_texts(held, f"{at}[{index}]").items()}
    found = [float(text.replace(",", "")) for text in NUMBER.findall(value)] if isinstance(value, str) else []
    return {at: found} if found else {}


def computed(words: str) -> float:
    """Return the value of a formula in words, such as "3 of 4 steps x 2 (3 - 1) / 3 x 20 weights x 4 B"."""
    plain = re.sub(r"\([^()]*[a-z][^()]*\)", "", words)  # a remark
    signs = re.sub(r"\b(in|of)\b", "/", re.sub(r"(\d) \(", r"\1 * (", plain)).replace("\N{MULTIPLICATION SIGN}", "*")
    return float(eval(re.sub(r"[^\d+\-*/(). ]", "", signs)))  # noqa: S307


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def named(timeline: dict[str, Any]) -> dict[str, Any]:
    """Return a timeline with the names of its bars and arrows in place of numbers of names, sorted."""
    names, kinds = timeline["names"], [kind["key"] for kind in timeline["kinds"]]

    def bars(of: Sequence[Any]) -> list[Any]:
        return sorted([rank, names[name], kinds[kind], *times] for rank, kind, name, *times in of)

    steps = [
        {**step, "bars": bars(step["bars"]), "arrows": sorted([names[a[4]], *a[:4]] for a in step["arrows"])}
        for step in timeline["steps"]
    ]
    return {**timeline, "steps": steps, "plan": bars(timeline["plan"])}


class Expected:
    """The parts of a page, from a run's folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self.config = self._json("config.json")
        self.steps = lines(run)
        axes = self.config["layout"]
        self.dp, self.pp = (axes.get(axis, 1) for axis in ("dp", "pp"))
        self.ranks = range(self.dp * self.pp)

    def _json(self, name: str) -> Any:
        return json.loads((self._run / name).read_text())

    def layout(self) -> dict[str, Any]:
        split = self.config.get("layers_per_stage") or [None] * self.pp
        at = [(rank, rank // self.pp, rank % self.pp) for rank in self.ranks]
        ranks = [
            {"rank": rank, "row": row, "column": column, "inner": 0, "stages": [column], "layers": split[column]}
            for rank, row, column in at
        ]
        place = {"dp": 1, "pp": 2}
        rows = [
            (one[0], *(one[place[a]] if a in place else 0 for a in self.config["layout"]), split[one[2]]) for one in at
        ]
        return {"ranks": ranks, "columns": self.pp, "rows": self.dp, "inner": 1, "table": {"rows": rows}}

    def names(self) -> list[str]:
        return [f"rank {rank} (stage {rank % self.pp} of replica {rank // self.pp})" for rank in self.ranks]

    def sentences(self) -> dict[str, list[float]]:
        """The numbers in captions, heads and sentences, by where they are; names of ranks and events do not count."""
        steps, parts, enough = len(self.steps), self.config["settings"]["micro_batches"], 2 * self.pp
        sizes = [self.dp, self.pp]
        return {
            ".title": sizes,
            ".status.text": [steps, self.config["settings"]["steps"]],
            ".about[0].facts.layout": [*sizes, len(self.ranks)],
            ".layout.words": sizes,
            ".curves.runs[0].caption": [steps],
            **{f".timeline.steps[{number}].label": [number + 1] for number in range(steps - 1)},
            ".schedules.table.caption": [self.pp, parts],
            **{f".schedules.table.head[{n}]": of for n, of in ((2, [1]), (4, [enough]), (5, [enough, 10]))},
            **{f".schedules.table.shares[{n}]": of for n, of in ((1, [enough]), (2, [enough, 10]))},
            ".ledger.table.caption": [steps],
            ".ledger.pairs.caption": [steps],
        }

    def curves(self) -> dict[str, Any]:
        seconds = [math.fsum(step["seconds"] for step in self.steps[: end + 1]) for end in range(len(self.steps))]
        values = {
            name: [step.get(name) for step in self.steps] for name in CURVES if any(name in s for s in self.steps)
        }
        tokens = [step["tokens"] for step in self.steps]
        return {
            "at": {"steps": [s["step"] + 1 for s in self.steps], "tokens": tokens, "seconds": seconds},
            "values": values,
        }

    def ledger(self) -> dict[str, Any]:
        """The bytes of each rank by kind, those of kinds with a formula, and those from rank to rank."""
        settings, accounts, held = self.config["settings"], self._json("ledger.json"), self._json("memory.json")
        sent: dict[tuple[int, str], Counter[str]] = defaultdict(Counter)
        pairs: dict[tuple[int, int], Counter[str]] = defaultdict(Counter)
        for account in accounts:
            for way in account["sent"]:
                sent[account["rank"], way["kind"]].update(messages=way["messages"], bytes=way["bytes"])
                for peer in way["peers"]:
                    pairs[account["rank"], peer][way["kind"]] += way["bytes"] / len(way["peers"])
        activations = settings["batch_size"] * settings["seq_len"] * settings["dmodel"] * 4
        everybody = 2 * (len(self.ranks) - 1) / len(self.ranks) * 8
        formulas = {
            rank: {
                "activations": activations,
                "gradients of activations": activations,
                "gradients": 2 * (self.dp - 1) / self.dp * held[rank]["parameters"],
                "loss": everybody,
                "gradient norm": everybody,
            }
            for rank in self.ranks
        }
        rows = {
            key: (
                count["messages"],
                count["bytes"],
                count["bytes"] / accounts[key[0]]["steps"],
                formulas[key[0]].get(key[1]),
            )
            for key, count in sent.items()
        }
        return {"rows": rows, "pairs": pairs, "steps": accounts[0]["steps"]}

    def memory(self) -> dict[str, list[int]]:
        held = self._json("memory.json")
        return {kind: [rank[kind] for rank in held] for kind in held[0] if kind != "activations without recomputation"}

    @functools.cached_property
    def _trace(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = self._json("trace.json")["traceEvents"]
        return events

    @functools.cache  # noqa: B019
    def events(self, kind: str) -> list[list[list[tuple[str, float, float, str]]]]:
        """Return the events of each step but the first, by rank: name, start and end in seconds, message."""
        raw = [e for e in self._trace if e["ph"] == "X"]
        taken: dict[int, list[Any]] = {rank: [e for e in raw if e["pid"] == rank] for rank in self.ranks}
        steps = {rank: sorted((e["ts"], e["dur"]) for e in own if e["cat"] == "step") for rank, own in taken.items()}
        found = []
        for number in range(1, len(steps[0])):
            spans = {rank: (at[number][0], sum(at[number])) for rank, at in steps.items()}
            found.append([
                [
                    (e["name"], e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6, e.get("args", {}).get("message", ""))
                    for e in taken[rank]
                    if e["cat"] == kind and spans[rank][0] <= e["ts"] < spans[rank][1]
                ]
                for rank in self.ranks
            ])  # fmt: skip
        return found

    def timeline(self) -> dict[str, Any]:
        computed, waited, sent, whole = map(self.events, ("compute", "wait", "send", "step"))
        steps = list[dict[str, Any]]()
        busy, waiting, spans = (defaultdict[int, float](float) for _ in range(3))
        for passes, waits, sends, own in zip(computed, waited, sent, whole, strict=True):
            first = min(start for rank in passes for _, start, _, _ in rank)
            bars = [
                [rank, name, name[0] if events is passes else "wait", (start - first) * 1e3, (end - start) * 1e3]
                for events in (passes, waits)
                for rank in self.ranks
                for name, start, end, _ in events[rank]
            ]
            arrived = {flow: (rank, end) for rank in self.ranks for _, _, end, flow in waits[rank] if flow}
            arrows = [
                [name, rank, (start - first) * 1e3, arrived[flow][0], (arrived[flow][1] - first) * 1e3]
                for rank in self.ranks
                for name, start, _, flow in sends[rank]
                if flow in arrived
            ]
            ms = (own[0][0][2] - own[0][0][1]) * 1e3
            steps.append({"ms": ms, "bars": sorted(bars), "arrows": sorted(arrows)})
            for rank in self.ranks:
                replica = [e for r in self.ranks if r // self.pp == rank // self.pp for e in passes[r]]
                begin, end = min(e[1] for e in replica), max(e[2] for e in replica)
                spans[rank] += end - begin
                busy[rank] += sum(e[2] - e[1] for e in passes[rank])
                waiting[rank] += sum(max(0.0, min(e[2], end) - max(e[1], begin)) for e in waits[rank])
        lengths: dict[Pass, list[float]] = defaultdict(list)  # the plan has the mean of a kind of pass on a stage
        for passes in computed:
            for rank in self.ranks:
                for name, start, end, _ in passes[rank]:
                    lengths[rank % self.pp, name[0]].append(end - start)
        means = {key: statistics.fmean(taken) for key, taken in lengths.items()}
        played = self.play({(w, name): means[w, name[0]] for w, names in enumerate(self.orders()) for name in names})
        plan_seconds = max(end for _, end in played.values())
        idle = [
            1 - sum(end - start for (w, _), (start, end) in played.items() if w == worker) / plan_seconds
            for worker in range(self.pp)
        ]
        rows = [
            ["", busy[rank] / spans[rank], waiting[rank] / spans[rank], idle[rank % self.pp]] for rank in self.ranks
        ]
        ms_of_steps = [step["ms"] for step in steps]
        return {
            "steps": steps,
            "of_steps": len(steps),
            "typical": ms_of_steps.index(sorted(ms_of_steps)[len(steps) // 2]),
            "slowest": ms_of_steps.index(max(ms_of_steps)),
            "plan": sorted(
                [rank, name, name[0], start * 1e3, (end - start) * 1e3]
                for rank in self.ranks
                for (worker, name), (start, end) in played.items()
                if worker == rank % self.pp
            ),
            "plan_ms": plan_seconds * 1e3,
            "idle": {"plan": statistics.fmean(idle), "measured": 1 - statistics.fmean(row[1] for row in rows)},
            "table": {"rows": rows},
        }

    @functools.cache  # noqa: B019
    def orders(self) -> list[list[str]]:
        """Return the order of the passes of each worker, as a rank of the first replica computed them."""
        return [[name for name, *_ in sorted(self.events("compute")[0][w], key=lambda e: e[1])] for w in range(self.pp)]

    def play(self, seconds: Mapping[Pass, float]) -> dict[Pass, tuple[float, float]]:
        """Return when passes begin and end if messages take no time: after the one before, and the one they need."""
        done: dict[Pass, tuple[float, float]] = {}
        todo = [(worker, list(names)) for worker, names in enumerate(self.orders())]
        while any(names for _, names in todo):
            for worker, names in todo:
                while names:
                    name = names[0]
                    source = worker - 1 if name[0] == "F" else worker + 1
                    is_first = source in (-1, self.pp)
                    if not is_first and (source, name) not in done:
                        break
                    own = [end for (w, _), (_, end) in done.items() if w == worker]
                    start = max([0.0, *own] + ([] if is_first else [done[source, name][1]]))
                    done[worker, names.pop(0)] = start, start + seconds[worker, name]
        return done

    def time(self) -> dict[str, Any]:
        """The seconds of each rank by activity, and the factors of efficiency."""
        computed, waited, sent, whole = (
            [*zip(*self.events(kind), strict=True)] for kind in ("compute", "wait", "send", "step")
        )
        rows = []
        for rank in self.ranks:
            seconds = [
                sum(e[2] - e[1] for step in kind[rank] for e in step) for kind in (computed, waited, sent, whole)
            ]
            during = sum(  # a rank waits while it sends, until the receiver takes the message
                w[2] - w[1]
                for waits, sends in zip(waited[rank], sent[rank], strict=True)
                for w in waits
                if any(s[1] <= w[1] < s[2] for s in sends)
            )
            sending = seconds[2] - during
            rows.append((seconds[0], seconds[1], sending, seconds[3] - seconds[0] - seconds[1] - sending))
        steps = self.events("compute")
        mean, busiest = statistics.fmean(row[0] for row in rows), max(row[0] for row in rows)
        taken = sum(max(e[2] for r in step for e in r) - min(e[1] for r in step for e in r) for step in steps)
        free = 0.0
        for step in steps:
            replicas = []
            for first in range(0, len(self.ranks), self.pp):
                lengths = {(w, e[0]): e[2] - e[1] for w in range(self.pp) for e in step[first + w]}
                replicas.append(max(end for _, end in self.play(lengths).values()))
            free += max(replicas)
        shares = (mean / busiest, busiest / free, free / taken, mean / taken)
        return {
            "rows": rows,
            "table": {"rows": [("", *row) for row in rows]},
            "factors": {"rows": [("", share) for share in shares]},
        }


def of_schedule(name: str, workers: int, micro_batches: int, steps: int) -> tuple[float, float, float] | None:
    """The mean bubble of a schedule's workers, its time, and the micro-batches that a worker keeps at once, at most.

    Messages are free; all stages of a worker together take 1 for a forward pass, 2 for a backward pass. None if there
    is no such schedule.
    """
    try:
        programs = all_stages(name, workers, micro_batches)
    except InputError:
        return None
    each = len({action.stage for action in programs[0]})
    todo = [
        [(a.letter, a.stage, a.micro_batch + step * micro_batches) for step in range(steps) for a in program]
        for program in programs
    ]
    done, clocks, busy, kept = dict[tuple[str, int, int], float](), [0.0] * workers, [0.0] * workers, [1] * workers
    alive: list[set[tuple[int, int]]] = [set() for _ in programs]
    while any(todo):
        for worker, program in enumerate(todo):
            while program:
                letter, stage, part = program[0]
                way = "F" if letter == "F" else "B"
                source = stage - 1 if way == "F" else stage + 1
                is_free = letter == "W" or source in (-1, workers * each)
                if not is_free and (way, source, part) not in done:
                    break
                program.pop(0)
                seconds = {"F": 1, "B": 2, "I": 1, "W": 1}[letter] / each
                busy[worker] += seconds
                clocks[worker] = max(clocks[worker], 0.0 if is_free else done[way, source, part]) + seconds
                if letter != "W":
                    done[way, stage, part] = clocks[worker]
                if letter == "F":
                    alive[worker].add((stage, part))
                elif letter != "I":  # the weights' gradients need some of them
                    alive[worker].discard((stage, part))
                kept[worker] = max(kept[worker], len(alive[worker]))
    return statistics.fmean(1 - own / max(clocks) for own in busy), max(clocks), max(kept) / each
