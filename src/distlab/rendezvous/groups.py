"""Creates the process groups of several ranks of the lab's backend."""

from typing import Any

import torch.distributed as dist

from distlab.comm.context import Context, ContextGroup, Options, first_context, is_of_program
from distlab.comm.lab_group import LabGroup
from distlab.comm.names import line_of_script
from distlab.comm.waits import TrafficError, Wait, reason
from distlab.machine.processes import is_store_in_launcher
from distlab.rendezvous.notices import NoticeBoard
from simplellm.errors import InputError
from simplellm.exit_status import about_system


class WorldGroup(LabGroup):
    """The default group, of all ranks, which also explains a blocked run.

    Attributes:
        number: of default groups before it in its store; 0 if a run has made it, which sees to its keys by itself.
        notices: each rank's waits, readable by the others.
    """

    def __init__(self, context: Context, store: dist.Store, number: int) -> None:
        self.number = number
        super().__init__(context, store, range(context.world_size), context.group_timeout)
        self.notices = NoticeBoard(store, context, is_rank_0s=not is_store_in_launcher())

    def shutdown(self) -> None:
        self.notices.close()
        super().shutdown()
        self.context.waits.close()


def world_group() -> WorldGroup | None:
    """Return the default group, if it belongs to this backend and has several ranks."""
    return dist.group.WORLD if isinstance(dist.group.WORLD, WorldGroup) else None


def create(made: Any, options: Options | None) -> LabGroup:
    """Return the group that torch asks for: the default group, or a group of `new_group`, which shares its context.

    Raises:
        TrafficError: not all ranks of the group have connected.
        InputError: this process may not open as many connections or threads.
    """
    world = dist.group.WORLD
    if isinstance(world, ContextGroup):
        context, ranks, transport = world.context, made.global_ranks_in_group, options.transport if options else None
        waiting, others = context.waits.waiting, tuple(rank for rank in ranks if rank != context.rank)
        with context.waits.during(waiting[0] if waiting else Wait("new_group", "other", others, line=line_of_script())):
            store = _own_keys(made.store, world.number) if isinstance(world, WorldGroup) else made.store
            return LabGroup(context, store, ranks, context.group_timeout, transport)
    try:
        number = made.store.add(f"worlds/{made.group_rank}", 1) - 1 if is_of_program(options) else 0
        made.store = _own_keys(made.store, number)
        return WorldGroup(first_context(made, options), made.store, number)
    except TrafficError:
        raise
    except RuntimeError as error:  # of torch's store, gloo or NCCL
        sentence, told = f"rank {made.group_rank} could not connect to all other ranks", about_system(error)
        if told:
            raise InputError(f"{sentence}: {told}") from error
        why = reason(error, (options or Options()).timeout_name)
        raise TrafficError(f"{sentence}: {why}", error) from error


def _own_keys(store: dist.Store, number: int) -> dist.Store:
    """Return the store with other keys than those of earlier default groups, and of groups beside them.

    A store of a launcher keeps the addresses of destroyed groups, whose names torch gives again.
    """
    return dist.PrefixStore(f"world{number}", store) if number else store
