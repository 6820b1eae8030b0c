"""Measure this machine for the planner: what passes, messages, collectives and updates take, in at most a minute.

    ./launch.sh calibrate machine.json
    ./launch.sh calibrate machine.json --dmodel 192 --world-size 2
    ./launch.sh calibrate machine.json --nnodes 2 --node-rank 0 --master-addr 10.0.0.1    first of two hosts

The file can be read and edited. The times of passes are those of a model's sizes: measure again for another width, and
the file keeps those of both.
"""

import os
import platform
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from distlab.comm.link import Link
from distlab.comm.recorder import COMPUTE
from distlab.launch import launch
from distlab.launching.command import lab_command
from distlab.machine import devices
from distlab.machine.compilers import require_compiler
from distlab.machine.memory_limits import memory_bytes
from distlab.reports.records import read_steps
from distlab.reports.trace import read_chrome
from distlab.run.main import main
from distlab.run.model import build_optimizer
from distlab.run.run import Run
from distlab.run.terminal import counted, say
from distlab.settings.common import RunSettings, WorldSize, require_positive
from distlab_planner import measuring
from distlab_planner.layouts import divisors
from distlab_planner.machine import Machine, Measured, read_machine, write_machine
from distlab_planner.model_flags import ModelFlags
from simplellm.errors import require
from simplellm.llama import LLamaStage

TINY = "--dmodel 8 --num-heads 1 --n-layers 1 --seq-len 8 --batch-size 1 --micro-batches 1 --dp 1 --pp 1 --steps 50"


@dataclass
class Measurement(WorldSize):
    """The file to write, and what to measure for it."""

    machine_file: Path = Path("machine.json")
    """the file to write"""
    world_size: int = 4
    """number of ranks that compute and communicate at the same time"""
    rows: tuple[int, ...] = (1, 2, 8)
    """sequences of a micro-batch"""
    seconds: float = 20
    """how long to measure passes"""


@dataclass
class CalibrateSettings(ModelFlags, RunSettings, Measurement):  # `--help` lists the flags of the last base first
    """The settings of the measurement."""

    layout = Measurement.layout
    timeout: float = 600
    """seconds that any wait may take; ranks wait while one of them computes alone"""

    def check(self) -> None:
        super().check()
        require_positive(self, "seconds")
        self.check_model()
        if self.compile:
            require_compiler()
        rows = " ".join(map(str, self.rows))
        is_ascending = bool(self.rows) and self.rows[0] >= 1 and sorted(set(self.rows)) == list(self.rows)
        require(is_ascending, f"--rows {rows}: give one or more numbers of sequences, in ascending order")
        require(self.world_size > 1, "--world-size 1: messages need 2 ranks or more")
        folder, is_there = self.machine_file.parent, self.machine_file.exists()
        require(folder.is_dir(), f"{self.machine_file}: there is no such folder")
        require(not self.machine_file.is_dir(), f"{self.machine_file}: is a folder; give the path of a file")
        can_write = os.access(self.machine_file if is_there else folder, os.W_OK)
        require(can_write, f"{self.machine_file}: cannot write there; give another path")


DEFAULTS = CalibrateSettings()


def calibrate(run: Run[CalibrateSettings]) -> None:
    """Measure, and write the file on rank 0."""
    args, device = run.settings, run.device
    sizes, local = args.sizes, run.joined.local_ranks
    counts = [*Counter(place.host for place in run.joined.places).values()]  # of ranks, by host
    number = "give each host the same number"
    require(len(set(counts)) == 1, f"the hosts have {' and '.join(map(str, counts))} ranks: {number}")
    slowdown = measuring.measure_slowdown(sizes, run.rank, local, device, min(0.1, args.seconds / 50))
    peers = [peer for peer in dict.fromkeys((1, local)) if peer < run.world_size]  # on this host and on the next one
    neighbors = [(rank, rank + 1) for rank in range(0, local - 1, 2)]
    together = [neighbors[:count] for count in range(2, len(neighbors) + 1)]
    pairs = [*([(0, peer)] for peer in peers), *together]
    messages = [measuring.measure_messages(run.rank, at_once, device) for at_once in pairs]
    own_seconds, links = links_of(messages)
    reductions = measuring.measure_all_reduces(run.rank, local, device)
    if run.rank > 0:
        return  # and wait for rank 0 at the end of the run, without computing
    is_cpu = device.type == "cpu"
    at_once = devices.cores() if is_cpu else torch.cuda.device_count()
    tps = [tp for tp in divisors(sizes.num_kv_heads) if tp <= run.world_size]
    tps = tps[:1] if sizes.compiled else tps  # slices of a layer are not compiled
    kinds = [measuring.Slicing(tp, n) for tp in tps for n in (threads_of_ranks(at_once, tp, local) if is_cpu else [1])]
    measured = measuring.measure_passes(sizes, kinds, args.rows, device, args.seconds)
    net = measuring.build(LLamaStage, sizes, measuring.BLOCKS, 1, device)
    update, with_sgd = (
        measuring.measure_optimizer(build_optimizer(name, net.parameters(), 1e-3), device) for name in ("adam", "sgd")
    )
    as_written = replace(sizes, compiled=False)
    in_float32 = replace(as_written, dtype="float32")
    speeds = {sizes: speed_of(measured[0])}
    for other in {as_written, in_float32} - {sizes}:
        speeds[other] = speed_of(*measuring.measure_passes(other, kinds[:1], args.rows[:1], device, args.seconds / 10))
    machine = Machine(
        name=f"{platform.node()}, {counted(at_once, 'cores' if is_cpu else 'GPUs')}",
        device="cpu" if is_cpu else "cuda",
        hosts=run.world_size // local,
        ranks_per_host=local,
        cores_per_host=at_once,
        memory_bytes_per_host=device_memory_bytes(device),
        inside=links[0],
        between=links[len(peers) - 1],
        multiply_adds_per_second=speeds[in_float32],
        bfloat16_multiply_adds_per_second=speeds[as_written] if args.dtype == "bfloat16" else 0.0,
        compiled_speedup=speeds[sizes] / speeds[as_written] if args.compile else 0.0,
        pass_seconds=measured[0].embedding.F[0],
        optimizer_seconds=update,
        sgd_seconds=with_sgd,
        message_seconds=own_seconds,
        waking=measuring.measure_waking(sizes) if is_cpu else (),
        slowdown=slowdown,
        inside_together=tuple(links[len(peers) :]),
        measured=tuple(measured),
        all_reduces=reductions,
    )
    machine = with_tiny_run(machine, device)
    if args.compile:
        compiler_bytes = with_tiny_run(machine, device, "--compile").process_bytes - machine.process_bytes
        machine = replace(machine, compiler_bytes=max(0.0, compiler_bytes))
    write_machine(with_earlier(machine, args.machine_file), args.machine_file)
    say(f"{args.machine_file}: {machine.name}, {speeds[sizes] / 1e9:.1f} billion multiply-adds/s on each rank")


