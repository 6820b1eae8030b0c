"""What the process groups of a rank share: the ledger, the trace, the names of waits, and who is on which host."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist

from distlab.comm.devices import Place, cores
from distlab.comm.hosts import Hosts
from distlab.comm.recorder import Ledger, Recorder
from distlab.comm.waits import SECONDS_FOR_THE_WATCH, Wait, Waits
from simplellm.errors import InputError

Transport = Literal["auto", "shared", "gloo"]
# What is smaller goes over gloo, with "auto": it is not worth a mapping, and on several hosts gloo is as fast.
SMALLEST_SHARED_BYTES, SMALLEST_OF_HOSTS_BYTES = 1_000, 250_000


class NotShared(Exception):
    """Ranks that cannot share memory; all of them raise it."""


@dataclass
class Options:
    """What a program may say about its groups: `dist.init_process_group("lab", pg_options=Options(…))`."""

    library: Literal["auto", "gloo", "nccl"] = "auto"  # that carries what shared memory does not
    transport: Transport = "auto"  # for tensors in host memory
    timeout_seconds: float | None = None  # of any wait; None: that of `init_process_group`
    threads: int | None = None  # that a rank usually computes with; None: as many as it has now
    places: Sequence[Place] | None = None  # by rank, its host and GPUs; None: the ranks tell each other
    describe: Callable[[int], str] = "rank {}".format  # as in "rank 4 (stage 1 of replica 1)"
    remark: Callable[[str], object] = lambda sentence: print(f"# {sentence}", flush=True)


@dataclass
class Context:
    """What the groups that one `init_process_group` made, and `new_group` after it, have in common on this rank."""

    rank: int
    world_size: int
    options: Options
    library: str  # "gloo" or "nccl"
    hosts: Hosts
    device: torch.device  # of this rank
    ledger: Ledger = field(default_factory=Ledger)
    recorder: Recorder = field(default_factory=Recorder)
    begun: Counter[str] = field(default_factory=Counter)  # collectives that this rank has started, by ranks ("0,1,2")
    shares_memory: bool = False  # whether this rank shares memory with others
    groups: "weakref.WeakSet[ContextGroup]" = field(default_factory=weakref.WeakSet)
    observers: list[Callable[[Any], object]] = field(default_factory=list)  # called with each `Pending` that starts
    _has_remarked: bool = False  # that memory cannot be shared

    def __post_init__(self) -> None:
        self.describe = self.options.describe
        self.recorder.is_over_nccl = self.is_over_nccl
        self.waits = Waits(self.rank, self.world_size, self.ledger, lambda rank: self.describe(rank))
        if self.options.timeout_seconds is not None:
            self.waits.timeout_seconds = self.options.timeout_seconds

    @property
    def is_over_nccl(self) -> bool:
        """Whether ranks communicate over NCCL: from GPU to GPU, in the order of CUDA streams."""
        return self.library == "nccl"

    @property
    def group_timeout(self) -> timedelta:
        """The deadline of torch's own groups: over NCCL it is late, because NCCL ends the process at it."""
        return timedelta(seconds=self.waits.timeout_seconds + SECONDS_FOR_THE_WATCH * self.is_over_nccl)

    @property
    def has_own_core(self) -> bool:
        """Whether this host has a core for each thread of its ranks, which all have as many."""
        here = self.hosts.of_ranks.count(self.hosts.of_ranks[self.rank])
        return here * (self.options.threads or torch.get_num_threads()) <= cores()

    def share_less(self, error: NotShared, is_first: bool) -> None:
        """Raise `InputError` if the transport is "shared"; else go on over gloo, with a remark of the first rank's."""
        if self.options.transport == "shared":
            raise InputError(f"--transport shared: {error}; use --transport gloo") from None
        if is_first and not self._has_remarked:
            self._has_remarked = True
            self.options.remark(f"{error}; what these ranks cannot share goes over gloo instead")

    def held_back(self) -> dict[str, list[int]]:
        """The collectives in shared memory of which this rank has yet to do its share: their numbers, by their ranks.

        Another thread may ask.
        """
        numbers: dict[str, list[int]] = {}
        for group in list(self.groups):
            for wait in group.held_back():
                numbers.setdefault(group.key, []).append(wait.number)
        return numbers


class ContextGroup(dist.ProcessGroup):
    """A process group of this backend, as far as its context knows it; see `distlab.comm.group`."""

    context: Context
    key: str

    def held_back(self) -> list[Wait]:
        """The collectives in shared memory of which this rank has yet to do its share."""
        raise NotImplementedError


def context_of(group: dist.ProcessGroup | None = None) -> Context:
    """The context of a group of this backend; by default, of the default group.

    Raises:
        ValueError: there is no such group.
    """
    found = group if group is not None else dist.group.WORLD
    if not isinstance(found, ContextGroup):
        raise ValueError('call dist.init_process_group("lab") first')
    return found.context


@contextlib.contextmanager
def during(what: str) -> Iterator[None]:
    """Inside, all other ranks are waited for, for `what`: a wait that fails in a library says so (`Waits.during`).

    In a group of another backend, waits have no names.
    """
    named: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    with contextlib.suppress(ValueError):
        named = context_of().waits.during(what)
    with named:
        yield


def group_timeout() -> timedelta | None:
    """The deadline for groups that are made beside the default group; None if that is another backend's."""
    found = dist.group.WORLD
    return found.context.group_timeout if isinstance(found, ContextGroup) else None
