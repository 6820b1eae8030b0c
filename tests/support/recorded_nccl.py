"""One rank of a run over NCCL, without a GPU and without the others: what it would send, in order.

Its tensors are torch's "meta" tensors, which have shapes and no content; they stand for those of a GPU. What the lab's
process groups give to NCCL is recorded and goes nowhere; as NCCL, the stand-in refuses tensors that are on the CPU.
"""

import contextlib
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from distlab.comm.context import Context, context_of
from distlab.comm.lab_group import LabGroup
from distlab.machine.devices import Place
from distlab.machine.torch_patches import group_of_one, without_compiler
from distlab.pipeline.actions import ACTION_KINDS, Action
from distlab.reports import memory
from distlab.run.run import Run
from distlab.run.training import TrainingRun
from distlab.settings.common import parse
from distlab.settings.training import TrainSettings
from simplellm.llama import LLamaPart
from support.chapters import load

GPU = torch.device("meta")
PlainSGD = without_compiler(torch.optim.SGD)  # the lab's optimizers are fused, which meta tensors cannot be


class Call(NamedTuple):
    """Something that a rank did: a collective or message, a "wait" for one, a "load" of kernels, a "read"."""

    what: str
    ranks: tuple[int, ...] = ()  # that take part in the collective, or the two of the message
    group: int = 0  # of processes, numbered as they are made
    number: int = -1  # of the collective or message, among this rank's

    @property
    def is_begun(self) -> bool:
        """Whether it is the collective or message itself."""
        return self.what not in ("wait", "load", "read")


class Event:
    """Stands for a CUDA event that the stream passes at once."""

    def __init__(self, enable_timing: bool = False) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "Event") -> float:
        return 1.0


class Work(dist.Work):
    """Stands for a collective or message that has begun."""

    def __init__(self, calls: list[Call], call: Call) -> None:
        super().__init__()
        self._calls, self._call = calls, call

    def wait(self, *_: object) -> bool:
        self._calls.append(self._call._replace(what="wait"))
        return True

    def is_completed(self) -> bool:
        """Return false, as NCCL does for a while: the other ranks may not have begun it."""
        return False


class Library:
    """Stands for `torch.distributed.ProcessGroupNCCL`: the collectives and messages of a group, recorded."""

    def __init__(self, recorded: "RecordedNCCL", ranks: tuple[int, ...], number: int) -> None:
        self._recorded, self._ranks, self._number = recorded, ranks, number
        self._is_coalescing = False

    def _record(self, what: str, tensors: Iterable[Tensor], peer: int | None = None) -> Work:
        for tensor in tensors:
            assert tensor.device == GPU, f"{what}: NCCL moves no tensor that is on {tensor.device}"
        if self._is_coalescing:
            return Work([], Call(what))
        own = self._recorded.rank
        ranks = self._ranks if peer is None else tuple(sorted((own, self._ranks[peer])))
        return self._recorded.begin(what, ranks, self._number)

    def send(self, tensors: list[Tensor], to: int, _: int) -> Work:
        return self._record("send", tensors, to)

    def recv(self, tensors: list[Tensor], source: int, _: int) -> Work:
        return self._record("receive", tensors, source)

    def _start_coalescing(self) -> None:
        self._is_coalescing = True

    def _end_coalescing(self) -> Work:
        """Begin the messages since `_start_coalescing`: one operation of all ranks of the group, if each takes part."""
        self._is_coalescing = False
        return self._record("messages", [])

    def allreduce(self, tensors: list[Tensor], *_: object) -> Work:
        return self._record("all_reduce", tensors)

    def broadcast(self, tensors: list[Tensor], *_: object) -> Work:
        return self._record("broadcast", tensors)

    def alltoall_base(self, output: Tensor, own: Tensor, *_: object) -> Work:
        return self._record("all_to_all", [output, own])

    def _allgather_base(self, output: Tensor, own: Tensor, *_: object) -> Work:
        return self._record("all_gather", [output, own])

    def _reduce_scatter_base(self, own: Tensor, parts: Tensor, *_: object) -> Work:
        return self._record("reduce_scatter", [own, parts])


class RecordedNCCL:
    """The calls of one rank, and what stands in for NCCL."""

    Options = mock.Mock

    def __init__(self, rank: int) -> None:
        self.rank, self.calls = rank, list[Call]()
        self._groups = self._begun = 0
        self._ranks: tuple[int, ...] = ()  # of the group that is being made
        self.is_first_step = True
        self._in_action = False
        self._loaded: set[tuple[type[Action], int]] = set()  # kinds of actions that have run, and their stages

    def begin(self, what: str, ranks: tuple[int, ...], group: int) -> Work:
        call = Call(what, ranks, group, self._begun)
        self._begun += 1
        self.calls.append(call)
        return Work(self.calls, call)

    def note(self, module: nn.Module) -> None:
        """Record a forward pass of a part of the lab's Llama, up to the end of the first step."""
        if isinstance(module, LLamaPart) and self.is_first_step and not self._in_action:
            self.calls.append(Call("load"))

    def noting_loads(self, run: Callable[..., dict[str, Tensor]]) -> Callable[..., dict[str, Tensor]]:
        """The `run` of a kind of action, whose kernels are loaded when it first runs on a stage."""

        def noted(action: Action, *given: Any) -> dict[str, Tensor]:
            if (kind := (type(action), action.stage)) not in self._loaded:
                self._loaded.add(kind)
                self.calls.append(Call("load"))
            self._in_action = True
            try:
                return run(action, *given)
            finally:
                self._in_action = False

        return noted

    def noting_ranks(self, init: Callable[..., None]) -> Callable[..., None]:
        """A group's `__init__`."""

        def noted(group: LabGroup, context: Context, store: dist.Store, ranks: Sequence[int], *others: object) -> None:
            self._ranks = tuple(ranks)
            init(group, context, store, ranks, *others)

        return noted

    def __call__(self, *_: object) -> Library:
        self._groups += 1
        return Library(self, self._ranks, self._groups)


