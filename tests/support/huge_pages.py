"""The tests' own memory in huge pages: a fork copies the page tables of its parent, which has hundreds of MB."""

import ctypes
import re
from pathlib import Path

HUGE = 2 << 20  # bytes
MADV_COLLAPSE = 25  # of Linux 6.1
PRIVATE = re.compile(r"([0-9a-f]+)-([0-9a-f]+) rw-p 0+ 00:00 0 *(\[heap\])?$")


def gather_in_huge_pages() -> None:
    """Put what this process has written so far in huge pages, where Linux has them: then a fork takes a quarter."""
    try:
        madvise = ctypes.CDLL(None).madvise
        regions = [PRIVATE.match(line) for line in Path("/proc/self/maps").read_text().splitlines()]
    except (OSError, AttributeError):
        return
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for start, end in ((int(region[1], 16), int(region[2], 16)) for region in regions if region):
        for address in range(-(-start // HUGE) * HUGE, end - HUGE + 1, HUGE):
            madvise(address, HUGE, MADV_COLLAPSE)  # an error is of no matter: they stay as they are
