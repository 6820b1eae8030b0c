"""With `--trace`: the events of all ranks, collected, written and drawn at the end of a run."""

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distlab.axes.grid import Grid
from distlab.comm.context import Context
from distlab.comm.names import named
from distlab.comm.recorder import STEP, Recorder
from distlab.run.terminal import say


def gather_traces(context: Context) -> list[dict[str, Any]]:
    """Return the recorded events of all ranks on rank 0; [] on other ranks. Sent as JSON: nothing is unpickled."""
    own = torch.frombuffer(bytearray(json.dumps(context.recorder.as_json()).encode()), dtype=torch.uint8)
    if context.rank > 0:
        for part in (torch.tensor(len(own)), own):
            with named("the trace", "trace"):
                dist.send(part.to(context.device), 0)
        return []
    traces = [own]
    for rank in range(1, context.world_size):
        trace = torch.empty((), dtype=torch.int64, device=context.device)
        for _ in range(2):  # its size, and then the trace
            with named(f"the trace of {context.describe(rank)}", "trace"):
                dist.recv(trace, rank)
            trace = trace if trace.dim() else torch.empty(int(trace), dtype=torch.uint8, device=context.device)
        traces.append(trace.cpu())
    return [json.loads(trace.numpy().tobytes()) for trace in traces]


def keep_trace(recorded: list[dict[str, Any]], out: Path, grid: Grid, recorder: Recorder, runs_on: bool) -> None:
    """Write and draw the events of all ranks, and print a summary of them."""
    from distlab.reports.timeline import draw, measured_panel, repair_panel
    from distlab.reports.trace import Trace, merge, write_chrome

    if not any(event[0] == STEP for trace in recorded for event in trace["events"]):
        say("--trace recorded nothing: this run took no steps")
        return
    order = sorted(range(len(recorded)), key=grid.alive.__getitem__)  # a spare's number is not its rank's
    recorded, alive = [recorded[number] for number in order], sorted(grid.alive)
    trace = Trace(merge(recorded), grid.layout, recorder.programs, runs_on, recorder.pipelines, alive)
    if not trace.steps():
        say("--trace: no step came after the last repair, so nothing is drawn")
        return
    write_chrome(trace, out / "trace.json")
    for line in trace.report():
        say(line)
    title = "A step as measured" + " after the last repair" * bool(trace.repairs())
    title += "" if trace.programs is None else ", under the plan"
    say(f"{out / 'trace.json'}: all events; chrome://tracing and https://ui.perfetto.dev open it")
    if find_spec("matplotlib") is None:
        say("timeline.png was not drawn, which needs matplotlib: pip install matplotlib")
        return
    repairs = [repair_panel(trace, trace.repairs()[0])] if trace.repairs() else []
    draw(out / "timeline.png", [*repairs, measured_panel(title, trace)])
    say(f"{out / 'timeline.png'}: {'the first repair, and ' * bool(repairs)}a step of median length, drawn")
