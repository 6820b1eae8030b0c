"""With `--machine`, the planner's prediction for a step of a run, and its errors by part."""

import functools
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from distlab.comm.recorder import StepTime
from distlab.machine.cores import asked_threads
from distlab.machine.devices import pick_device_type
from distlab.pipeline.schedules import AUTO, DEFAULT_CHUNKS
from distlab.run.commands import launcher
from distlab.settings.common import as_flag
from distlab.settings.replicas import LocalStepsSettings, WrappedSettings
from distlab.settings.stages import StageSettings
from distlab.settings.training import TrainSettings
from distlab_planner.costs import Costs
from distlab_planner.graph import graph_of
from distlab_planner.layouts import WHOLE_BLOCKS, RunLayout
from distlab_planner.machine import Machine, read_machine
from distlab_planner.model import Model
from distlab_planner.step import WARM_UP, Step, predict
from distlab_planner.table import milliseconds
from simplellm.errors import require

# The planner counts these settings, or they are compared with the machine's file.
COUNTED = (
    "batch_size micro_batches seq_len dmodel num_heads num_kv_heads hidden_dim n_layers tokenizer dtype recompute "
    "experts experts_per_token shared_expert qk_norm compile "
    "world_size dp pp cp ep tp cp_kind cp_order neighbors layers_per_stage schedule chunks_per_stage shard optimizer "
    "device backend transport"
).split()
# These change nothing in a step that it would count.
WITHOUT_EFFECT = (
    "rank seed timeout master_addr master_port out save_every keep resume steps lr betas weight_decay "
    "warmup_steps lr_schedule min_lr data eval_every eval_sequences machine trace page tensorboard "
    "router_scores balance_rate"
).split()


@dataclass(frozen=True)
class Prediction:
    """The planner's prediction for a run."""

    costs: Costs
    machine_file: Path

    @classmethod
    def of(cls, args: TrainSettings, machine_file: Path) -> "Prediction":
        """Return the prediction for the run of these settings; `InputError` for settings unknown to the planner."""
        machine, model, flag = read_machine(machine_file), Model.of(args), _flag(machine_file)
        layout = layout_of(args, model.sizes.vocab_size, flag)
        _check_communication(args, machine, flag)
        room = machine.with_room_for(layout.ranks, str(machine_file))
        threads = asked_threads()
        if threads is None and args.one_stage_at_a_time:  # it has all cores, whatever it computes
            threads = machine.cores_per_host
        by_hand = not getattr(args, "casts_messages", True)
        prediction = cls(Costs(room, model, layout, threads, args.optimizer, by_hand), machine_file)
        if args.device != "auto":
            prediction.check_device(args.device)
        return prediction

    def check_device(self, device: str) -> None:
        """Raise `InputError` if the run computes on another kind of device than the machine's ranks."""
        device = pick_device_type(device) if device == "auto" else device
        own, flag = self.costs.machine.device, _flag(self.machine_file)
        sentence = (
            f"{flag}: its ranks compute on {own}, and those of this run on {device}; give another file or --device"
        )
        require(device == own, sentence)

    @functools.cached_property
    def step(self) -> Step:
        """The predicted step on rank 0."""
        return predict(self.costs, worker=0)

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of a step on rank 0, by what it does."""
        step, costs = self.step, self.costs
        computing = step.computing + step.updating + step.sharing
        in_rings = 0.0  # messages, not collectives
        if costs.layout.cp_kind == "ring":
            in_rings = sum(n * costs.sequence_seconds(*kind) for kind, n in graph_of(costs.layout).counts[0].items())
        collectives = step.exchanging + step.averaging - in_rings
        messages = max(0.0, round(step.seconds - computing - collectives, 12))  # no wait that is only rounding
        return {"computing": computing, "collectives": collectives, "waiting for messages": messages}

    @property
    def seconds(self) -> dict[str, float]:
        """Seconds of a step, and of its parts, for the records of the run."""
        return {"step": self.step.seconds, **self.parts}

    @property
    def sentence(self) -> str:
        """Return the predicted time of a step in words."""
        is_measured = self.costs.machine.measured_for(self.costs.model.sizes, self.costs.layout.size("tp"))
        measure = f"{launcher()} calibrate {self.machine_file}, with the model's flags, measures them"
        estimated = "" if is_measured else f" (passes of this model were not measured there, but estimated; {measure})"
        shown = ", ".join(f"{milliseconds(seconds)} {what}" for what, seconds in self.parts.items() if seconds)
        return f"by {self.machine_file}{estimated}, a step should take {milliseconds(self.step.seconds)}: {shown}"

    def beside(self, times: Sequence[StepTime]) -> Iterator[str]:
        """Yield lines that compare the steps of a run, as rank 0 measured them, with the prediction.

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


def layout_of(args: TrainSettings, vocab_size: int, flag: str) -> RunLayout:
    """Return a run's layout in the planner's terms; `InputError`, which begins with `flag`, if it does not know one.

    A setting that the planner does not know has to have its default.
    """
    schedule, chunks = getattr(args, "schedule", "naive"), getattr(args, "chunks_per_stage", DEFAULT_CHUNKS)
    require(schedule != AUTO, f"{flag} with --schedule {AUTO}: its order is not known before the run")
    is_known = schedule != "interleaved" or chunks == DEFAULT_CHUNKS
    require(is_known, f"{flag} with --chunks-per-stage {chunks}: the planner knows {DEFAULT_CHUNKS} only")
    for field in fields(args):
        value = getattr(args, field.name)
        given = as_flag(field.name) + f" {value}" * (value is not True)
        is_known = field.name in (*COUNTED, *WITHOUT_EFFECT) or value == field.default
        require(is_known, f"{flag} with {given}: the planner does not know such runs; leave one of the two out")
    averages_weights = isinstance(args, LocalStepsSettings)
    require(not averages_weights, f"{flag}: the planner knows runs that average gradients, not weights; leave it out")
    in_each_pass = isinstance(args, WrappedSettings)
    often = f"{flag} with --micro-batches {args.micro_batches}: these replicas average in every backward pass, and the "
    is_known = not in_each_pass or args.micro_batches == 1
    require(is_known, f"{often}planner knows averages once a step; leave one of the two out")
    split = args.split(vocab_size) if isinstance(args, StageSettings) else (args.n_layers,)
    layout = RunLayout.of(args, args.layout, split)
    experts = getattr(args, "experts", 0)
    other = layout.not_compiled or (f"--experts {experts}" if experts else None)
    require(not args.compile or other is None, f"{flag} with --compile and {other}: {WHOLE_BLOCKS}")
    return layout


def _flag(machine_file: Path) -> str:
    return f"--machine {machine_file}"


def _check_communication(args: TrainSettings, machine: Machine, flag: str) -> None:
    """Raise `InputError` if the run's ranks do not communicate in the way that was measured on the machine."""
    backend = "gloo" if machine.device == "cpu" else "nccl"
    is_usual = args.backend in ("auto", backend)
    sentence = f"ranks on {machine.device} were measured over {backend}; leave one of the two out"
    require(is_usual, f"{flag} with --backend {args.backend}: {sentence}")
    has_shared = any(entry.transport == "shared" for entry in machine.all_reduces)
    is_measured = args.transport == "auto" or (args.transport == "shared") == has_shared
    asked = f"--transport {args.transport}"
    sentence = f"it was measured {'in' if has_shared else 'without'} shared memory; calibrate another file with {asked}"
    require(is_measured, f"{flag} with {asked}: {sentence}")