def register(group: LabGroup, device: torch.device, kind: dist.ProcessGroup.BackendType, _: object) -> None:
    """In place of a `Library`, which torch would not take for a process group."""
    dist.ProcessGroup._register_backend(group, device, kind, group_of_one())


def zeros(read: Callable[[Tensor], Any], calls: list[Call]) -> Callable[[Tensor], Any]:
    """A method that reads a tensor's content, for tensors without; recorded, since it waits for the GPU."""

    def recorded(tensor: Tensor) -> Any:
        if tensor.device != GPU:
            return read(tensor)
        calls.append(Call("read"))
        return read(torch.zeros_like(tensor, device="cpu"))

    return recorded


def store_with_accounts(size: int) -> dist.HashStore:
    """Return a store with the account of each rank, for which rank 0 waits at the end of a run."""
    store = dist.HashStore()
    kinds = *memory.MEMORY_KINDS, memory.WITHOUT_RECOMPUTE, memory.ROWS
    for rank in range(size):
        store.set(f"account/{rank}", json.dumps({"rank": rank, "memory": dict.fromkeys(kinds, 0)}))
    return store


@contextlib.contextmanager
def recorded_nccl(rank: int, size: int) -> Iterator[RecordedNCCL]:
    """Have this process, which must end after it, be a rank of a run over NCCL."""
    nccl = RecordedNCCL(rank)
    with contextlib.ExitStack() as patched:

        def patch(target: str, stand_in: Any) -> None:
            patched.enter_context(mock.patch(target, stand_in, create=True))  # torch for the CPU has no NCCL

        patch("torch.distributed.ProcessGroupNCCL", nccl)
        patch("distlab.comm.lab_group.LabGroup.__init__", nccl.noting_ranks(LabGroup.__init__))
        patch("distlab.comm.lab_group.LabGroup._register_backend", register)
        for kind in ACTION_KINDS.values():
            patched.enter_context(mock.patch.object(kind, "run", nccl.noting_loads(kind.run)))
        patch("torch.allclose", lambda *_, **__: True)
        patch("torch.cuda.Event", Event)
        patch("torch.cuda.set_device", lambda _: None)
        patch("torch.cuda.synchronize", lambda _=None: None)
        patch("torch.cuda.max_memory_allocated", lambda _: 0)
        for read in "item", "tolist", "__bool__", "__int__":  # a GPU's tensor, as if it were full of zeros
            patch(f"torch.Tensor.{read}", zeros(getattr(Tensor, read), nccl.calls))
        patch("distlab.run.training.build_optimizer", lambda _, parameters, lr, *others: PlainSGD(parameters, lr))
        patch("distlab.machine.devices.pick_device_type", lambda *_: "cuda")
        patch("distlab.machine.network.own_place", lambda *_: None)
        patch("distlab.machine.devices.pick_device", lambda *_: GPU)
        patch("distlab.rendezvous.ranks.open_store", lambda *_: store_with_accounts(size))
        patch("distlab.rendezvous.ranks.agree", lambda store, rank, size, place, same, decide, *_: decide())
        patch("distlab.run.starting.Claim", mock.Mock())  # each rank decides alone, about one folder
        patch("distlab.rendezvous.ranks.read_places", lambda *_: [Place("here", (f"GPU-{r}",)) for r in range(size)])
        patch("distlab.rendezvous.groups.NoticeBoard", mock.Mock())
        yield nccl


def run_alone(rank: int, size: int, script: str, flags: list[str]) -> list[Call]:
    """Run a chapter's script as one rank; for a process of its own. Returns what it did, with its forward passes."""
    module = load(script)
    with recorded_nccl(rank, size) as nccl:
        settings = parse(module.DEFAULTS, "", [str(rank), *flags])
        run = (TrainingRun if isinstance(settings, TrainSettings) else Run)(settings, Path(script))
        assert context_of().group_timeout.total_seconds() > settings.timeout, "waits are watched from outside"
        where = dist.distributed_c10d._get_object_coll_device()  # of the tensors with a checkpoint's plan
        assert where == "cuda", f"NCCL moves no tensors of object collectives that are on the {where}"
        global_loss = run.global_loss

        def end_the_step(step: int, losses: Iterable[Tensor]) -> float:
            nccl.is_first_step = False
            return global_loss(step, losses)

        run.global_loss = end_the_step  # type: ignore[method-assign]
        nn.modules.module.register_module_forward_hook(lambda module, *_: nccl.note(module))
        work = next(getattr(module, name) for name in ("train", "compare", "try_case") if hasattr(module, name))
        work(run)
        run.close()
    return nccl.calls
