"""The start of a process as a rank of a run: its number, its device, its folder, and the process group of all ranks."""

import contextlib
import hashlib
import os
import sys
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

import simplellm
from distlab.axes.grid import Grid
from distlab.axes.layout import layout_flags, layout_size
from distlab.comm.context import Context, Options, context_of
from distlab.comm.waits import TrafficError, reason
from distlab.machine import devices
from distlab.machine.heap import set_up_heap
from distlab.machine.threads import binding
from distlab.rendezvous.torchrun import started_by_torchrun
from distlab.run.commands import LAB
from distlab.run.terminal import say
from distlab.settings.common import ResumableSettings, RunSettings, as_flag, as_json
from distlab.settings.folders import Claim, check_out, is_run, new_folder
from distlab.settings.resume import content_of
from simplellm.errors import InputError, about_system, require

PACKAGES = Path(__file__).parents[1], Path(simplellm.__file__).parent  # every rank runs their code


@dataclass
class Joined:
    """A rank that has met the others."""

    grid: Grid
    places: Sequence[devices.Place]  # of all ranks
    decided: dict[str, Any]  # by rank 0 for all: the folder, the data, the checkpoint to resume from
    claim: Claim | None  # of the folder, on rank 0
    context: Context

    @property
    def device(self) -> torch.device:
        return self.context.device

    @property
    def local_ranks(self) -> int:
        """Number of ranks on this host."""
        return len(devices.local_ranks(self.places, self.grid.rank))

    @property
    def ranks_of_hosts(self) -> list[int]:
        """Number of ranks of each host."""
        return list(Counter(place.host for place in self.places).values())


def identity(settings: RunSettings) -> tuple[int, int]:
    """Return the rank and the world size, from torchrun or the command line; `InputError` if they disagree."""
    asked, flags = layout_size(settings.layout), layout_flags(settings.layout)
    if started_by_torchrun():
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        require(size == asked, f"{flags}: torchrun started {size} ranks; make the two agree")
        sentence = f"rank {settings.rank}: torchrun made this process rank {rank}; leave the rank out"
        require(settings.rank in (-1, rank), sentence)
        return rank, size
    rank = 0 if settings.rank == -1 and asked == 1 else settings.rank
    given = "no rank given" if rank == -1 else f"rank {rank}"  # -1 is the default
    advice = "give each process its own rank as the first argument, or start all of them with launch.sh"
    require(0 <= rank < asked, f"{given}: {flags} has the ranks 0 to {asked - 1}; {advice}")
    return rank, asked


def join(settings: RunSettings, script: Path) -> Joined:
    """Meet the other ranks, compare settings with theirs, and make the process group.

    Raises:
        InputError: the ranks do not fit together, or rank 0 cannot start the run.
        TrafficError: this rank cannot connect to all others.
    """
    rank, size = identity(settings)
    grid = Grid(rank, settings.layout, settings.held)
    device_type = devices.pick_device_type(settings.device)
    if not settings.layout:
        places = [devices.own_place(device_type, settings.master_addr)]
        _set_up(grid, places, settings)
        context = _connect(settings, grid, places, dist.HashStore(), "gloo")
        decided, claim = decide(settings, script)
        return Joined(grid, places, decided, claim, context)
    from distlab.rendezvous import ranks as rendezvous

    by_torchrun, seconds = started_by_torchrun(), settings.timeout
    address = os.environ.get("MASTER_ADDR", settings.master_addr) if by_torchrun else settings.master_addr
    store = rendezvous.open_store(rank, settings.master_addr, settings.master_port or 29500, seconds, say)
    place = devices.own_place(device_type, address)
    same = {"the script": script.name} | {as_flag(name): value for name, value in as_json(settings).items()}
    same |= rendezvous.working(store, rank, lambda: identities(settings, script))
    claims: list[Claim] = []

    def decide_all() -> dict[str, Any]:
        places = rendezvous.read_places(store, size)
        backend = devices.pick_backend(settings.backend, places)
        devices.check_transport(settings.transport, places)
        decided, claim = decide(settings, script)
        claims.append(claim)
        return {"backend": backend, **decided}

    decided = rendezvous.agree(store, rank, size, place, same, decide_all, seconds, say)
    places = rendezvous.read_places(store, size)
    _set_up(grid, places, settings)
    is_on_one_host = len(devices.local_ranks(places, rank)) == size
    devices.keep_to_interface(address, on_one_host=by_torchrun and is_on_one_host)
    context = _connect(settings, grid, places, store, decided["backend"])
    return Joined(grid, places, decided, claims[0] if claims else None, context)


