"""One rank of a run over NCCL, without a GPU and without the others: what it would send, in order.

Its tensors are torch's "meta" tensors, which have shapes and no content; they stand for those of a GPU. Calls of
torch.distributed are recorded and do nothing; as NCCL, they refuse tensors that are on the CPU.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn

from distlab.comm.devices import Place
from distlab.comm.torch_patches import without_compiler
from distlab.comm.traffic import traffic
from distlab.run.run import Run
from distlab.run.settings import parse
from distlab.run.train_settings import TrainSettings
from distlab.run.training import TrainingRun
from simplellm.llama import LLamaPart
from support.chapters import load

GPU = torch.device("meta")
PlainSGD = without_compiler(torch.optim.SGD)  # the lab's optimizers are fused, which meta tensors cannot be


class Call(NamedTuple):
    """Something that a rank did: a collective or message, a "wait" for one, a "forward" pass, a "read" of a result."""

    what: str
    ranks: tuple[int, ...] = ()  # that take part in the collective, or the two of the message
    group: int = 0  # of processes, numbered as they are made
    number: int = -1  # of the collective or message, among this rank's

    @property
    def is_begun(self) -> bool:
        """Whether it is the collective or message itself."""
        return self.what not in ("wait", "forward", "read")


class Event:
    """Stands for a CUDA event that the stream passes at once."""

    def __init__(self, enable_timing: bool = False) -> None: ...
    def record(self) -> None: ...
    def synchronize(self) -> None: ...
    def query(self) -> bool:
        return True

    def elapsed_time(self, later: "Event") -> float:
        return 1.0


class Group:
    """Stands for a process group."""

    def __init__(self, ranks: tuple[int, ...], number: int) -> None:
        self.ranks, self.number = ranks, number

    def size(self) -> int:
        return len(self.ranks)


class Work:
    def __init__(self, calls: list[Call], call: Call) -> None:
        self._calls, self._call = calls, call

    def wait(self) -> None:
        self._calls.append(self._call._replace(what="wait"))


class RecordedNCCL:
    """The calls of one rank."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.calls = rank, list[Call]()
        self._groups = self._begun = 0
        self.is_first_step = True
        self.world = self.new_group(ranks=range(size))

    def _record(self, what: str, group: Group | None, *tensors: Tensor, peer: int | None = None) -> Work:
        for tensor in tensors:
            assert tensor.device == GPU, f"{what}: NCCL moves no tensor that is on {tensor.device}"
        group = group or self.world
        ranks = group.ranks if peer is None else (min(self.rank, peer), max(self.rank, peer))
        call = Call(what, ranks, group.number, self._begun)
        self._begun += 1
        self.calls.append(call)
        return Work(self.calls, call)

    def note(self, module: nn.Module) -> None:
        """Record a forward pass of a part of the lab's Llama, up to the end of the first step."""
        if isinstance(module, LLamaPart) and self.is_first_step:
            self.calls.append(Call("forward"))

    def isend(self, tensor: Tensor, dst: int, group: Group | None = None) -> Work:
        return self._record("send", group, tensor, peer=dst)

    def irecv(self, tensor: Tensor, src: int, group: Group | None = None) -> Work:
        return self._record("receive", group, tensor, peer=src)

    def all_reduce(self, tensor: Tensor, op: Any, group: Group | None, async_op: bool) -> Work:
        return self._record("all_reduce", group, tensor)

    def broadcast(self, tensor: Tensor, src: int, group: Group | None, async_op: bool) -> Work:
        return self._record("broadcast", group, tensor)

    def all_gather(self, parts: list[Tensor], own: Tensor, group: Group | None, async_op: bool) -> Work:
        return self._record("all_gather", group, own, *parts)

    def reduce_scatter(self, own: Tensor, parts: list[Tensor], group: Group | None, async_op: bool) -> Work:
        return self._record("reduce_scatter", group, own, *parts)

    def new_group(self, ranks: Sequence[int] = (), **_: object) -> Group:
        self._groups += 1
        return Group(tuple(ranks) or self.world.ranks, self._groups)

    def new_subgroups_by_enumeration(self, of_dim: list[list[int]], timeout: object) -> tuple[Group, None]:
        return self.new_group(next(ranks for ranks in of_dim if self.rank in ranks)), None

    def patches(self) -> dict[str, Any]:
        """What stands in for functions of `torch.distributed`, by name."""
        names = "isend irecv all_reduce broadcast all_gather reduce_scatter new_group new_subgroups_by_enumeration"
        stand_ins = {name: getattr(self, name) for name in names.split()}
        return stand_ins | {
            "is_initialized": lambda: True,
            "get_backend": lambda: "nccl",
            "get_rank": lambda: self.rank,
            "get_world_size": lambda: self.world.size(),
            "get_process_group_ranks": lambda group: list(group.ranks),
            "init_process_group": lambda *_, **__: None,
        }


