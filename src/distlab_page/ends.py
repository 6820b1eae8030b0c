"""The panel of a page about deaths and waits, and who did the work of the dead."""

import itertools
import re

from distlab.pipeline.rerouting import hosts_of
from distlab_page.records import Records, name_of
from distlab_page.tables import Json, table

CAUSE = re.compile(
    r"failed|has exited|deadlock|interrupted|terminated|lost its connection|not answer|^rank \d+( \(.*?\))? waited|"
    r"is not finite|is (nan|inf)|goes? on with step|but has not reached|out of memory|killed"
)


def detours(run: Records) -> Json | None:
    """Return who has done the work of dead ranks of pipelines, and from which step on."""
    workers, parts, pipelines = run.layout.get("pp", 1), run.settings.get("micro_batches", 1), run.layout.get("dp", 1)
    given, rows = run.settings.get("repair", "off"), dict[tuple[int, str, str], list[int]]()
    slices = run.layout.get("tp", 1)  # ranks with the same layers: they die together, and count as one worker
    for step, numbers in run.repairs if given != "off" and workers > 1 else ():
        alive = {number // slices for number in numbers}
        for (worker, part), host in hosts_of(workers, parts, pipelines, alive, given == "exact").items():
            own = part // parts * workers + worker
            for shard in range(slices if own != host else 0):
                dead, other = (name_of(run, one * slices + shard) for one in (own, host))
                rows.setdefault((step, dead, other), []).append(part % parts)
    shown = [(step, own, ", ".join(map(str, numbers)), host) for (step, own, host), numbers in sorted(rows.items())]
    head = ("from step", "work of", "micro-batches", "done by")
    return table("Detours around dead ranks", head, shown) if shown else None


def ended(run: Records) -> Json:
    """Return what the launcher and the ranks report about deaths and waits, and their last lines."""
    causes, waits = dict[str, None](), list[str]()
    for who, lines in run.logs.items():
        for number, line in enumerate(lines):
            if line.startswith("who waits for whom"):
                block = [line, *itertools.takewhile(lambda later: later.startswith(" "), lines[number + 1 :])]
                waits = max(waits, block, key=len)
            elif who == "launcher" or (CAUSE.search(line) and not line.startswith(" ")):
                causes[line] = None
    return {
        "causes": [*causes],
        "waits": waits,
        "detours": detours(run),
        "logs": [[who, *lines[-200:]] for who, lines in run.logs.items() if lines],
    }
