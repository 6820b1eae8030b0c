"""Memory that ranks of a host share: an anonymous file that one of them makes (`memfd_create`) and the others open.

They open it through /proc: it has no name in any folder, only its user may open it, and the kernel frees it when the
last of the processes ends, for whatever reason.
"""

import errno
import mmap
import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress

import torch
from torch import Tensor

from distlab.comm.transports.signals import Channel, close_all, make_pipes, open_channel

ALIGNED_BYTES = 4096  # parts begin at pages
HUGE_BYTES = 2 << 20  # of a huge page, where pages have 4 kB
SMALLEST_HUGE_BYTES = HUGE_BYTES // 4  # a smaller part is not worth one
MADV_COLLAPSE = 25  # of Linux 6.1
NOT_REACHED = -1  # in place of an error number: another host, user or container


class NotShared(Exception):
    """The ranks cannot share memory; all of them raise this."""


class Mapping(mmap.mmap):
    """Shared memory in parts, all of one size.

    Parts of whole huge pages lie in such pages, if Linux has some. That needs addresses that are as far from a multiple
    of a huge page as their places in the file. As the address is known last, the file has a huge page of unused space
    before and after the parts, for which no memory is reserved.
    """

    part_bytes: int
    parts: int
    start: int  # of the first part, from the beginning of the mapping
    address: int  # of the first part

    @classmethod
    def of(cls, descriptor: int, part_bytes: int, parts: int) -> "Mapping":
        first, size = first_part(part_bytes), part_bytes * parts
        mapping, offset = cls(descriptor, first + size), 0
        if first:
            offset = mapping._begin() % HUGE_BYTES
            mapping.close()
            mapping = cls(descriptor, first + size, offset=offset)  # has the same address now, if it is free
        mapping.part_bytes, mapping.parts, mapping.start = part_bytes, parts, first - offset
        mapping.address = mapping._begin() + mapping.start
        return mapping

    def _begin(self) -> int:
        return torch.frombuffer(self, dtype=torch.uint8).data_ptr()

    def place_of(self, number: int) -> int:
        """Return the offset of a part from the beginning of the mapping."""
        return self.start + number * self.part_bytes

    def part(self, number: int, like: Tensor, offset_bytes: int = 0) -> Tensor:
        """Return the tensor at an offset of a part, with the size and dtype of `like`: (elements,)."""
        assert offset_bytes + like.nbytes <= self.part_bytes, f"{like.nbytes} bytes in a part of {self.part_bytes}"
        return torch.frombuffer(self, dtype=like.dtype, count=like.numel(), offset=self.place_of(number) + offset_bytes)

    def reserve(self, descriptor: int, parts: range) -> None:
        """Reserve memory for these parts of the file, in huge pages if they begin at one; `OSError` if none is left.

        Without the reservation, the first use would end the process (SIGBUS) if no memory were left.
        """
        if not parts:
            return
        first, length = first_part(self.part_bytes), len(parts) * self.part_bytes
        begin = first + parts.start * self.part_bytes
        if first:
            for page in range(begin, begin + length, HUGE_BYTES):  # pages are collapsed only where there are some
                os.posix_fallocate(descriptor, page, 1)
            with suppress(OSError):  # an earlier Linux, or one that denies huge pages, or none is left
                self.madvise(MADV_COLLAPSE, self.place_of(parts.start), length)
        os.posix_fallocate(descriptor, begin, length)


def first_part(part_bytes: int) -> int:
    """Return the offset in a file at which parts of this size begin."""
    return 0 if part_bytes % HUGE_BYTES else HUGE_BYTES


