"""How the ranks of a run meet: they compare their settings and code, and make the process group of all."""

import contextlib
import functools
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist

import simplellm
from distlab.axes.grid import Grid
from distlab.axes.layout import layout_size
from distlab.checkpoints.format import checksum
from distlab.comm.group import connect_nccl
from distlab.machine import devices, network
from distlab.machine.processes import started_by_torchrun
from distlab.rendezvous import ranks as rendezvous
from distlab.run.commands import LAB
from distlab.run.failure import watch_nccl
from distlab.run.starting import Joined, decide, identity, init_group, set_up
from distlab.settings.common import ResumableSettings, RunSettings, as_flag, as_json
from distlab.settings.folders import Claim
from simplellm.errors import InputError, require

PACKAGES = Path(__file__).parents[1], Path(simplellm.__file__).parent  # every rank runs their code


def join(settings: RunSettings, script: Path) -> Joined:
    """Meet the other ranks, compare settings with theirs, and make the process group.

    Raises:
        InputError: the ranks do not fit together, or rank 0 cannot start the run.
        TrafficError: this rank cannot connect to all others.
    """
    rank, size = identity(settings)
    grid = Grid(rank, settings.layout, settings.held)
    ranks_here = size if settings.master_addr in ("localhost", "127.0.0.1") else 1  # as far as is known already
    device_type = devices.pick_device_type(settings.device, ranks_here)
    seconds, address = settings.timeout, settings.master_addr
    if started_by_torchrun():
        address = os.environ.get("MASTER_ADDR", address)
    store = rendezvous.open_store(rank, settings.master_addr, settings.master_port or 29500, seconds)
    place = network.own_place(device_type, address)
    same = {"the script": script.name} | {as_flag(name): value for name, value in as_json(settings).items()}
    same |= rendezvous.ranks_store(seconds, store).work(lambda: identities(settings, script))
    claims: list[Claim] = []

    def decide_all() -> dict[str, Any]:
        places = rendezvous.read_places(store, size)
        backend = devices.pick_backend(settings.backend, places)
        check_transport(settings.transport, places)
        decided, claim = decide(settings, script)
        claims.append(claim)
        return {"backend": backend, **decided}

    decided = rendezvous.agree(store, rank, size, place, same, decide_all, seconds)
    places = rendezvous.read_places(store, size)
    set_up(grid, places, settings)
    network.keep_to_interface(address, on_one_host=len(devices.local_ranks(places, rank)) == size)
    context = init_group(settings, grid, places, store, decided["backend"])
    watch_nccl(context)
    connect_nccl(None)
    return Joined(grid, places, decided, claims[0] if claims else None, context, store)


def join_late(settings: RunSettings, script: Path) -> Joined:
    """Take the place of a rank that has died; until the others expect this one, it is alone in its process group."""
    rank, _ = identity(settings)
    store = rendezvous.open_store(rank, settings.master_addr, settings.master_port or 29500, settings.timeout)
    shared = rendezvous.ranks_store(settings.timeout, store)
    decided = json.loads(shared.read("verdict")["verdict"])["decided"]
    places = rendezvous.read_places(store, layout_size(settings.layout))
    of_rank_before = "cuda" if places[rank].gpus else "cpu"
    devices.pick_device_type(of_rank_before, len(devices.local_ranks(places, rank)))
    grid = Grid(rank, settings.layout, settings.held)
    set_up(grid, places, settings)
    context = init_group(settings, Grid(0, {}), [places[rank]], dist.HashStore(), "gloo")
    context.describe = lambda _: grid.describe(rank)
    return Joined(grid, places, decided, None, context, store)


def identities(settings: RunSettings, script: Path) -> dict[str, dict[str, str]]:
    """Return the identities of the files and the code to which the settings lead on this rank.

    Raises:
        InputError: a file cannot be read.
    """
    found: dict[str, dict[str, str]] = {}
    for name, path in settings.files.items() if isinstance(settings, ResumableSettings) else ():
        try:
            found[name] = {"place": str(path.absolute()), "sha256": content_of(path)}
        except OSError as error:
            raise InputError(f"{name}: {path} cannot be read ({error.strerror})") from error
    found["the lab's code"] = {"place": str(LAB), "sha256": code_of_packages()}
    own = {"place": str(script.absolute()), "sha256": code_of(modules_beside(script))}
    return found | {"the script, with the modules beside it": own}


def content_of(path: Path) -> str:
    """Return the SHA-256 of a file, or of the names and contents of a folder's files; hexadecimal."""
    if not path.is_dir():
        return checksum(path)
    digest = hashlib.sha256()
    for file in sorted(file for file in path.rglob("*") if file.is_file()):
        digest.update(f"{file.relative_to(path)} {checksum(file)} ".encode(errors="surrogateescape"))
    return digest.hexdigest()


@functools.cache
def code_of_packages() -> str:
    """Return the SHA-256 of all modules of `PACKAGES`, which this process and its forks read once."""
    return code_of({file.relative_to(root.parent).as_posix(): file for root in PACKAGES for file in root.rglob("*.py")})


def modules_beside(script: Path) -> dict[str, Path]:
    """Return a script and the modules beside it that it has imported, by their names."""
    script = script.resolve()
    folder = script.parent
    packages = [folder.parts[first:] for first in range(1, len(folder.parts) + 1)]  # as `module`, or `package.module`
    names = (".".join((*package, path.stem)) for path in folder.glob("*.py") for package in packages)
    # In a fork, to go through all of sys.modules would copy each page that holds one of its names.
    imported = (sys.modules.get(name) for name in names)
    files = (getattr(module, "__file__", None) for module in imported)
    beside = (Path(file).resolve() for file in files if file)
    return {path.name: path for path in (script, *beside) if path.parent == folder}


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


def check_transport(name: str, places: Sequence[devices.Place]) -> None:
    """Raise `InputError` if `--transport shared` is requested and the ranks are not on the CPU of one host."""
    other = next((rank for rank, place in enumerate(places) if place.host != places[0].host), None)
    hosts = "" if other is None else f"ranks 0 and {other} are on {places[0].host} and {places[other].host}"
    require(name != "shared" or other is None, f"--transport shared: {hosts}, which have no memory in common; use auto")
    on_gpu = "--transport shared: this run computes on GPUs, and only ranks on the CPU share memory; use auto"
    require(name != "shared" or not any(place.gpus for place in places), on_gpu)
