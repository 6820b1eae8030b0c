"""Plan a run: which layout is fastest on a machine, what it takes, and the commands to start it."""

import math
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated

from distlab.launching.command import lab_command
from distlab.machine.cores import asked_threads
from distlab.parallel.options import CPKind
from distlab.pipeline.schedules import AUTO, schedule_names
from distlab.reports.records import read_largest, read_steps
from distlab.run.commands import launcher
from distlab.run.terminal import StatusLine, can_erase, counted
from distlab.settings.common import as_flag, require_positive, shown_as
from distlab.settings.training import OptimizerName
from distlab_planner.layouts import CP_KINDS, RECOMPUTE, SHARDS, Choices, Shard
from distlab_planner.machine import Machine, read_machine
from distlab_planner.memory import share_of_rank
from distlab_planner.model import Model, Sizes
from distlab_planner.model_flags import ModelFlags
from distlab_planner.search import Found, find_layouts
from distlab_planner.step import WARM_UP
from distlab_planner.table import Row, milliseconds, table
from simplellm import command_line
from simplellm.errors import InputError, require
from simplellm.options import Recompute

MEASURED = Path("runs/machine.json")  # without --machine
MOST_MEASURED = 4  # ranks that calibrate starts by itself
MODEL = (  # flags of a run, too
    "dmodel num_heads num_kv_heads hidden_dim n_layers seq_len optimizer dtype compile tokenizer "
    "experts experts_per_token shared_expert qk_norm"
).split()
BYTES = {"MB": 1e6, "GB": 1e9, "TB": 1e12}
ALL = "default: all that fit"


@dataclass
class RanksToPlan:
    """The ranks to plan for, their batch, and where they run."""

    ranks: int = 3
    """ranks of the run"""
    global_batch: int = 24
    """sequences per step, of all replicas together"""
    machine: Annotated[Path | None, shown_as("FILE", "default: measured once, in runs/machine.json")] = None
    """the machine, as launch.sh calibrate writes it"""
    memory: Annotated[str | None, shown_as("SIZE", "default: its share of the machine's")] = None
    """memory that a rank may need, like 8GB"""


@dataclass
class PlanRequest(ModelFlags, RanksToPlan):  # `--help` lists the flags of the last base first
    """The model, machine and limits to plan for."""

    n_layers: int = 6
    """transformer layers"""
    optimizer: OptimizerName = "adam"
    """update rule"""
    dp: Annotated[tuple[int, ...], shown_as("INT ...", ALL)] = ()
    """replicas to choose from"""
    pp: Annotated[tuple[int, ...], shown_as("INT ...", ALL)] = ()
    """workers of a pipeline to choose from"""
    tp: Annotated[tuple[int, ...], shown_as("INT ...", ALL)] = ()
    """ranks of a stage to choose from"""
    cp: tuple[int, ...] = (1,)
    """ranks that share each sequence to choose from"""
    ep: tuple[int, ...] = (1,)
    """replicas that share the experts to choose from"""
    cp_kind: Annotated[tuple[CPKind, ...], shown_as("|".join(CP_KINDS), ALL)] = ()
    """ways to share sequences to choose from"""
    micro_batches: Annotated[tuple[int, ...], shown_as("INT ...", ALL)] = ()
    """numbers of micro-batches to choose from"""
    schedule: Annotated[tuple[str, ...], shown_as("NAME ...", ALL)] = ()
    """pipeline schedules to choose from"""
    recompute: Annotated[tuple[Recompute, ...], shown_as("|".join(RECOMPUTE), ALL)] = ()
    """what to recompute, to choose from"""
    shard: Annotated[tuple[Shard, ...], shown_as("|".join(SHARDS), ALL)] = ()
    """kinds of state that replicas may shard"""
    top: int = 10
    """how many layouts to show"""
    verify: int = 0
    """run the first N of them, and print what was measured beside what was predicted"""
    steps: int = 12
    """with --verify: steps of each run"""

    @property
    def model(self) -> Model:
        return Model.of(self)

    @property
    def choices(self) -> Choices:
        axes = {"dp": self.dp, "pp": self.pp, "tp": self.tp, "cp": self.cp, "ep": self.ep}
        return Choices(axes, self.cp_kind, self.micro_batches, self.schedule, self.recompute, self.shard)

    def check(self) -> None:
        """Raise `InputError` for values that no plan can have."""
        require_positive(self, *"ranks global_batch n_layers top".split())
        self.check_model()
        has_tokenizer = self.vocab_size is None or not (self.verify or self.tokenizer)
        given = f"--vocab-size {self.vocab_size} with {'--verify' if self.verify else '--tokenizer'}"
        require(has_tokenizer, f"{given}: a run has the vocabulary of its --tokenizer; give that alone")
        require(self.verify >= 0, f"--verify {self.verify}: give 0 or more")
        least = f"--steps {self.steps}: the first {WARM_UP} do not count; give {WARM_UP + 2} or more"
        require(self.steps >= WARM_UP + 2, least)
        if self.memory is not None:
            read_size(self.memory)
        for name in ("dp", "pp", "tp", "cp", "ep", "micro_batches"):
            for number in getattr(self, name):
                require(number > 0, f"{as_flag(name)} {number}: must be greater than 0")
        most = max(self.ep, default=1)
        require(most == 1 or self.experts > 0, f"--ep {most}: there are no experts to share; give --experts")
        known = [name for name in schedule_names() if name != AUTO]
        for name in self.schedule:
            why = "its order is not known before the run; " * (name == AUTO)
            require(name in known, f"--schedule {name}: {why}give some of {', '.join(known)}")

    def find(
        self, machine: Machine, most_bytes: float, examines: Callable[[int, int], object] = lambda *_: None
    ) -> Found:
        """Return the best layouts on a machine; each rank may need that much memory. `examines` is as in the search."""
        return find_layouts(
            self.model,
            machine,
            self.ranks,
            self.global_batch,
            most_bytes,
            optimizer=self.optimizer,
            choices=self.choices,
            top=self.top,
            threads=asked_threads(),
            examines=examines,
        )

    def model_flags(self) -> list[str]:
        """Return the flags of the model that differ from their defaults, which are those of a run."""
        defaults = {field.name: field.default for field in fields(self)}
        values = {name: getattr(self, name) for name in MODEL}
        changed = [(as_flag(name), value) for name, value in values.items() if value != defaults[name]]
        return [word for flag, value in changed for word in ([flag] if value is True else [flag, str(value)])]


