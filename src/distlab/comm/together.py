"""Long work that each rank does by itself, such as writing its files, while the others know that it continues."""

import threading
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

import torch
import torch.distributed as dist

from distlab.comm.context import context_if_any
from distlab.comm.names import CONTROL, named

SHORTEST_ROUND, LONGEST_ROUND = 0.01, 1.0  # seconds
ResultT = TypeVar("ResultT")


def together(what: str, work: Callable[[], ResultT]) -> ResultT:
    """Return `work()`, or raise its exception, when all ranks have done theirs; every rank must call it.

    A separate thread does the work. The calling thread takes part in rounds, in which each rank reports whether it is
    still working. So no rank waits for another for longer than a round, however long the work takes on one of them; a
    rank that has stopped or exited is found as in any other wait. The work may not communicate. `what` names the waits.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return work()
    context = context_if_any()
    device = torch.device("cpu") if context is None else context.device
    longest = LONGEST_ROUND if context is None else min(LONGEST_ROUND, context.waits.timeout_seconds / 8)
    answer: futures.Future[ResultT] = futures.Future()

    def do() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has a current device
            answer.set_result(work())
        except BaseException as error:  # also exceptions that end a thread: the other ranks must not wait for ever
            answer.set_exception(error)

    threading.Thread(target=do, daemon=True).start()
    seconds = SHORTEST_ROUND
    while True:
        futures.wait([answer], seconds)
        seconds = min(2 * seconds, longest)
        at_work = torch.tensor(int(not answer.done()), device=device)
        try:
            with named(what, CONTROL):
                dist.all_reduce(at_work)
        except Exception:  # also that of `Options.check`
            futures.wait([answer], longest)  # whoever goes on without a lost rank may do the work again
            raise
        if int(at_work) == 0:
            return answer.result()


def texts_of_all(text: str, what: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Return every rank's text, by its rank in the group; every rank must call this. `what` names the waits."""
    ranks, rank, context = dist.get_world_size(group), dist.get_rank(group), context_if_any()
    device = torch.device("cpu") if context is None else context.device
    content = text.encode(errors="surrogatepass")  # a file's name need not be UTF-8
    with named(what, CONTROL):
        lengths = torch.zeros(ranks, dtype=torch.int64, device=device)
        lengths[rank] = len(content)
        dist.all_reduce(lengths, group=group)
        texts = torch.zeros(ranks, max(1, int(lengths.max())), dtype=torch.int64, device=device)
        texts[rank, : len(content)] = torch.tensor([*content], dtype=torch.int64)
        dist.all_reduce(texts, group=group)
    rows = zip(texts.tolist(), lengths.tolist(), strict=True)
    return [bytes(row[:length]).decode(errors="surrogatepass") for row, length in rows]
