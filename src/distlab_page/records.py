"""A run's folder, read."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from distlab.axes.layout import Layout, describe_rank, layout_size
from distlab.reports.records import newest_run, read_steps
from distlab.reports.trace import Trace, read_chrome
from distlab.settings.folders import CONFIG, is_claimed, is_run
from distlab.settings.recorded import read_config
from distlab.settings.resuming import fits
from simplellm.errors import InputError, require

NOT_COMPLETE = "this is not a complete record of a run; remove it, or wait until the run has written it"
GOES_ON = re.compile(r"ranks? (\d[\d, and]*) goe?s? on with step (\d+)")  # after a repair, in the log of each rank
FAILED = re.compile(r"rank (\d+)(?: \(.*?\))? (?:failed|has exited|was terminated)")
# Types of the values of each rank in ledger.json, and of each entry of what the rank sent.
ACCOUNT = {"name": str, "rank": int, "steps": int, "sent": list}
ACCOUNT |= dict.fromkeys(("seconds", "waited_seconds", "collective_seconds"), float)
SENT = {"kind": str, "way": str, "peers": list, "bytes": int, "messages": int}


@dataclass(frozen=True)
class Records:
    """The records of a run; those that it does not have, or not yet, are empty or None."""

    folder: Path
    is_running: bool
    config: dict[str, Any]
    metrics: list[dict[str, Any]]  # by step
    trace: Trace | None
    ledger: list[dict[str, Any]]  # by rank
    memory: list[dict[str, int]]  # by rank, bytes by kind; after a repair, of the ranks that are left
    logs: dict[str, list[str]]  # by their names, "rank 0", the lines that begin with "#"; first "launcher"

    @property
    def name(self) -> str:
        return self.folder.resolve().name

    @property
    def settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = self.config["settings"]
        return settings

    @property
    def sync_every(self) -> int | None:
        """Steps between averages of replicas that train independently; None if gradients are averaged in each step."""
        return self.settings.get("sync_every") if self.settings.get("outer") != "none" else None

    @property
    def layout(self) -> Layout:
        layout: Layout = self.config["layout"]
        return layout

    @property
    def ranks(self) -> int:
        return layout_size(self.layout)

    @property
    def repairs(self) -> list[tuple[int, tuple[int, ...]]]:
        """The repairs after deaths: the step with which ranks went on, and their numbers in the layout."""
        found = (GOES_ON.search(line) for lines in self.logs.values() for line in lines)
        told = dict.fromkeys(one.groups() for one in found if one)  # those of one step in the order of the log
        repairs = ((int(step), tuple(map(int, re.findall(r"\d+", names)))) for names, step in told)
        return sorted(repairs, key=lambda repair: repair[0])

    @property
    def dead(self) -> set[int]:
        """The ranks that the last repair left out, and those that a log names as having failed."""
        left = self.repairs[-1][1] if self.repairs else range(self.ranks)
        logs = [self.logs.get("launcher", [])] if self.repairs else self.logs.values()  # a spare may be in the place
        lines = (line for lines in logs for line in lines)
        return {*range(self.ranks)} - {*left} | {int(found[1]) for line in lines if (found := FAILED.match(line))}

    @property
    def steps(self) -> int:
        """The steps that the run has taken."""
        return self.metrics[-1]["step"] + 1 if self.metrics else 0

    @property
    def state(self) -> Literal["running", "ended early", "complete"]:
        """The state of the run; it ended early if it has not taken all steps that it was asked for."""
        if self.is_running:
            return "running"
        return "ended early" if self.steps < (self.settings.get("steps") or 0) else "complete"

    @property
    def alive(self) -> tuple[int, ...] | None:
        """The numbers of the ranks that `memory` has counts of; None if the records do not say which these are."""
        sets = [(*range(self.ranks),), self.trace.alive if self.trace else (), *(who for _, who in self.repairs[::-1])]
        return next((tuple(who) for who in sets if len(who) == len(self.memory)), None)

    @property
    def reporter(self) -> str:
        """The rank whose steps `metrics` has: rank 0 or, after its death, the first rank that is left."""
        firsts = {min(who) for _, who in self.repairs}
        return "rank 0" if firsts <= {0} else "rank 0 and, after it died, the first rank that was left"

    @property
    def why_alone(self) -> str:
        """The reason why there are no records of the other ranks."""
        if self.is_running:
            return "the other ranks report theirs at the end"
        return "after a repair, no other rank reports" if self.repairs else "the other ranks ended before they reported"

    @property
    def unit(self) -> str:
        """The unit in which the run counts its input: "tokens", "reviews"."""
        names = [name.removesuffix("_per_second") for name in (self.metrics or [{}])[0] if name.endswith("_per_second")]
        return names[0] if names else "tokens"


def read(folder: Path, has_ended: bool = False) -> Records:
    """Read a run's folder, or the newest run in a folder of runs.

    Args:
        folder: the run's folder.
        has_ended: the caller knows that no rank writes there any more.

    Raises:
        InputError: it is not a run's folder, or one of its records is not complete.
    """
    folder = newest_run(folder)
    require(is_run(folder), f"{folder}: this is not a run's folder; give one that has a {CONFIG}, such as runs/intro")
    config, events = read_config(folder), folder / "trace.json"
    trace = read_chrome(events) if events.exists() else None  # without steps, after a repair in the last one
    ledger, memory = _of_ranks(folder / "ledger.json", ACCOUNT), _of_ranks(folder / "memory.json", {})
    ranks = [*range(layout_size(config["layout"]))]
    for account in ledger:
        _check(folder / "ledger.json", account["sent"], SENT)
    are_known = all(peer in ranks for account in ledger for sent in account["sent"] for peer in sent["peers"])
    is_of_all = not ledger or ([account["rank"] for account in ledger] == ranks and are_known)
    require(is_of_all, f"{folder / 'ledger.json'}: {NOT_COMPLETE} (it is not of ranks 0 to {ranks[-1]})")
    return Records(
        folder=folder,
        is_running=not has_ended and is_claimed(folder),
        config=config,
        metrics=read_steps(folder, "step", "loss", "seconds"),
        trace=trace if trace and trace.steps() else None,
        ledger=ledger,
        memory=memory,
        logs={
            "launcher": _remarks(folder / "launcher.log"),
            **{f"rank {rank}": _remarks(folder / f"rank{rank}.log") for rank in ranks},
        },
    )


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: {NOT_COMPLETE} ({error})") from error


def _of_ranks(path: Path, kinds: Mapping[str, type]) -> list[dict[str, Any]]:
    """Return a list with an object for each rank; [] if there is no such file."""
    records = _read_json(path) if path.exists() else []
    _check(path, records, kinds)
    return cast(list[dict[str, Any]], records)


def _check(path: Path, records: Any, kinds: Mapping[str, type]) -> None:
    """Raise `InputError` unless these records are a list of objects, each with values of these types."""
    require(isinstance(records, list) and all(isinstance(r, dict) for r in records), f"{path}: {NOT_COMPLETE}")
    for record in records:
        for name, kind in kinds.items():
            require(fits(record.get(name), kind), f"{path}: {NOT_COMPLETE} (see {name})")


def _remarks(path: Path) -> list[str]:
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    return [line.removeprefix("#").removeprefix(" ") for line in lines if line.startswith("#")]


def name_of(run: Records, rank: int) -> str:
    """Return the name of a rank, as messages have it."""
    if run.ledger:
        return str(run.ledger[rank]["name"])
    return run.trace.describe_number(rank) if run.trace else describe_rank(run.layout, rank)


def in_words(run: Records) -> str:
    """Return a layout in words: "2 dp x 3 pp", "one process"."""
    return " x ".join(f"{size} {axis}" for axis, size in run.layout.items() if size > 1) or "one process"
