"""The memory itself: whose it is, how long it is there, and what happens when it cannot be had."""

import errno
import gc
import itertools
import mmap
import os
import platform
import re
import resource
import signal
import stat
import struct
import time
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from support.processes import before_forks, collect_before_a_fork, free_port, process_group, run_ranks, wait_for
from support.refusals import refuse
from torch.distributed import ReduceOp

from distlab.comm.context import Options, TransportName
from distlab.comm.group import empty, shares
from distlab.comm.transports.mappings import HUGE_BYTES, Mapping, Offer, accept
from distlab_exercises.forked import forked
from simplellm.errors import InputError


def test_a_limit_on_the_size_of_files_between_one_part_and_all_of_them_offers_nothing() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_500_000, hard))
    try:
        offer = Offer(1_000_000, 2, pipes_to=0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert accept(offer.numbers, reserved=range(1), pipes=None) == (errno.EFBIG, None, [])
    offer.withdraw()


def look_at_the_mapping(rank: int, port: int) -> tuple[list[str], set[int], int]:
    """The lines in /proc that are gone without a mapping's tensor, the modes of all mappings, the bytes of this one."""
    modes = set()
    reserve = os.posix_fallocate

    def reserve_and_look(descriptor: int, offset: int, length: int) -> None:
        modes.add(os.fstat(descriptor).st_mode)
        reserve(descriptor, offset, length)

    def mapped() -> list[str]:
        gc.collect()
        return [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd" in line]

    with process_group(rank, 2, port), pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(os, "posix_fallocate", reserve_and_look)
        buffer = empty(100_000, torch.empty(0))
        lines = mapped()
        del buffer
        gone = sorted({*lines} - {*mapped()})
        begin, end = (int(address, 16) for address in gone[0].split()[0].split("-"))
        return gone, modes, end - begin


def test_the_mapping_has_no_name_is_its_users_own_and_goes_with_its_last_tensor() -> None:
    for lines, modes, size_bytes in run_ranks(2, look_at_the_mapping, free_port()):
        assert len(lines) == 1
        assert lines[0].endswith("(deleted)")
        assert {stat.S_IMODE(mode) for mode in modes} == {0o600}
        assert size_bytes == 2 * 401_408, "two parts, each of whole pages"


def both_ends(room_bytes: int, huge: bool = True) -> tuple[Mapping, Mapping]:
    """What a rank offers, mapped twice, as by two ranks of which each reserves a part."""
    offer = Offer(room_bytes, 2, pipes_to=0, huge=huge)
    ends = [accept(offer.numbers, range(rank, rank + 1), pipes=None)[1] for rank in range(2)]
    offer.withdraw()
    assert ends[0] is not None
    assert ends[1] is not None
    return ends[0], ends[1]


def huge_megabytes() -> int:
    gc.collect()  # other tests' mappings
    return int(re.findall(r"ShmemPmdMapped: *([0-9]+) kB", Path("/proc/self/smaps_rollup").read_text())[0]) >> 10


def is_written_by_one_and_read_by_the_other(one: Mapping, other: Mapping, elements: int) -> bool:
    for part in range(2):
        one.part(part, torch.empty(elements)).copy_(torch.arange(elements) + part)
    parts = [other.part(part, torch.empty(elements)) for part in range(2)]
    firsts = [struct.unpack_from("f", other, other.place_of(part)) for part in range(2)]
    return firsts == [(0.0,), (1.0,)] and all(torch.equal(parts[p], torch.arange(elements) + p) for p in range(2))


@pytest.mark.parametrize("huge", [False, True])
@pytest.mark.parametrize("elements", [1000, 131_072, 524_288, 1_500_000])  # of 4 bytes
def test_both_ends_of_a_mapping_find_the_same_in_its_parts(elements: int, huge: bool) -> None:
    assert is_written_by_one_and_read_by_the_other(*both_ends(4 * elements, huge), elements)


@pytest.mark.parametrize("room_bytes", [100_000, 6_000_000])
@pytest.mark.parametrize("parts", [range(1), range(1, 4)])
def test_memory_is_reserved_for_all_parts_of_a_rank(parts: range, room_bytes: int) -> None:
    offer = Offer(room_bytes, 4, pipes_to=0, huge=True)
    _, descriptor, _, part_bytes, *_ = offer.numbers
    problem, mapping, _ = accept(offer.numbers, parts, pipes=None)
    assert problem == 0
    assert mapping is not None
    assert os.fstat(descriptor).st_blocks * 512 >= len(parts) * part_bytes
    offer.withdraw()


def test_a_mapping_at_another_address_than_hoped_for_has_the_same_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, calls = Mapping._begin, itertools.count()

    def a_page_further_at_first(mapping: Mapping) -> int:
        return begin(mapping) + (mmap.PAGESIZE if next(calls) % 2 == 0 else 0)

    monkeypatch.setattr(Mapping, "_begin", a_page_further_at_first)
    assert is_written_by_one_and_read_by_the_other(*both_ends(6_000_000), 1_500_000)
    assert next(calls) == 4


SHARED_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")


@pytest.mark.skipif(
    not SHARED_HUGE_PAGES.exists()
    or "[deny]" in SHARED_HUGE_PAGES.read_text()
    or tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1)
    or platform.machine() != "x86_64",
    reason="needs Linux 6.1, with huge pages of 2 MB that are not denied",
)
def test_parts_that_are_not_small_lie_in_huge_pages_of_both_ranks() -> None:
    before = huge_megabytes()
    one, other = both_ends(6_000_000)
    assert one.address % HUGE_BYTES == other.address % HUGE_BYTES == 0
    assert is_written_by_one_and_read_by_the_other(one, other, 1_500_000)
    assert huge_megabytes() - before == 2 * 2 * 6, "two parts of three pages, in two mappings"


NOBODY = 65534


def opened_by(user: int, offer: Offer, descriptor: int) -> tuple[bool, bool]:
    """Whether a process of this user can accept an offer, and open the offered memory by a path that it may look up."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)  # the deadline
            os.setgroups([])
            os.setresgid(user, user, user)
            os.setresuid(user, user, user)
            _, mapping, _ = accept(offer.numbers, range(0), None)
            try:
                os.open(f"/proc/self/fd/{descriptor}", os.O_RDONLY)  # the fork has inherited the descriptor
                is_open = True
            except PermissionError:
                is_open = False
            os.write(writes, bytes([mapping is not None, is_open]))
        finally:
            os._exit(0)
    os.close(writes)
    answer = os.read(reads, 2)
    os.close(reads)
    os.waitpid(child, 0)
    accepted, is_open = map(bool, answer)
    return accepted, is_open


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_open_the_memory() -> None:
    offer = Offer(1000, 2, pipes_to=0)
    try:
        assert opened_by(0, offer, offer.numbers[1]) == (True, True)
        assert opened_by(NOBODY, offer, offer.numbers[1]) == (False, False)
    finally:
        offer.withdraw()


def shared_bytes() -> int:
    """The memory of this host that is shared, as the kernel counts it."""
    [line] = [line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("Shmem:")]
    return 1024 * int(line.split()[1])


def hold(port: int, rank: int, pipe: Connection) -> None:
    """Fill this rank's part of shared memory, say so, and wait to be killed."""
    with process_group(rank, 2, port):
        buffer = empty(HELD_BYTES // 8, torch.ones(0))
        assert shares(buffer.fill_(rank))
        pipe.send(True)
        time.sleep(60)


HELD_BYTES = 400_000_000  # more than anything else on the machine takes or gives back meanwhile


@pytest.mark.alone
def test_nothing_is_left_of_the_memory_when_all_ranks_have_been_killed() -> None:
    before_forks()
    collect_before_a_fork()
    before = shared_bytes()
    with forked(2, partial(hold, free_port())) as pipes:
        for pipe in pipes:
            assert pipe.poll(30)
            assert pipe.recv()
        assert shared_bytes() > before + HELD_BYTES * 3 // 4
    assert wait_for(lambda: shared_bytes() < before + HELD_BYTES // 4, 10)


def do_without(rank: int, port: int, call: str, error: int, transport: TransportName) -> tuple[float, list[str], str]:
    """The average of two ranks of which one is refused memory, what was remarked, and an error."""
    remarks: list[str] = []
    options = Options(transport=transport, remark=remarks.append)
    with process_group(rank, 2, port, options=options), pytest.MonkeyPatch.context() as monkeypatch:
        before = [empty(100_000, torch.empty(0))] if call == "posix_fallocate" else []
        refused = Mock(side_effect=refuse(error))
        monkeypatch.setattr(os, call, refused if rank == (call != "memfd_create") else getattr(os, call))
        try:
            buffer = empty(100_000, torch.empty(0))
        except InputError as refusal:
            return 0, remarks, str(refusal)
        assert [shares(b) for b in (*before, buffer)] == [True] * len(before) + [False]
        attempts = refused.call_count
        later = empty(100_000, torch.empty(0)), empty(100_000, torch.empty(0), dist.new_group([0, 1]))
        assert refused.call_count <= attempts + 1, "only the new group tries again"
        for b in (*before, buffer, *later):  # one remark, not three
            b[:] = rank
            dist.all_reduce(b, ReduceOp.AVG)
            assert b[-1] == 0.5
        return buffer[-1].item(), remarks, ""


@pytest.mark.parametrize(
    ("call", "error", "why"),
    [
        ("posix_fallocate", errno.ENOSPC, "no 0.8 MB of shared memory: No space left on device"),
        ("memfd_create", errno.EMFILE, "no 0.8 MB of shared memory: Too many open files"),
        ("readlink", errno.EACCES, "a rank cannot open the memory of another, of a different user or container"),
    ],
)
def test_without_memory_it_goes_over_gloo_and_says_so(call: str, error: int, why: str) -> None:
    first, second = run_ranks(2, do_without, free_port(), call, error, "auto")
    assert first == (0.5, [f"{why}; what these ranks cannot share goes over gloo instead"], "")
    assert second == (0.5, [], "")


def test_without_memory_a_run_that_asks_for_it_ends_on_all_ranks() -> None:
    for ended in run_ranks(2, do_without, free_port(), "posix_fallocate", errno.ENOMEM, "shared"):
        assert ended[2] == (
            "--transport shared: no 0.8 MB of shared memory: Cannot allocate memory; use --transport gloo"
        )
