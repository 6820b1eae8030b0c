"""The panels with records beside the planner's numbers: bytes sent, bytes held, seconds of a step."""

import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from distlab.axes.layout import coordinate
from distlab_page.planned import costs_of, counts_memory, memory_of, sent_by
from distlab_page.records import Records, name_of
from distlab_page.tables import Json, table
from distlab_planner.costs import Costs
from distlab_planner.sent import Formula
from distlab_planner.step import WARM_UP

WITHOUT_RECOMPUTE = "activations without recomputation"  # counted, not held, as in `distlab.reports.memory`
BYTES = "bytes", "bytes a step", "by formula", "formula"


@dataclass
class _Total:
    """A rank's messages and bytes of a kind, and the formulas for those of a step."""

    messages: int = 0
    bytes: int = 0
    formulas: dict[int | None, Formula] = field(default_factory=dict)  # by receiver, as in `Formulas`


def ledger(run: Records) -> Json | None:
    """Return the bytes that each rank sent, by kind with their formulas, and from rank to rank.

    A collective's bytes are divided equally between the other ranks that took part.
    """
    if len(run.ledger) < 2:
        return _ledger_of_rank_0(run)
    costs, names = costs_of(run), [account["name"] for account in run.ledger]
    alike: dict[tuple[Any, ...], list[int]] = defaultdict(list)  # the ranks with the same row
    pairs: list[list[list[Any]]] = []  # by sender and receiver: kind, bytes, bytes by formula
    for account in run.ledger:
        count = account["steps"]
        totals, to_ranks = _sent(run, costs, account)
        pairs.append(to_ranks)
        for kind, total in totals.items():
            each, formulas = total.bytes / count if count else None, total.formulas.values()
            planned, words = sum(one.bytes for one in formulas), " + ".join(one.words for one in formulas)
            row = kind, total.messages, total.bytes, each, planned if formulas else None, words
            alike[row].append(account["rank"])
    most = {kind: max(row[2] for row in alike if row[0] == kind) for kind, *_ in alike}
    rows = [(row[0], ", ".join(map(str, ranks)), *row[1:]) for row, ranks in alike.items()]
    rows.sort(key=lambda row: (-most[row[0]], row[0]))
    steps = f"in {run.ledger[0]['steps']:,} steps"
    head = ("kind", "ranks", "messages", *BYTES)
    from_to = [
        (names[rank], names[peer], *sent)
        for rank, to_ranks in enumerate(pairs)
        for peer, here in enumerate(to_ranks)
        for sent in here
    ]
    return {
        "table": table(f"Bytes that each of these ranks sent {steps}, by kind", head, rows),
        "matrix": [[sum(size for _, size, _ in here) for here in to_ranks] for to_ranks in pairs],
        "kinds": pairs,
        "ranks": names,
        "pairs": table(f"Bytes from rank to rank {steps}", ("from", "to", "kind", "bytes", "by formula"), from_to),
        "has_formulas": costs is not None,
    }


def _sent(run: Records, costs: Costs | None, account: Json) -> tuple[dict[str, _Total], list[list[Any]]]:
    """Return the totals of a rank by kind; and by receiver, entries of a kind, its bytes, and its bytes by formula."""
    count = account["steps"]
    formulas = sent_by(run, costs, account["rank"], count) if costs and count else {}
    groups = Counter((sent["kind"], sent["way"]) for sent in account["sent"])
    totals: dict[str, _Total] = defaultdict(_Total)
    to_ranks: list[list[Any]] = [[] for _ in run.ledger]
    for sent in account["sent"]:
        kind, peers = sent["kind"], sent["peers"]
        to = coordinate(run.layout, peers[0], "pp") if sent["way"] == "send" else None
        to = to if (kind, to) in formulas else None  # also messages of a collective written by hand
        totals[kind].messages += sent["messages"]
        totals[kind].bytes += sent["bytes"]
        if formula := formulas.get((kind, to)):
            totals[kind].formulas[to] = formula
        is_alone = to is not None or groups[kind, sent["way"]] == 1
        for peer in peers:
            expected = formula.bytes * count / len(peers) if formula and is_alone else None
            to_ranks[peer].append([kind, sent["bytes"] / len(peers), expected])
    return totals, to_ranks


def _ledger_of_rank_0(run: Records) -> Json | None:
    """Return the bytes that rank 0 sent in the recorded steps: all that a run has without `ledger.json`."""
    totals: dict[str, int] = defaultdict(int)
    for record in run.metrics:
        for kind, size in record.get("sent_bytes", {}).items():
            totals[kind] += size
    if not totals:
        return None
    costs, count = costs_of(run), len(run.metrics)
    formulas = sent_by(run, costs, 0, count) if costs else {}  # those of a kind have one receiver each
    planned = {kind: (one.bytes, one.words) for (kind, _), one in formulas.items()}
    rows = [(kind, size, size / count, *planned.get(kind, (None, ""))) for kind, size in totals.items()]
    caption = f"Bytes that {run.reporter} sent ({run.why_alone})"
    return {"table": table(caption, ("kind", *BYTES), rows), "matrix": None, "has_formulas": costs is not None}


def memory(run: Records) -> Json | None:
    """Return the bytes that each rank held, by kind, beside the plan."""
    if not run.memory or run.alive is None:
        return None
    costs, names = costs_of(run), [name_of(run, rank) for rank in run.alive]
    kinds = [kind for kind in run.memory[0] if kind != WITHOUT_RECOMPUTE and any(rank.get(kind) for rank in run.memory)]
    planned = [memory_of(run, costs, rank) for rank in run.alive] if costs and counts_memory(run, costs) else None
    rows = [
        (name, kind, held[kind], planned[index].get(kind) if planned else None)
        for index, (name, held) in enumerate(zip(names, run.memory, strict=True))
        for kind in kinds
    ]
    bars = {kind: [held[kind] for held in run.memory] for kind in kinds}
    plan = {kind: [held.get(kind, 0) for held in planned] for kind in kinds} if planned else None
    shown = table("Bytes held at the peak", ("rank", "kind", "held", "by the plan"), rows)
    return {"ranks": names, "bars": bars, "plan": plan, "table": shown}


def prediction(run: Records) -> Json | None:
    """Return the predicted and the measured time of a step on rank 0, with `--machine`."""
    predicted = run.config.get("predicted_seconds")
    records = [record for record in run.metrics if "waited_seconds" in record]
    records = records[WARM_UP:] or records
    if not predicted or not records:
        return None
    seconds, waited, collective = (
        statistics.fmean(record[name] for record in records)
        for name in ("seconds", "waited_seconds", "collective_seconds")
    )
    measured = {
        "step": seconds,
        "computing": seconds - waited,
        "collectives": collective,
        "waiting for messages": waited - collective,
    }
    rows = [(what, predicted[what], measured[what], predicted[what] - measured[what]) for what in measured]
    head = ("of a step", "predicted", "measured", "difference")
    caption = f"Seconds of a step on rank 0, mean of {len(records):,} steps"
    return {"table": table(caption, head, rows), "parts": [row[:3] for row in rows]}