def plan(request: PlanRequest) -> None:
    """Print the table and the commands; with `--verify`, run the first ones."""
    request.check()
    model = request.model
    machine = machine_for(request, model.sizes)
    if request.verify:
        check_computer(machine, request)
    most_bytes = share_of_rank(machine, request.ranks) if request.memory is None else read_size(request.memory)
    status = StatusLine(sys.stdout if can_erase(sys.stdout) else None)
    try:
        found = request.find(
            machine, most_bytes, lambda number, total: status.show(f"simulating layout {number:,} of at most {total:,}")
        )
    finally:  # also after Ctrl-C
        status.clear()
    what = f"--ranks {request.ranks} with --global-batch {request.global_batch}"
    divided = f"the batch, {'the experts, ' * bool(request.experts)}the heads and the layers"
    whole = ", and compiles whole blocks" * request.compile
    require(found.layouts > 0, f"{what}: no layout divides {divided}{whole}; change one of them")
    require(
        bool(found.rows),
        f"{what}: no layout fits into {most_bytes / 1e6:,.0f} MB a rank; the smallest needs "
        f"{found.least_bytes / 1e6:,.0f} MB",
    )
    print(f"{request.ranks} ranks on {places(request.ranks, machine)}, with {most_bytes / 1e6:,.0f} MB for each")
    source = f"; its numbers are from {machine.source}" * bool(machine.source)
    print(f"by the file {request.machine or MEASURED}, which names its machine {machine.name!r}{source}")
    left_out = [f"{found.too_large:,} do not fit"] * bool(found.too_large)
    left_out += [f"{found.too_slow:,} are slower in any case"] * bool(found.too_slow)
    print(f"{found.layouts:,} layouts{'; ' * bool(left_out)}{', '.join(left_out)}\n")
    tokens = request.global_batch * request.seq_len
    for line in table(found.rows, tokens):
        print(line)
    print()
    print_commands(found.rows, request, model, machine)
    slices = machine.unmeasured_tp(model.sizes, (row.layout.size("tp") for row in found.rows))
    if slices and machine.has_sizes(model.sizes):
        path, named = request.machine or MEASURED, " or ".join(map(str, slices))
        print(f"\n# {path} has no times of passes with layers in {named} slices; they are estimated")
    if request.verify:
        verify(found.rows[: request.verify], request, model, machine)


def print_commands(rows: Sequence[Row], request: PlanRequest, model: Model, machine: Machine) -> None:
    """Print the command for each layout, and what has to be added to it."""
    on_hosts = host_flags(request.ranks, machine)
    for number, row in enumerate(rows, start=1):
        print(f"{number:<3} {shlex.join([launcher(), *command_of(row, request, model), *on_hosts])}")
    if request.vocab_size is not None:
        print(f"\nadd --tokenizer, with a SentencePiece model of {request.vocab_size:,} pieces")
    if on_hosts:
        print("\non each host, with its own --node-rank, from 0, and with the address of host 0 as --master-addr")


def command_of(row: Row, request: PlanRequest, model: Model) -> list[str]:
    """Return the arguments of launch.sh for a layout."""
    return ["5d", *request.model_flags(), *row.layout.flags(model).split()]


