"""The state that a rank's process groups share: the ledger, the trace, the names of waits, the hosts of the ranks."""

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.distributed as dist

from distlab.comm.recorder import Ledger, Recorder
from distlab.machine import devices
from distlab.machine.devices import Place, cores
from distlab.machine.torch_patches import uncompiled
from simplellm.errors import say

if TYPE_CHECKING:
    from distlab.comm.waits import Wait, Waits

Group = dist.ProcessGroup | None  # None: all ranks
TransportName = Literal["auto", "shared", "gloo"]
OperationT = TypeVar("OperationT", bound="Operation")
ENVIRONMENT = timedelta(0)  # as a deadline: the group's
# With "auto", smaller tensors go over gloo: they are not worth a mapping, and on several hosts gloo is as fast.
SMALLEST_SHARED_BYTES, SMALLEST_OF_HOSTS_BYTES = 1_000, 250_000


@dataclass
class Options:
    """A program's options for its groups: `dist.init_process_group("lab", pg_options=Options(…))`."""

    library: Literal["auto", "gloo", "nccl"] = "auto"  # carries everything that shared memory does not
    transport: TransportName = "auto"  # for tensors in host memory
    timeout_seconds: float | None = None  # of any wait; None: as in `init_process_group`
    timeout_name: str = "init_process_group's timeout"  # in messages: what sets it
    threads: int | None = None  # with which a rank usually computes; None: as many as it has now
    places: Sequence[Place] | None = None  # by rank, its host and GPUs, from a run; None: the ranks exchange them
    describe: Callable[[int], str] = "rank {}".format  # as in "rank 4 (stage 1 of replica 1)"
    remark: Callable[[str], object] = say
    check: Callable[[], object] | None = None  # called in waits over gloo; an exception that it raises ends the wait
    previous: "Context | None" = None  # of groups that were abandoned; its ledger and its recorder are used further


@dataclass
class Context:
    """The state that the groups made by one `init_process_group`, and by `new_group` after it, share on this rank."""

    rank: int
    world_size: int
    options: Options
    library: str  # "gloo" or "nccl"
    hosts: Sequence[str]  # by rank, the name of its host
    store: dist.Store  # in which ranks can meet
    device: torch.device  # of this rank
    ledger: Ledger = field(default_factory=Ledger)
    recorder: Recorder = field(default_factory=Recorder)
    begun: Counter[str] = field(default_factory=Counter)  # collectives that this rank has started, by ranks ("0,1,2")
    shares_memory: bool = False  # whether this rank shares memory with others
    groups: "weakref.WeakSet[ContextGroup]" = field(default_factory=weakref.WeakSet)
    observers: list[Callable[[Any], object]] = field(default_factory=list)  # called with each `Pending` that starts
    counted_as: str | None = None  # the ledger's column for everything that is sent now; None: as each name says
    has_remarked: bool = False  # that memory cannot be shared

    def __post_init__(self) -> None:
        if (previous := self.options.previous) is not None:
            self.ledger, self.recorder = previous.ledger, previous.recorder
            self.options = replace(self.options, previous=None)  # or all earlier ones would stay
        self.describe = self.options.describe
        self.recorder.is_over_nccl = self.is_over_nccl

    @cached_property
    def waits(self) -> "Waits":
        """This rank's waits for other ranks; a rank that is alone has none."""
        from distlab.comm.waits import Waits

        waits = Waits(self.rank, self.world_size, self.ledger, lambda rank: self.describe(rank))
        if self.options.timeout_seconds is not None:
            waits.timeout_seconds = self.options.timeout_seconds
        waits.timeout_name = self.options.timeout_name
        return waits

    def waited_so_far(self) -> float:
        """Return the seconds that this rank has waited for others."""
        return self.waits.waited_so_far() if self.world_size > 1 else 0.0

    @property
    def is_over_nccl(self) -> bool:
        """True if ranks communicate over NCCL: from GPU to GPU, in the order of CUDA streams."""
        return self.library == "nccl"

    @property
    def group_timeout(self) -> timedelta:
        """The deadline of torch's own groups: over NCCL it is later, because NCCL ends the process when it passes."""
        seconds = self.waits.timeout_seconds
        return timedelta(seconds=seconds + self.waits.seconds_for_the_watch if self.is_over_nccl else seconds)

    @property
    def has_own_core(self) -> bool:
        """True if this host has a core for each thread of its ranks, all of which have the same number of threads."""
        return len(self.here(range(self.world_size))) * (self.options.threads or torch.get_num_threads()) <= cores()

    def here(self, ranks: Iterable[int]) -> list[int]:
        """Return those of some ranks that are on this rank's host."""
        return [rank for rank in ranks if self.hosts[rank] == self.hosts[self.rank]]

    def abandon(self) -> list[object]:
        """Close the connections of all groups (`ContextGroup.abandon`).

        Returns:
            the groups of gloo, for `distlab.comm.gloo.drop`.
        """
        return [group.abandon() for group in list(self.groups)]

    def held_back(self) -> dict[str, list[int]]:
        """Return the collectives in shared memory of which this rank has yet to compute its part: numbers, by ranks.

        Other threads may call this.
        """
        numbers: dict[str, list[int]] = {}
        for group in list(self.groups):
            for wait in group.held_back():
                numbers.setdefault(group.key, []).append(wait.number)
        return numbers


