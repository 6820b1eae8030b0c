"""Waits of a script: named by the operation, the peers and the line, with an end and a sentence."""

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from typing import Any

import pytest
import torch
import torch.distributed as dist
import typing_extensions
from support.processes import free_port, join, meeting_of, run_ranks

from distlab.comm.context import Options, TransportName
from distlab.comm.group import all_gather_single, empty, reduce_scatter_single
from distlab.comm.names import line_of_script, named
from distlab.comm.waits import TrafficError

SCRIPT = """
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp


def shout(tensor):
    dist.{call}


shout(torch.ones(2000))
"""
CALLS = {
    "send(tensor, 1)": "send to rank 1",
    "recv(tensor, 1)": "recv from rank 1",
    "recv(tensor)": "recv from any rank",
    "all_reduce(tensor)": "all_reduce from ranks 1 and 2",
    "all_reduce(tensor, group=PAIR)": "all_reduce from rank 2",
    "broadcast(tensor, 1)": "broadcast of rank 1 from ranks 1 and 2",
    "broadcast(tensor, 2, group=PAIR)": "broadcast of rank 2 from rank 2",  # its rank 1
    "reduce(tensor, 0)": "reduce from ranks 1 and 2",
    "barrier()": "barrier from ranks 1 and 2",
    "all_gather_object([None] * 3, tensor)": "all_gather from ranks 1 and 2",
}


def run_script(rank: int, port: int, end: Barrier, call: str, transport: TransportName) -> str:
    """What rank 0 says when it runs a script that waits for ranks which are silent."""
    context = join(rank, 3, port, options=Options(transport=transport))
    pair = dist.new_group([0, 2])
    dist.all_reduce(torch.ones(2000))  # which makes shared memory
    if rank != 1:
        dist.all_reduce(torch.ones(2000), group=pair)
    dist.barrier()
    said = ""
    if rank == 0:
        context.waits.timeout_seconds = 0.3
        program = compile(SCRIPT.format(call=call), "/home/someone/plain.py", "exec")
        with pytest.raises(TrafficError) as caught:
            exec(program, {"PAIR": pair})  # noqa: S102
        said = str(caught.value)
    end.wait(20)  # less than the usual timeout
    return said


@pytest.mark.parametrize(
    ("call", "transport"),
    [(call, "gloo") for call in CALLS] + [("all_reduce(tensor)", "shared"), ("broadcast(tensor, 1)", "shared")],
)
def test_a_wait_of_a_plain_script_is_named_by_operation_peers_and_line(call: str, transport: TransportName) -> None:
    sentence, *_ = run_ranks(3, run_script, free_port(), meeting_of(3), call, transport)
    expected = rf"rank 0 waited (\d+\.\d) s for {CALLS[call]}, plain\.py line 8: no answer .*"
    found = re.fullmatch(expected, sentence)
    assert found, sentence
    assert float(found[1]) >= 0.3


@contextlib.contextmanager
def some_context() -> Iterator[None]:
    yield


DECORATED = {
    "deprecated": typing_extensions.deprecated("as in torch")(line_of_script),
    "in a context": some_context()(line_of_script),
}


@pytest.mark.filterwarnings("ignore:as in torch")
@pytest.mark.parametrize("kind", DECORATED)
def test_a_decorated_function_is_named_by_the_line_that_calls_it(kind: str) -> None:
    program = compile("\n\nLINE = function()", "/home/someone/plain.py", "exec")
    names: dict[str, object] = {"function": DECORATED[kind]}
    exec(program, names)  # noqa: S102
    assert names["LINE"] == "plain.py line 3"


def lose_a_rank(rank: int, port: int, begin: Callable[[], Any]) -> tuple[str, float]:
    join(rank, 2, port)
    dist.barrier()
    if rank == 1:
        return "", 0.0  # and the process ends
    started = time.monotonic()
    with pytest.raises(TrafficError) as caught, named("the weights", "weights"):
        begin()
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    "begin",
    [
        lambda: dist.all_reduce(torch.zeros(4)),
        lambda: all_gather_single(torch.zeros(2, 4), torch.zeros(4)),
        lambda: reduce_scatter_single(torch.zeros(4), torch.zeros(2, 4)),
        lambda: dist.recv(torch.zeros(4), 1),
        lambda: empty(100_000, torch.zeros(0)),
    ],
)
def test_a_wait_ends_at_once_when_the_other_rank_is_gone(begin: Callable[[], Any]) -> None:
    (message, seconds), _ = run_ranks(2, lose_a_rank, free_port(), begin)
    assert re.search("for (the weights from rank 1|shared memory): a rank has exited", message), message
    assert seconds < 10