def speed_of(entry: Measured) -> float:
    """Return the multiply-adds per second of a block's forward pass over the smallest micro-batch."""
    return entry.rows[0] * entry.sizes.seq_len * entry.sizes.multiply_adds("block") / entry.block.F[0]


def links_of(messages: Sequence[measuring.Messages]) -> tuple[float, list[Link]]:
    """Return the seconds of the call that sends, and the links, whose latency is counted without them."""
    own_seconds = min(messages[0].own_seconds, *(one.link.latency_seconds for one in messages))
    links = [replace(one.link, latency_seconds=one.link.latency_seconds - own_seconds) for one in messages]
    return own_seconds, links


def threads_of_ranks(cores: int, tp: int, ranks: int) -> list[int]:
    """Return the possible numbers of threads of a rank if `tp` ranks share each layer; in ascending order, from 1.

    The cores are shared by as many ranks as compute at once: at least those of a layer, at most all.
    """
    return sorted({1, *(cores // busy for busy in range(tp, ranks + 1) if busy <= cores)})


def with_tiny_run(machine: Machine, device: torch.device, *more: str) -> Machine:
    """Return a machine with the costs of a tiny run: a step without its passes, a process that holds nothing."""
    with tempfile.TemporaryDirectory() as folder:
        command = lab_command("hybrid", *TINY.split(), "--data", "sample", "--trace")
        command += ["--device", device.type, "--out", folder, *more]
        of_this_rank = "TORCHELASTIC", "LAB_"
        environment = {name: value for name, value in os.environ.items() if not name.startswith(of_this_rank)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        require(done.returncode == 0, f"the run of a tiny model failed: {done.stderr.strip()[-300:]}")
        trace = read_chrome(Path(folder) / "trace.json")
        *_, last = read_steps(Path(folder), "peak_memory_bytes")
    [rank] = trace.ranks
    besides = [step.seconds - sum(one.seconds for one in rank.within(step, COMPUTE)) for [step] in trace.steps()]
    process_bytes = float(last["peak_memory_bytes"])
    return replace(machine, step_seconds=measuring.lower_quartile(besides), process_bytes=process_bytes)


def device_memory_bytes(device: torch.device) -> float:
    """Return the memory that a run may use on this host: the CPU's, or that of all GPUs."""
    if device.type == "cuda":
        gpus = range(torch.cuda.device_count())
        return float(sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in gpus))
    return memory_bytes()


def with_earlier(machine: Machine, path: Path) -> Machine:
    """Return a machine completed from its file by older measurements: of other passes, and of more ranks."""
    if not path.exists():
        return machine
    earlier = read_machine(path)
    if (earlier.device, earlier.cores_per_host) != (machine.device, machine.cores_per_host):
        return machine
    passes = {(entry.sizes, entry.tp, entry.threads) for entry in machine.measured}
    reductions = {(entry.ranks, entry.transport) for entry in machine.all_reduces}
    others = [entry for entry in earlier.measured if (entry.sizes, entry.tp, entry.threads) not in passes]
    larger = [entry for entry in earlier.all_reduces if (entry.ranks, entry.transport) not in reductions]
    not_always = {
        name: getattr(machine, name) or getattr(earlier, name)
        for name in ("bfloat16_multiply_adds_per_second", "compiled_speedup", "compiler_bytes")
    }
    return replace(
        machine,
        **not_always,
        measured=(*machine.measured, *others),
        all_reduces=(*machine.all_reduces, *larger),
        slowdown=(*machine.slowdown, *earlier.slowdown[len(machine.slowdown) :]),
        inside_together=(*machine.inside_together, *earlier.inside_together[len(machine.inside_together) :]),
    )


def command(args: Sequence[str], prog: str) -> int:
    """Launch the ranks, which run this file as a script."""
    file, *flags = args or ["--help"]
    given = [file] if file in ("-h", "--help") else ["--machine-file", file]
    if Path(file).exists():
        read_machine(Path(file))  # it would be overwritten
    return launch([__file__, *given, *flags], prog)


if __name__ == "__main__":
    main(calibrate, DEFAULTS, __doc__)
