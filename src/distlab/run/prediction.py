"""With `--machine`, what the planner predicts for a step of a run, and which part of it was off."""

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from distlab.comm.layout import neighbors_of
from distlab.comm.threads import asked_threads
from distlab.pipeline.schedules import AUTO, DEFAULT_CHUNKS
from distlab.planner.costs import Costs
from distlab.planner.layouts import Layout
from distlab.planner.machine import read_machine
from distlab.planner.model import Model, Sizes
from distlab.planner.step import Step, predict
from distlab.planner.table import milliseconds
from distlab.run.logs import StepTime
from distlab.run.train_settings import StageSettings, TrainSettings
from simplellm.errors import require
from simplellm.tokenizers import SPTokenizer

WARM_UP = 3  # steps at the beginning of a run that do not count


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction for a run."""

    costs: Costs
    machine_file: Path

    @classmethod
    def of(cls, args: TrainSettings, machine_file: Path) -> "Prediction":
        """The prediction for the run of these settings; `InputError` for what the planner does not know."""
        machine, vocab_size = read_machine(machine_file), SPTokenizer(args.tokenizer).vocab_size
        heads, hidden = args.num_kv_heads or args.num_heads, args.hidden_dim or 4 * args.dmodel
        model = Model(Sizes(args.dmodel, args.num_heads, heads, hidden, args.seq_len, vocab_size), args.n_layers)
        layout = layout_of(args, vocab_size, f"--machine {machine_file}")
        room = machine.with_room_for(layout.ranks, str(machine_file))
        return cls(Costs(room, model, layout, asked_threads()), machine_file)

    @functools.cached_property
    def step(self) -> Step:
        """On rank 0."""
        return predict(self.costs, worker=0)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step on rank 0, by what it does."""
        step = self.step
        computing = step.computing + step.updating + step.sharing
        return {
            "computing": computing,
            "collectives": step.exchanging + step.averaging,
            "waiting for other stages": step.seconds - computing - step.exchanging - step.averaging,
        }

    @property
    def sentence(self) -> str:
        """What a step should take."""
        named = self.costs.machine.has_sizes(self.costs.model.sizes)
        estimated = "" if named else " (passes of this model were not measured there, but estimated)"
        shown = ", ".join(f"{milliseconds(seconds)} {what}" for what, seconds in self.parts.items() if seconds)
        return f"by {self.machine_file}{estimated}, a step should take {milliseconds(self.step.seconds)}: {shown}"

    def beside(self, times: Sequence[StepTime]) -> Iterator[str]:
        """Lines that compare the steps of a run, as rank 0 measured them, with the prediction.

        Parts are means over the steps, without the first ones where there are enough.
        """
        counted = times[WARM_UP:] or times
        seconds, waited, in_collectives = (statistics.fmean(column) for column in zip(*counted, strict=True))
        predicted = self.parts
        measured = dict(zip(predicted, (seconds - waited, in_collectives, waited - in_collectives), strict=True))
        off = {what: measured[what] - predicted[what] for what in predicted}
        most = max(off, key=lambda what: abs(off[what]))
        yield (
            f"a step took {milliseconds(seconds)}; predicted were {milliseconds(self.step.seconds)} "
            f"({self.step.seconds / seconds - 1:+.0%}); {most} differs most"
        )
        for what in predicted:
            yield f"{what}: predicted {milliseconds(predicted[what])}, measured {milliseconds(measured[what])}"


def layout_of(args: TrainSettings, vocab_size: int, flag: str) -> Layout:
    """The layout of a run in the planner's terms; `InputError`, which begins with `flag`, for what it does not know."""
    sizes = {"dp": 1, "pp": 1, "tp": 1} | args.layout
    schedule, chunks = getattr(args, "schedule", "naive"), getattr(args, "chunks_per_stage", DEFAULT_CHUNKS)
    averages = getattr(args, "outer", "") == "none"  # a hybrid that averages gradients
    sync_every = 1 if averages else getattr(args, "sync_every", 1)
    require(args.dtype == "float32", f"{flag} with --dtype {args.dtype}: the planner knows float32 only")
    require(schedule != AUTO, f"{flag} with --schedule {AUTO}: its order is not known before the run")
    is_known = schedule != "interleaved" or chunks == DEFAULT_CHUNKS
    require(is_known, f"{flag} with --chunks-per-stage {chunks}: the planner knows {DEFAULT_CHUNKS} only")
    every = f"{flag} with --sync-every {sync_every}: the planner knows runs that average in every step"
    require(sync_every == 1, every)
    return Layout(
        **sizes,
        batch_size=args.batch_size,
        micro_batches=args.micro_batches,
        schedule=schedule,
        recompute=args.recompute,
        shard=getattr(args, "shard", "none"),
        split=args.split(vocab_size) if isinstance(args, StageSettings) else (args.n_layers,),
        neighbors=neighbors_of(args.layout),
    )