def identities(settings: RunSettings, script: Path) -> dict[str, dict[str, str]]:
    """Return the identities of the files and the code to which the settings lead on this rank.

    Raises:
        InputError: a file cannot be read.
    """
    from distlab.rendezvous.ranks import Identity

    found: dict[str, dict[str, str]] = {}
    for name, path in settings.files.items() if isinstance(settings, ResumableSettings) else ():
        try:
            found[name] = asdict(Identity(str(path.absolute()), content_of(path)))
        except OSError as error:
            raise InputError(f"{name}: {path} cannot be read ({error.strerror})") from error
    packages = {file.relative_to(root.parent).as_posix(): file for root in PACKAGES for file in root.rglob("*.py")}
    own = modules_beside(script)
    found["the lab's code"] = asdict(Identity(str(LAB), code_of(packages)))
    found["the script, with the modules beside it"] = asdict(Identity(str(script.absolute()), code_of(own)))
    return found


def modules_beside(script: Path) -> dict[str, Path]:
    """Return a script and the modules beside it that it has imported, by their names."""
    folder = script.absolute().parent
    imported = (getattr(module, "__file__", None) for module in [*sys.modules.values()])
    beside = (Path(file).absolute() for file in imported if file)
    return {path.name: path for path in (script, *beside) if path.absolute().parent == folder}


def code_of(files: Mapping[str, Path]) -> str:
    """Return the SHA-256 of the names and contents of some files.

    If a file cannot be read, such as a script within an archive, only its name counts.
    """
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name} ".encode(errors="surrogateescape"))
        with contextlib.suppress(OSError):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def decide(settings: RunSettings, script: Path) -> tuple[dict[str, Any], Claim]:
    """Return rank 0's decisions for all ranks, and its claim to the run's folder."""
    out = (settings.out or new_folder(Path("runs") / script.stem)).absolute()
    decided = {"out": str(out), **settings.decide()}
    claim = Claim(out)  # before its checkpoints are touched
    check_out(out)
    has_earlier = is_run(out)
    if isinstance(settings, ResumableSettings):
        settings.check_folders()  # again: the run that had the folder may have left checkpoints
        if settings.has_checkpoints:
            from distlab.run.checkpointer import prepare_checkpoints

            decided |= prepare_checkpoints(settings, out)
            resumed = decided.get("candidates", [])[:1]
            has_earlier = has_earlier and not any(out.resolve() in Path(each).resolve().parents for each in resumed)
    if has_earlier:
        say(f"the records of an earlier run in {out} are replaced")
    return decided, claim


def _set_up(grid: Grid, places: Sequence[devices.Place], settings: RunSettings) -> None:
    """Set this process's device, heap and number of threads."""
    device, local_ranks = devices.pick_device(places, grid.rank), len(devices.local_ranks(places, grid.rank))
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # autograd's thread may start with a matrix product; torch warns of a missing context, which it then creates
        warnings.filterwarnings("ignore", "Attempting to run cuBLAS, but there was no current CUDA context")
    else:
        set_up_heap()
        if local_ranks > 1 and (bound := binding()):  # launch.sh leaves them out
            say(f"{' and '.join(bound)}: binds the threads of every rank to the same cores; unset it")
    computing = grid.pipelines_on_host(local_ranks) if settings.one_stage_at_a_time else local_ranks
    torch.set_num_threads(devices.threads_per_rank(computing))


def _connect(
    settings: RunSettings,
    grid: Grid,
    places: Sequence[devices.Place],
    store: dist.Store,
    library: Literal["gloo", "nccl"],
) -> Context:
    """Make the process group of all ranks."""
    options = Options(
        library=library,
        transport=settings.transport,
        timeout_seconds=settings.timeout,
        threads=torch.get_num_threads(),
        places=places,
        describe=grid.describe,
        remark=say,
    )
    try:
        dist.init_process_group(
            "lab",
            store=store,
            rank=grid.rank,
            world_size=len(places),
            timeout=timedelta(seconds=settings.timeout),
            pg_options=options,
        )
    except (dist.DistError, RuntimeError) as error:
        if told := about_system(error):
            raise InputError(f"rank {grid.rank} could not connect to all other ranks: {told}") from error
        sentence = f"rank {grid.rank} could not connect to all other ranks: {reason(error)}"
        raise TrafficError(sentence, error) from error
    return context_of()
