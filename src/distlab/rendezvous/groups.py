"""Creates the process groups of the lab's backend."""

import json
import os
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from distlab.comm.context import Context, Options
from distlab.comm.group import LabGroup
from distlab.comm.hosts import Hosts
from distlab.machine import devices
from distlab.rendezvous.torchrun import is_store_in_launcher

if TYPE_CHECKING:
    from distlab.rendezvous.notices import NoticeBoard


class WorldGroup(LabGroup):
    """The default group, of all ranks, which also explains a blocked run.

    Attributes:
        notices: each rank's waits, readable by the others; None in a world of one.
    """

    notices: "NoticeBoard | None" = None

    def __init__(self, context: Context, store: dist.Store) -> None:
        super().__init__(context, store, range(context.world_size), context.group_timeout)
        if context.world_size > 1:
            from distlab.rendezvous.notices import NoticeBoard

            self.notices = NoticeBoard(store, context, is_rank_0s=not is_store_in_launcher())

    def shutdown(self) -> None:
        if self.notices is not None:
            self.notices.close()
        super().shutdown()


def world_group() -> WorldGroup | None:
    """Return the default group, if it belongs to this backend."""
    return dist.group.WORLD if isinstance(dist.group.WORLD, WorldGroup) else None


def create(made: Any, options: Options | None) -> LabGroup:
    """Return the group that torch asks for: the default group, or a group of `new_group`, which shares its context.

    Args:
        made: torch's description of the group.
        options: from `pg_options`; of a group of `new_group`, only the transport.
    """
    world = world_group()
    if world is not None:
        timeout, transport = world.context.group_timeout, options.transport if options else None
        return LabGroup(world.context, made.store, made.global_ranks_in_group, timeout, transport)
    asked = options or Options()
    if asked.timeout_seconds is None:
        asked.timeout_seconds = made.timeout.total_seconds()
    return WorldGroup(_meet(made.store, made.group_rank, made.group_size, asked), made.store)


def _meet(store: dist.Store, rank: int, world_size: int, options: Options) -> Context:
    """Return the context of this rank, which asks the others for their places if `options` do not give them."""
    if options.places is None:
        address = os.environ.get("MASTER_ADDR", "localhost")
        own = devices.own_place("cuda" if torch.cuda.is_available() else "cpu", address)
        options.places = exchange_places(store, rank, world_size, own)
    places = options.places
    library = devices.pick_backend(options.library, places)
    hosts = Hosts([place.host for place in places], store)
    device = devices.pick_device(places, rank)
    return Context(rank, world_size, options, library, hosts, device)


def exchange_places(store: dist.Store, rank: int, world_size: int, own: devices.Place) -> list[devices.Place]:
    """Return every rank's host and GPUs, after waiting until all ranks have reported theirs."""
    store.set(f"place/{rank}", json.dumps([own.host, own.gpus]))
    told = store.multi_get([f"place/{other}" for other in range(world_size)])
    return [devices.Place(host, tuple(gpus)) for host, gpus in map(json.loads, told)]