class Offer:
    """A rank's offer to others: an anonymous file with room for all parts, and two pipes to each rank.

    Args:
        room_bytes: the least size of a part.
        pipes_to: number of ranks that get pipes; 0 if they have some already.
        huge: whether parts that are not small are rounded up to whole huge pages.

    Attributes:
        numbers: the numbers by which the others find it: process, descriptor, token, bytes of a part, parts; and the
            ends of the pipes, two for each rank. After an error, 0 and its number replace process and descriptor.
        channels: this rank's ends of the pipes, by rank.
    """

    def __init__(self, room_bytes: int, parts: int, pipes_to: int, huge: bool = False) -> None:
        aligned_bytes = HUGE_BYTES if huge and room_bytes >= SMALLEST_HUGE_BYTES else ALIGNED_BYTES
        part_bytes = -(-room_bytes // aligned_bytes) * aligned_bytes
        self.channels: list[Channel] = []
        self._open: list[int] = []  # descriptors: of the file, and of the others' ends of the pipes
        token = secrets.randbits(62)
        try:
            descriptor = os.memfd_create(_name(token), os.MFD_CLOEXEC)
            self._open.append(descriptor)
            os.fchmod(descriptor, 0o600)
            os.ftruncate(descriptor, part_bytes * parts + 2 * first_part(part_bytes))
            self.channels, far_ends = make_pipes(pipes_to)
        except (OSError, AttributeError) as error:  # a limit, as on the size of files; or a system other than Linux
            failure = getattr(error, "errno", None) or errno.ENOSYS
            self.numbers = [0, failure, 0, part_bytes, parts, *[0] * (2 * pipes_to)]
            return
        self._open += far_ends
        self.numbers = [os.getpid(), descriptor, token, part_bytes, parts, *far_ends]

    def withdraw(self) -> None:
        """Close the file, and the others' ends of the pipes, all of which the others have opened by now."""
        while self._open:
            os.close(self._open.pop())


def accept(numbers: Sequence[int], reserved: range, pipes: int | None) -> tuple[int, Mapping | None, list[Channel]]:
    """Open and map a rank's offer; the offering rank also calls this.

    Args:
        numbers: the numbers of the offer.
        reserved: the parts that this rank reserves.
        pipes: which of the offer's pairs of pipes to open, if any.

    Returns:
        0 or an error's number, the mapping (None only after an error), and the pipes opened, if any.
    """
    process, number, token, part_bytes, parts, *ends = numbers
    if not process:
        return number, None, []
    path, own = f"/proc/{process}/fd/{number}", -1
    try:
        if os.readlink(path) != f"/memfd:{_name(token)} (deleted)":  # another host's process of that number
            return NOT_REACHED, None, []
        own = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        mapping = Mapping.of(own, part_bytes, parts)
        mapping.reserve(own, reserved)
        channels = [] if pipes is None else [open_channel(process, *ends[2 * pipes : 2 * pipes + 2])]
        return 0, mapping, channels
    except (FileNotFoundError, PermissionError):
        return NOT_REACHED, None, []
    except OSError as error:
        return error.errno or NOT_REACHED, None, []
    finally:
        if own >= 0:
            os.close(own)


def share(
    rank: int,
    room_bytes: int,
    parts: int,
    reserved: range,
    pipes_to: int,
    tell: Callable[[Tensor], object],
    worst: Callable[[int], int],
    huge: bool = False,
) -> tuple[Mapping, list[Channel]]:
    """Return memory that ranks share, and this rank's new channels; all ranks, numbered from 0, call it together.

    Args:
        room_bytes, parts, reserved, huge: as in `Offer`, which rank 0 makes, and `accept`.
        pipes_to: number of ranks that get channels to rank 0: all others, or none.
        tell: send a tensor from rank 0 to the others, which fill theirs with it.
        worst: exchange the error numbers of all ranks, and return one of them, or 0 if there is no error.

    Raises:
        NotShared: on all ranks, if one of them cannot make or map the memory.
    """
    offer = Offer(room_bytes, parts, pipes_to, huge) if rank == 0 else None
    opened = offer.channels if offer else []
    with ExitStack() as if_it_fails:
        if_it_fails.callback(close_all, opened)
        try:
            numbers = torch.zeros(5 + 2 * pipes_to, dtype=torch.int64)
            if offer:
                problem, mapping, _ = accept(offer.numbers, reserved, pipes=None)
                numbers = torch.tensor([0, problem, *offer.numbers[2:]] if problem else offer.numbers)
            tell(numbers)
            if not offer:
                problem, mapping, channels = accept(numbers.tolist(), reserved, rank - 1 if pipes_to else None)
                opened += channels
            problem = worst(problem)
        finally:
            if offer:
                offer.withdraw()
        if problem or mapping is None:
            raise _not_shared(problem, parts * room_bytes)
        if_it_fails.pop_all()
    return mapping, opened


def _name(token: int) -> str:
    return f"lab-{token:016x}"


def _not_shared(code: int, total_bytes: int) -> NotShared:
    """Return the exception that the ranks raise if one of them has an error of this number."""
    if code == NOT_REACHED:
        return NotShared("a rank cannot open the memory of another, of a different user or container")
    return NotShared(f"no {total_bytes / 1e6:,.1f} MB of shared memory: {os.strerror(code)}")