class ContextGroup(dist.ProcessGroup):
    """The part of this backend's process group that its context uses; see `distlab.comm.lab_group`."""

    context: Context
    key: str

    def held_back(self) -> "list[Wait]":
        """Return the collectives in shared memory of which this rank has yet to compute its part."""
        return []

    def abandon(self) -> object:
        """Close the connections, whatever is under way: waits in this group fail at once, also those of other ranks.

        Returns the group of gloo.
        """


@uncompiled
class Operation(dist.Work):
    """A message or collective: a complete one, or, as `distlab.comm.pending.Pending`, one under way.

    `tensors` are those that it sends or fills.
    """

    buffer_bytes = 0  # memory that it needs until it ends, for what a reduce-scatter receives over gloo

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._tensors, self._finish = tensors, list[Callable[[], object]]()

    def then(self: OperationT, finish: Callable[[], object]) -> OperationT:
        """Call `finish` at the end of `wait`, in the order of these calls; returns this object.

        If `finish` returns an operation, `wait` also waits for that operation.
        """
        self._finish.append(finish)
        return self

    def wait(self, timeout: timedelta = ENVIRONMENT) -> bool:
        while self._finish:
            following = self._finish.pop(0)()
            if isinstance(following, Operation):
                following.wait()
        return True

    def is_completed(self) -> bool:
        return True

    def result(self) -> list[torch.Tensor]:
        return self._tensors

    def get_future(self) -> "torch.futures.Future[list[torch.Tensor]]":
        """Return a future of the tensors, for torch's DDP and others that wait themselves."""
        future: torch.futures.Future[list[torch.Tensor]] = torch.futures.Future()
        future.set_result(self._tensors)
        return future


def require_one_dtype(tensors: Sequence[torch.Tensor]) -> None:
    """Raise `ValueError` for tensors of several dtypes in one collective."""
    for tensor in tensors:
        if tensor.dtype != tensors[0].dtype:
            raise ValueError(f"tensors of one collective have two dtypes, {tensors[0].dtype} and {tensor.dtype}")


def is_of_program(options: Options | None) -> bool:
    """Return whether a program makes its groups without a run, which knows the places of its ranks.

    A run handles its failures by itself, and the keys of its store.
    """
    return options is None or options.places is None


def first_context(made: Any, options: Options | None) -> Context:
    """Return the context of a default group; without places in `options`, all ranks exchange theirs."""
    asked = replace(options or Options())  # a copy: the caller's options stay as they are
    if asked.timeout_seconds is None:
        asked.timeout_seconds = made.timeout.total_seconds()
    if asked.places is None:
        from distlab.machine.network import own_place, read_places, report_place

        address = os.environ.get("MASTER_ADDR", "localhost")
        own = own_place("cuda" if torch.cuda.is_available() else "cpu", address)
        report_place(made.store, made.group_rank, own)
        asked.places = read_places(made.store, made.group_size)
    library = devices.pick_backend(asked.library, asked.places)
    if library == "nccl" and devices.ranks_on_one_gpu(asked.places):
        from distlab.machine.network import let_ranks_share_gpus

        let_ranks_share_gpus(made.group_rank)
    device, hosts = devices.pick_device(asked.places, made.group_rank), [place.host for place in asked.places]
    return Context(made.group_rank, made.group_size, asked, library, hosts, made.store, device)


def context_of(group: dist.ProcessGroup | None = None) -> Context:
    """Return the context of a group of this backend; by default, of the default group.

    Raises:
        ValueError: there is no such group.
    """
    context = context_if_any(group)
    if context is None:
        raise ValueError('call dist.init_process_group("lab") first')
    return context


def context_if_any(group: dist.ProcessGroup | None = None) -> Context | None:
    """Return the context of a group; None if it is not of this backend."""
    found = group if group is not None else dist.group.WORLD
    return found.context if isinstance(found, ContextGroup) else None


def during(what: str) -> contextlib.AbstractContextManager[None]:
    """Return a context in which waits are for all other ranks, for `what`, also if a library waits (`Waits.during`).

    In a group of another backend, waits have no names.
    """
    context = context_if_any()
    return context.waits.during(what) if context else contextlib.nullcontext()