def places(ranks: int, machine: Machine) -> str:
    """Return where ranks are, in words: "2 hosts with 8 GPUs"."""
    hosts = math.ceil(ranks / machine.ranks_per_host)
    what = "cores" if machine.device == "cpu" else "GPUs"
    shown = counted(hosts, "hosts")
    return f"{shown} with {counted(machine.cores_per_host, what)}{' each' * (hosts > 1)}"


def host_flags(ranks: int, machine: Machine) -> list[str]:
    """Return the flags that place ranks on hosts as the planner does, which fills one host after another."""
    per_host = machine.ranks_per_host
    hosts = math.ceil(ranks / per_host)
    if hosts == 1:
        return []
    on_last = ranks - (hosts - 1) * per_host
    shares = [per_host] * (hosts - 1) + [on_last]
    uneven = ["--ranks-per-node", ",".join(map(str, shares))] if on_last < per_host else []
    return ["--nnodes", str(hosts), *uneven]


def machine_for(request: PlanRequest, sizes: Sizes) -> Machine:
    """Return the machine of `--machine`, or this one; measure this one if it was not for a model of these sizes."""
    path = request.machine or MEASURED
    if request.machine is None and not (path.exists() and read_machine(path).has_sizes(sizes)):
        path.parent.mkdir(exist_ok=True)
        print(f"# measuring this machine, once: {path}", flush=True)
        ranks = max(2, min(request.ranks, MOST_MEASURED))
        asked = lab_command("calibrate", str(path), "--world-size", str(ranks))
        asked += replace(request, n_layers=PlanRequest.n_layers, optimizer=PlanRequest.optimizer).model_flags()
        asked += [] if request.vocab_size is None else ["--vocab-size", str(request.vocab_size)]
        done = subprocess.run(asked, check=False, capture_output=True, text=True)
        require(done.returncode == 0, f"{path}: measuring has failed: {done.stderr.strip()[-300:]}")
    machine = read_machine(path)
    if not machine.has_sizes(sizes):
        print(f"# {path} has no times of passes of this model; they are estimated from its multiply-adds")
    return machine.with_room_for(request.ranks, f"--ranks {request.ranks}: {path}")


def read_size(text: str) -> float:
    """Return the bytes of a size such as "8GB"; `InputError` for anything else."""
    found = re.fullmatch(rf"(\d+\.?\d*)({'|'.join(BYTES)})", text)
    if found is None or not float(found[1]):
        raise InputError(f"--memory {text}: give a size like 8GB or 500MB")
    return float(found[1]) * BYTES[found[2]]


def check_computer(machine: Machine, request: PlanRequest) -> None:
    """Raise `InputError` if this computer cannot be the machine on which layouts are to run."""
    given = f"--verify {request.verify} with --ranks {request.ranks}: by {request.machine or MEASURED}, the ranks"
    hosts = math.ceil(request.ranks / machine.ranks_per_host)
    require(hosts == 1, f"{given} are on {hosts} hosts, and this is one computer; leave --verify out")
    if machine.device == "cuda":
        import torch  # which a plan alone does not need

        needed, there = min(request.ranks, machine.cores_per_host), torch.cuda.device_count()
        require(there >= needed, f"{given} have {needed} GPUs, and torch sees {there} here; leave --verify out")


def verify(rows: Sequence[Row], request: PlanRequest, model: Model, machine: Machine) -> None:
    """Run layouts, and print measurements beside predictions."""
    memory = f"{'held MB, predicted':>19} {'counted':>10} {'off':>6}"
    print(f"\n{'':<3} {'step, predicted':>16} {'measured':>12} {'off':>6} {memory}")
    for number, row in enumerate(rows, start=1):
        with tempfile.TemporaryDirectory() as folder:
            flags = [*command_of(row, request, model), "--steps", str(request.steps)]
            flags += ["--data", "sample", "--out", folder, "--device", machine.device]
            done = subprocess.run(lab_command(*flags), check=False, capture_output=True, text=True)
            require(done.returncode == 0, f"{shlex.join(flags)} failed: {done.stderr.strip()[-300:]}")
            records = read_steps(Path(folder), "seconds")
            counted = sum(read_largest(Path(folder)))
        seconds = statistics.median(record["seconds"] for record in records[WARM_UP:])
        print(
            f"{number:<3} {milliseconds(row.step.seconds):>16} {milliseconds(seconds):>12} "
            f"{row.step.seconds / seconds - 1:>+6.0%} {row.held_bytes / 1e6:>19,.1f} {counted / 1e6:>10,.1f} "
            f"{row.held_bytes / counted - 1:>+6.0%}",
            flush=True,
        )


command = command_line.as_command(plan, PlanRequest, __doc__)

if __name__ == "__main__":
    command_line.run(plan, PlanRequest, __doc__)