def zeros(read: Callable[[Tensor], Any], calls: list[Call]) -> Callable[[Tensor], Any]:
    """A method that reads a tensor's content, for tensors without; recorded, since it waits for the GPU."""

    def recorded(tensor: Tensor) -> Any:
        if tensor.device != GPU:
            return read(tensor)
        calls.append(Call("read"))
        return read(torch.zeros_like(tensor, device="cpu"))

    return recorded


@contextlib.contextmanager
def recorded_nccl(rank: int, size: int) -> Iterator[RecordedNCCL]:
    """Have this process, which must end after it, be a rank of a run over NCCL."""
    nccl = RecordedNCCL(rank, size)
    with contextlib.ExitStack() as patched:

        def patch(target: str, stand_in: Any) -> None:
            patched.enter_context(mock.patch(target, stand_in))

        for name, stand_in in nccl.patches().items():
            patch(f"torch.distributed.{name}", stand_in)
        patch("torch.allclose", lambda *_, **__: True)
        patch("torch.cuda.Event", Event)
        patch("torch.cuda.set_device", lambda _: None)
        patch("torch.cuda.synchronize", lambda _=None: None)
        patch("torch.cuda.max_memory_allocated", lambda _: 0)
        for read in "item", "tolist", "__bool__", "__int__":  # a GPU's tensor, as if it were full of zeros
            patch(f"torch.Tensor.{read}", zeros(getattr(Tensor, read), nccl.calls))
        patch("distlab.run.training.build_optimizer", lambda _, parameters, lr, *others: PlainSGD(parameters, lr))
        patch("distlab.comm.devices.pick_device_type", lambda _: "cuda")
        patch("distlab.comm.devices.own_place", lambda *_: None)
        patch("distlab.comm.devices.pick_device", lambda *_: GPU)
        patch("distlab.rendezvous.ranks.open_store", lambda *_: None)
        patch("distlab.rendezvous.ranks.agree", lambda store, rank, size, place, same, decide, *_: decide())
        patch("distlab.run.run.claim", lambda _: None)  # each rank decides alone, about one folder
        patch("distlab.rendezvous.ranks.read_places", lambda *_: [Place("here", (f"GPU-{r}",)) for r in range(size)])
        patch("distlab.rendezvous.notices.notices.open", lambda *_, **__: None)
        yield nccl


def run_alone(rank: int, size: int, script: str, flags: list[str]) -> list[Call]:
    """Run a chapter's script as one rank; for a process of its own. Returns what it did, with its forward passes."""
    module = load(script)
    with recorded_nccl(rank, size) as nccl:
        settings = parse(module.DEFAULTS, "", [str(rank), *flags])
        run = (TrainingRun if isinstance(settings, TrainSettings) else Run)(settings, Path(script))
        assert traffic.group_timeout.total_seconds() > settings.timeout, "waits are watched from outside"
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
